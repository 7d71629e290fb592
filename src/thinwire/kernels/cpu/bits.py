"""Codes of a few bits, laid behind one another."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.ranges import map_ranges
from thinwire.kernels.loops import bits as loops

_NUMPY: dict[torch.dtype, Any] = {torch.uint8: np.uint8, torch.int16: np.int16, torch.int32: np.int32}


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """See `reference.pack_bits`; at 8 bits uint8 codes are the result themselves."""
    if bits == 8:
        return codes.to(torch.uint8)
    nbytes = -(-codes.numel() * bits // 8)
    words = np.empty(-(-nbytes // 4), np.dtype("<u4"))
    map_ranges(lambda lo, hi: loops.pack_bits(codes.numpy(), bits, lo, hi, words), codes.numel(), align=32)
    return torch.from_numpy(words.view(np.uint8)[:nbytes])


def unpack_bits(buffer: Tensor, count: int, bits: int, dtype: torch.dtype = torch.int16) -> Tensor:
    """See `reference.unpack_bits`; at 8 bits uint8 codes are a view."""
    if bits == 8:
        return buffer[:count].to(dtype)
    codes = np.empty(count, _NUMPY[dtype])
    map_ranges(lambda lo, hi: loops.unpack_bits(buffer.numpy(), bits, lo, hi, codes), count, align=32)
    return torch.from_numpy(codes)
