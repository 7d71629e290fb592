"""Parameters without loss: exponents in a prefix code, signs and mantissas as they are.

Exponents of trained weights carry two or three bits, not eight. A Huffman code of at most twelve bits comes within a
few hundredths of a bit of that; see docs/explanation/wire-format.md.
"""

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.kernels.bits.reference import CODED, LONGEST
from thinwire.kernels.memory import sent
from thinwire.payloads import wire
from thinwire.waits import refuse_if

PREFIX = 1
"""The coding of a header: exponents are coded. With `wire.NUMBERS` they are not."""
_ABLE = {torch.bfloat16, torch.float32}
_LENGTHS = 128  # four bits for each exponent's length


def pack(x: Tensor) -> Tensor:
    """Return the bytes of a flat tensor: coded if it is bfloat16 or float32, and that is shorter. The host waits."""
    counts = kernels.exponents_count(_high(x)).tolist() if x.dtype in _ABLE and x.numel() else []
    lengths = code_lengths(counts)
    bits = sum(count * length for count, length in zip(counts, lengths, strict=True))
    blocks = -(-x.numel() // CODED)
    room = bits // 8 + blocks  # each block may begin a byte
    if not counts or _LENGTHS + wire.padded(2 * blocks) + wire.padded(room) + 8 >= x.numel():
        return wire.pack(_header(x, wire.NUMBERS), x)
    codes = torch.tensor(
        [code | length << 16 for code, length in zip(prefix_codes(lengths), lengths, strict=True)], device="cpu"
    )
    rest, sizes, stream = kernels.exponents_encode(_high(x), sent(codes.to(torch.int32), x.device), room)
    nibbles = torch.tensor(lengths, dtype=torch.uint8, device="cpu")
    sections = [sent(nibbles[::2] | nibbles[1::2] << 4, x.device), sizes, rest, stream]
    if x.dtype == torch.float32:
        sections.insert(3, x.view(torch.int16)[::2])
    return wire.pack(_header(x, PREFIX), *sections)


def unpack(out: Tensor, buffer: Tensor) -> None:
    """Write what `pack` took to `out`, of that length and dtype. Bytes behind it do not count.

    Raises:
        PayloadError: If it is malformed. The host waits for code lengths.
    """
    if buffer.dtype != torch.uint8 or buffer.numel() < wire.HEADER_BYTES:
        raise PayloadError(f"a payload has at least {wire.HEADER_BYTES} uint8; got {buffer.numel()} of {buffer.dtype}")
    wire.check_buffers(buffer[None, : wire.HEADER_BYTES], _header(out, int(buffer[15])))
    wire.check_coding(coding := int(buffer[15]), (wire.NUMBERS, PREFIX))
    body = buffer[wire.HEADER_BYTES :]
    if coding == wire.NUMBERS:
        out.copy_(_section(body, 0, out.nbytes)[0].view(out.dtype))
        return
    if out.dtype not in _ABLE:
        raise PayloadError(f"exponents of {out.dtype} are coded; expected bfloat16 or float32")
    nibbles, at = _section(body, 0, _LENGTHS)
    sizes, at = _section(body, at, 2 * -(-out.numel() // CODED))
    rest, at = _section(body, at, out.numel())
    high = out.view(torch.int16)
    if out.dtype == torch.float32:
        low, at = _section(body, at, 2 * out.numel())
        high[::2] = low.view(torch.int16)
        high = torch.empty(out.numel(), dtype=torch.int16, device=out.device)
    lengths = torch.stack([nibbles & 15, nibbles >> 4], dim=1).view(-1).tolist()
    stream = body[at:].contiguous()
    good = kernels.exponents_decode(high, rest, sizes.view(torch.int16), stream, sent(table_of(lengths), out.device))
    refuse_if(~good, lambda: PayloadError("a block of codes does not end where it should: it was corrupted in transit"))
    if out.dtype == torch.float32:
        out.view(torch.int16)[1::2] = high


def code_lengths(counts: Sequence[int]) -> list[int]:
    """Return the length of each exponent's code, at most `LONGEST`: 0 for those that do not occur (Huffman 1952)."""
    counts = list(counts)
    if sum(count > 0 for count in counts) == 1:
        counts[counts.index(0)] = 1  # or else there would be nothing to read
    while True:
        lengths = [0] * len(counts)
        heap = [(count, i, [i]) for i, count in enumerate(counts) if count]
        heapq.heapify(heap)
        while len(heap) > 1:
            (a, i, few), (b, _, more) = heapq.heappop(heap), heapq.heappop(heap)
            for symbol in few + more:
                lengths[symbol] += 1
            heapq.heappush(heap, (a + b, i, few + more))
        if max(lengths, default=0) <= LONGEST:
            return lengths
        counts = [-(-count // 2) for count in counts]  # rarer ones become as frequent, and codes shorter


def prefix_codes(lengths: Sequence[int]) -> list[int]:
    """Return the code of each exponent, its first bit lowest: shorter ones first, and equal lengths in order."""
    codes, code, before = [0] * len(lengths), 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths) if length):
        code <<= length - before
        codes[symbol] = int(f"{code:0{length}b}"[::-1], 2)
        code, before = code + 1, length
    return codes


def table_of(lengths: Sequence[int]) -> Tensor:
    """Return, for every `LONGEST` bits, the exponent whose code they begin with, and its length from bit 8 on."""
    if max(lengths) > LONGEST or sum(1 << LONGEST - length for length in lengths if length) != 1 << LONGEST:
        raise PayloadError(f"the code lengths of the exponents do not form a prefix code: {[n for n in lengths if n]}")
    table = torch.zeros(1 << LONGEST, dtype=torch.int16, device="cpu")
    for symbol, (code, length) in enumerate(zip(prefix_codes(lengths), lengths, strict=True)):
        if length:
            table[code :: 1 << length] = symbol | length << 8
    return table


def _header(x: Tensor, coding: int) -> bytes:
    return wire.Header(wire.EXPONENTS, x.dtype, x.numel(), x.numel(), coding=coding).pack()


def _high(x: Tensor) -> Tensor:
    """Return the halves of numbers that have exponents."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x.view(torch.int16)[1::2].contiguous()


def _section(body: Tensor, start: int, nbytes: int) -> tuple[Tensor, int]:
    """Return a section, and where the next one begins."""
    end = start + wire.padded(nbytes)
    if body.numel() < end:
        raise PayloadError(f"a buffer ends after {body.numel()} bytes; expected at least {end}")
    wire.check_padding(body[start:end], nbytes)
    return body[start : start + nbytes], end
