"""How a payload names its rows (docs/explanation/wire-format.md): int32 numbers, a bitmap or an Elias-Fano code."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.kernels import EliasFano
from thinwire.kernels.memory import constant
from thinwire.payloads.wire import BITMAP, ELIAS_FANO, NUMBERS, padded
from thinwire.waits import known, on_host, refuse_if

LARGEST_SPACE = 2**31 - 1
"""The largest int32 number."""


def length(coding: int, count: int, space: int) -> int:
    """Return how many bytes name `count` of `space` rows."""
    return {NUMBERS: 4 * count, BITMAP: -(-space // 8), ELIAS_FANO: EliasFano.of(count, space).nbytes}[coding]


def nbytes(coding: int, count: int, space: int) -> int:
    """Return the same, padding included."""
    return padded(length(coding, count, space))


def shortest(count: int, space: int, codings: tuple[int, ...]) -> int:
    """Return the shortest of `codings`; on a tie, the one with the lowest code."""
    return min(codings, key=lambda coding: (nbytes(coding, count, space), coding))


def section(coding: int, keys: Tensor, space: int, *, least: int | None = None) -> Tensor:
    """Return the section that names rows by `keys` (int32). On the host, raise PayloadError if they do not suit.

    On a GPU the host would have to wait for them, and receivers check anyway.
    """
    if on_host(keys):
        checked(keys[None], (0, space), least)
    if coding == NUMBERS:
        return keys
    if coding == ELIAS_FANO:
        return kernels.elias_fano_encode(keys, space)
    bits = torch.zeros(space, dtype=torch.uint8, device=keys.device)
    return kernels.pack_bits(bits.index_fill_(0, keys.long(), 1), 1)


def read(
    coding: int,
    rows: Tensor,
    count: int,
    space: int,
    *,
    least: int | None = None,
    edges: Sequence[int] = (),
) -> Tensor:
    """Read the keys, int32 (ranks, count), from the ranks' sections, whose padding was checked.

    They lie within `edges`, by default in [0, space), and ascend as `kernels.misplaced` says. Raises PayloadError when
    malformed.
    """
    keys = decoded(coding, rows, count, space)
    said = None
    if coding == ELIAS_FANO:
        said = f"a section of {rows.shape[1]} bytes is not the Elias-Fano code of {count} numbers below {space}"
    return checked(keys, edges or (0, space), least, partial(_malformed, keys, edges or (0, space), space, said))


def decoded(coding: int, rows: Tensor, count: int, space: int) -> Tensor:
    """Return the keys as they are: −1 for those that a code does not have."""
    if coding == ELIAS_FANO:
        return kernels.elias_fano_decode_rows(rows, count, space)
    if coding == BITMAP:
        return torch.stack([_bitmap(row, count) for row in rows])
    return rows[:, : 4 * count].contiguous().view(torch.int32).view(rows.shape[0], count)


def checked(
    keys: Tensor, edges: Sequence[int], least: int | None, error: Callable[[], PayloadError] | None = None
) -> Tensor:
    """Return integers (rows, n) that are as `kernels.misplaced` wants them; if faults are only noted, moved inside.

    Raises what `error` returns otherwise.
    """
    if not keys.numel():
        return keys
    wrong = kernels.misplaced(keys, constant(tuple(edges), keys.dtype, keys.device), least)
    if refuse_if(wrong, error or partial(_malformed, keys, edges, edges[-1], None)):
        return keys.clamp(0, max(0, edges[-1] - 1))
    return keys


def _malformed(keys: Tensor, edges: Sequence[int], space: int, code: str | None) -> PayloadError:
    low, high = map(int, torch.aminmax(keys))
    if code and low < 0:
        return PayloadError(code)
    if low < 0 or high >= space:
        return PayloadError(f"indices reach from {low} to {high}; expected 0 to {space - 1}")
    places = torch.searchsorted(torch.tensor(edges, dtype=keys.dtype), keys.cpu().contiguous(), right=True)
    if outside := int((places % 2 == 0).sum()):
        return PayloadError(f"{outside} of {keys.numel()} indices lie outside the payload's regions")
    return PayloadError("indices do not ascend; declare another order with ascending=False or seeds")


def _bitmap(row: Tensor, count: int) -> Tensor:
    # Bits beyond the space are padding. If one is set, it reads as a key out of range.
    keys, found = kernels.ones(kernels.unpack_bits(row, 8 * row.numel(), 1, torch.uint8), count)
    refuse_if(known(found) != count, lambda: PayloadError(f"a bitmap names {int(found)} rows; expected {count}"))
    return keys
