"""The exponents of bfloat16 numbers in a prefix code, block by block.

A number is int16 `x` (n): a sign, 8 bits of exponent and 7 of mantissa. The sign and the mantissa are a byte of `rest`.
The codes of the exponents of each block of `CODED` numbers begin at a byte, and blocks follow one another. Codes are of
1 to `LONGEST` bits, and the first bit of a code comes first, in the code and in the byte.
"""

import torch
from torch import Tensor

CODED = 512
"""Numbers whose codes are read one after another: blocks are read side by side."""
LONGEST = 12
_BITS = 16


def exponents_count(x: Tensor) -> Tensor:
    """Return how often each exponent occurs: int64 (256)."""
    return torch.bincount((x.to(torch.int32) >> 7) & 0xFF, minlength=256)


def exponents_encode(x: Tensor, codes: Tensor, nbytes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `rest` (uint8, n), how many bits each block takes (int16), and the blocks: uint8 (`nbytes`), zeros behind.

    `codes` (int32, 256) has a code, and from bit 16 on its length. All of x is in the code, and `nbytes` have room for
    it.
    """
    wide = x.to(torch.int32)
    entries = codes[(wide >> 7) & 0xFF]
    lengths = torch.nn.functional.pad(entries >> _BITS, (0, -x.numel() % CODED)).view(-1, CODED)
    ends = lengths.cumsum(1, dtype=torch.int64)
    starts = starts_of(ends[:, -1]) if len(ends) else ends
    at = (8 * starts[:, None] + ends - lengths).view(-1)[: x.numel()]
    words = torch.zeros(nbytes // 4 + 2, dtype=torch.int64, device=x.device)
    shifted = (entries & 0xFFFF).to(torch.int64) << (at & 31)
    words.index_add_(0, at >> 5, shifted & 0xFFFFFFFF)  # of bits that lie apart, the sum is the union
    words.index_add_(0, (at >> 5) + 1, shifted >> 32)
    rest = ((wide & 0x7F) | ((wide >> 8) & 0x80)).to(torch.uint8)
    return rest, lengths.sum(1, dtype=torch.int16), words.to(torch.int32).view(torch.uint8)[:nbytes]


def exponents_decode(out: Tensor, rest: Tensor, sizes: Tensor, stream: Tensor, table: Tensor) -> Tensor:
    """Write the numbers (int16, n) to `out`. Return, bool (0-dim), whether every block ends where it should.

    `table` (int16, 2^LONGEST) has, for the next bits, the exponent and from bit 8 on its code's length, at least 1. Any
    bytes may be given: nothing is read beyond them.
    """
    blocks, count = sizes.numel(), out.numel()
    if not count:
        return torch.ones((), dtype=torch.bool, device=out.device)
    sizes = sizes.to(torch.int64)
    starts = 8 * starts_of(sizes.clamp(min=0))
    data = torch.nn.functional.pad(stream, (0, 3)).to(torch.int32)
    at, symbols = starts.clone(), torch.empty(CODED, blocks, dtype=torch.int32, device=out.device)
    places = CODED * torch.arange(blocks, device=out.device)
    for i in range(CODED):
        byte = (at >> 3).clamp(max=stream.numel())
        window = (data[byte] | data[byte + 1] << 8 | data[byte + 2] << 16) >> (at & 7)
        entry = table[window & ((1 << LONGEST) - 1)].to(torch.int32)
        symbols[i] = entry & 0xFF
        at += torch.where(places + i < count, entry >> 8, 0)
    exponents = symbols.t().reshape(-1)[:count]
    wide = rest.to(torch.int32)
    out.copy_((wide & 0x7F) | exponents << 7 | (wide & 0x80) << 8)
    return (at == starts + sizes).all() & ((at[-1] + 7) >> 3 <= stream.numel())


def starts_of(sizes: Tensor) -> Tensor:
    """Return at which byte blocks of so many bits begin."""
    nbytes = (sizes + 7) >> 3
    return nbytes.cumsum(0) - nbytes
