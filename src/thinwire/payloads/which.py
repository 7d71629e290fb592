"""Which rows of a table follow: a bit for each, or the int32 numbers of some, whichever is shorter."""

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.payloads import wire


def nbytes(count: int, space: int) -> int:
    """Return the length of the section that names `count` of `space` rows, padding included."""
    return min(_numbers_bytes(count), _bitmap_bytes(space))


def section(keys: Tensor, space: int) -> Tensor:
    """Return the section that names rows by `keys` (int32, ascending)."""
    if not _is_bitmap(keys.numel(), space):
        return keys
    bits = torch.zeros(space, dtype=torch.int16, device=keys.device)
    bits[keys] = 1
    return kernels.integer_backend(bits).pack_bits(bits, 1)


def read(rows: Tensor, count: int, space: int) -> Tensor:
    """Return the keys (int32) in sections of several ranks, one after the other. Raises PayloadError."""
    if not _is_bitmap(count, space):
        keys = rows[:, : 4 * count].reshape(-1).view(torch.int32)
        wire.check_range(keys, space)
        return keys
    found = [_named(row[: -(-space // 8)].contiguous(), space) for row in rows]
    if any(keys.numel() != count for keys in found):
        raise PayloadError(f"bitmaps name {[keys.numel() for keys in found]} blocks; expected {count} each")
    return torch.cat(found)


def _named(bits: Tensor, space: int) -> Tensor:
    return kernels.integer_backend(bits).unpack_bits(bits, space, 1).nonzero().view(-1).to(torch.int32)


def _is_bitmap(count: int, space: int) -> bool:
    return _bitmap_bytes(space) < _numbers_bytes(count)


def _bitmap_bytes(space: int) -> int:
    return wire.padded(-(-space // 8))


def _numbers_bytes(count: int) -> int:
    return wire.padded(4 * count)
