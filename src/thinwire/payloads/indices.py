"""How a payload names its rows (docs/explanation/wire-format.md): int32 numbers, a bitmap or an Elias-Fano code."""

from functools import partial

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.kernels import EliasFano
from thinwire.payloads import wire
from thinwire.payloads.wire import BITMAP, ELIAS_FANO, NUMBERS
from thinwire.waits import known, on_host, refuse_if

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
    """Return the section that names rows by `keys` (int32), or raise PayloadError if they do not suit the coding."""
    if is_cheap_to_check(keys):
        within(keys, space)
    if coding == NUMBERS:
        return keys
    if coding == ELIAS_FANO:
        return kernels.elias_fano_encode(keys, space)
    bits = torch.zeros(space, dtype=torch.uint8, device=keys.device)
    return kernels.pack_bits(bits.index_fill_(0, keys.long(), 1), 1)


def read(coding: int, rows: Tensor, count: int, space: int) -> Tensor:
    """Read the keys, int32 (ranks, count), from the ranks' sections. Raises PayloadError when malformed."""
    if coding == ELIAS_FANO:
        return _elias_fano(rows, count, space)
    if coding == BITMAP:
        return torch.stack([_bitmap(row, count, space) for row in rows])
    wire.check_padding(rows, 4 * count)
    return within(rows[:, : 4 * count].contiguous().view(torch.int32).view(rows.shape[0], count), space)


def is_cheap_to_check(keys: Tensor) -> bool:
    """Whether a sender checks its own keys. On a GPU it would have to wait for them, and receivers check anyway."""
    return on_host(keys)


def within(keys: Tensor, space: int) -> Tensor:
    """Return the keys. Raises PayloadError unless all are in [0, space). If only noted, they are moved there."""
    if not keys.numel():
        return keys
    low, high = map(known, torch.aminmax(keys))
    if refuse_if((low < 0) | (high >= space), partial(_out_of_range, low, high, space)):
        return keys.clamp(0, max(0, space - 1))
    return keys


def _out_of_range(low: Tensor | int, high: Tensor | int, space: int) -> PayloadError:
    return PayloadError(f"indices reach from {int(low)} to {int(high)}; expected 0 to {space - 1}")


def check_ascending(keys: Tensor, *, strictly: bool) -> None:
    """Raise PayloadError unless keys (…, count) ascend along the last dimension."""
    before, after = keys[..., :-1], keys[..., 1:]
    refuse_if((after <= before if strictly else after < before).any(), _descending)


def _descending() -> PayloadError:
    return PayloadError("indices do not ascend; declare another order with ascending=False or seeds")


def _elias_fano(rows: Tensor, count: int, space: int) -> Tensor:
    keys = kernels.elias_fano_decode_rows(rows, count, space)
    said = f"a section of {rows.shape[1]} bytes is not the Elias-Fano code of {count} numbers below {space}"
    if count and refuse_if((keys[:, 0] < 0).any(), lambda: PayloadError(said)):
        return keys.clamp(min=0)
    return keys


def _bitmap(row: Tensor, count: int, space: int) -> Tensor:
    # Bits beyond the space are padding. If one is set, it reads as a key out of range.
    bits = kernels.unpack_bits(row, 8 * row.numel(), 1, torch.uint8)
    keys, found = kernels.ones(bits, count)
    refuse_if(known(found) != count, lambda: PayloadError(f"a bitmap names {int(found)} rows; expected {count}"))
    return within(keys, space)
