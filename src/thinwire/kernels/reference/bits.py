"""Codes of a few bits, laid behind one another."""

import torch
from torch import Tensor


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Lay the low `bits` (1 to 31) of each code behind one another: uint8 (⌈n · bits / 8⌉), padded with zeros.

    Codes are uint8, int16 or int32. The least significant bit comes first, in the code and in the byte.
    """
    places = torch.arange(bits, dtype=torch.int32, device=codes.device)
    ones = ((codes.to(torch.int32)[:, None] >> places) & 1).to(torch.uint8).view(-1)
    ones = torch.nn.functional.pad(ones, (0, -ones.numel() % 8)).view(-1, 8)
    return (ones << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(1, dtype=torch.uint8)


def unpack_bits(buffer: Tensor, count: int, bits: int, dtype: torch.dtype = torch.int16) -> Tensor:
    """Return the `count` codes (not negative) that `pack_bits` laid into uint8 `buffer`, which may go on after them.

    `dtype` (uint8, int16 or int32) has room for `bits` bits.
    """
    places = torch.arange(8, dtype=torch.uint8, device=buffer.device)
    ones = ((buffer[: -(-count * bits // 8), None] >> places) & 1).view(-1)[: count * bits].view(count, bits)
    weights = torch.arange(bits, dtype=torch.int32, device=buffer.device)
    return (ones.to(torch.int32) << weights).sum(1, dtype=torch.int32).to(dtype)
