"""How a payload names its rows: by int32 numbers, a bitmap or an Elias-Fano code, whichever is shortest.

Equations, bytes and an example: docs/explanation/wire-format.md.
"""

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.kernels import EliasFano
from thinwire.payloads import wire
from thinwire.payloads.wire import BITMAP, ELIAS_FANO, NUMBERS

LARGEST_SPACE = 2**31 - 1
"""The largest int32 number."""


def nbytes(coding: int, count: int, space: int) -> int:
    """Return the length of the section, padding included, that names `count` of `space` rows."""
    return wire.padded(
        {NUMBERS: 4 * count, BITMAP: -(-space // 8), ELIAS_FANO: EliasFano.of(count, space).nbytes}[coding]
    )


def shortest(count: int, space: int, codings: tuple[int, ...]) -> int:
    """Return the shortest of `codings`; on a tie, the one with the lowest code."""
    return min(codings, key=lambda coding: (nbytes(coding, count, space), coding))


def section(coding: int, keys: Tensor, space: int) -> Tensor:
    """Return the section that names rows by `keys` (int32).

    For any coding but plain numbers they must ascend; for a bitmap, also without repeats. Raises PayloadError if a key
    is out of range.
    """
    if is_cheap_to_check(keys):
        check_range(keys, space)
    if coding == NUMBERS:
        return keys
    if coding == ELIAS_FANO:
        return kernels.elias_fano_encode(keys, space)
    bits = torch.zeros(space, dtype=torch.uint8, device=keys.device)
    bits[keys] = 1
    return kernels.pack_bits(bits, 1)


def read(coding: int, rows: Tensor, count: int, space: int) -> Tensor:
    """Read the keys, int32 (ranks, count), from the ranks' sections. Raises PayloadError when malformed."""
    if coding == ELIAS_FANO:
        return _elias_fano(rows, count, space)
    if coding == BITMAP:
        return torch.stack([_bitmap(row, count, space) for row in rows])
    wire.check_padding(rows, 4 * count)
    keys = rows[:, : 4 * count].contiguous().view(torch.int32).view(rows.shape[0], count)
    check_range(keys, space)
    return keys


def is_cheap_to_check(keys: Tensor) -> bool:
    """Whether a sender checks its own keys. On a GPU it would have to wait for them, and receivers check anyway."""
    return keys.device.type == "cpu"


def check_range(keys: Tensor, space: int) -> None:
    """Raise PayloadError unless all keys lie in [0, space)."""
    if keys.numel():
        low, high = (int(bound) for bound in torch.aminmax(keys))
        if low < 0 or high >= space:
            raise PayloadError(f"indices reach from {low} to {high}; expected 0 to {space - 1}")


def check_ascending(keys: Tensor, *, strictly: bool) -> None:
    """Raise PayloadError unless keys (…, count) ascend along the last dimension."""
    before, after = keys[..., :-1], keys[..., 1:]
    if bool((after <= before if strictly else after < before).any()):
        raise PayloadError("indices do not ascend; a payload in another order says so with ascending=False or seeds")


def _elias_fano(rows: Tensor, count: int, space: int) -> Tensor:
    keys = kernels.elias_fano_decode_rows(rows, count, space)
    if count and bool((keys[:, 0] < 0).any()):
        raise PayloadError(
            f"a section of {rows.shape[1]} bytes is not the Elias-Fano code of {count} numbers below {space}"
        )
    return keys


def _bitmap(row: Tensor, count: int, space: int) -> Tensor:
    # Bits beyond the space are padding. If one is set, it reads as a key out of range.
    bits = kernels.unpack_bits(row, 8 * row.numel(), 1, torch.uint8)
    keys: Tensor = bits.nonzero().view(-1).to(torch.int32)
    if keys.numel() != count:
        raise PayloadError(f"a bitmap names {keys.numel()} rows; expected {count}")
    check_range(keys, space)
    return keys
