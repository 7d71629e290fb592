"""Packing and unpacking eight codes at a time, which are shifted by constants in vectors.

A loop is compiled for each number of bits, on first use, since shifts and shuffles must be constants to be fast. Eight
codes of b bits are b bytes. Loops read and write 16 or 32 bytes at a time, and stop where these would end too late.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir

from thinwire.kernels.compiled import compiled, intrinsic
from thinwire.kernels.simd import Code, declared

MOST = 32
"""Codes of more bits are for others."""
_LANES, _BYTE, _NUMBER, _LONG = 8, ir.IntType(8), ir.IntType(32), ir.IntType(64)


@cache
def unpacking(bits: int) -> Callable[..., int]:
    """Return a loop that reads codes `lo` (a multiple of 8) to `hi` from bytes, and returns how far it came."""
    width = _width(bits)

    @compiled
    def loop(buffer, lo, hi, out):
        at = lo
        while at + 8 <= hi and at // 8 * bits + width <= buffer.size:
            _unpack(buffer, at // 8 * bits, out, at, bits)
            at += 8
        return at

    found: Callable[..., int] = loop
    return found


@cache
def packing(bits: int) -> Callable[..., int]:
    """Return a loop that writes codes `lo` to `hi` (multiples of 32) as bytes, and returns how far it came, of 32s."""
    width = _width(bits)

    @compiled
    def loop(codes, lo, hi, out):
        at = lo
        while at // 8 * bits + width <= hi // 8 * bits:
            _pack(codes, at, out, at // 8 * bits, bits)
            at += 8
        return at // 32 * 32

    found: Callable[..., int] = loop
    return found


def _width(bits: int) -> int:
    """Return how many bytes are read or written for eight codes."""
    return 16 if bits <= 16 else 32


@intrinsic(prefer_literal=True)
def _unpack(typing, buffer, place, out, at, bits):
    """Write the eight codes that begin at the byte `place` to `out`, from `at` on."""
    wide, size = bits.literal_value, out.dtype.bitwidth
    width, held = _width(wide), 4 if wide <= 25 else 8  # bytes in which a code lies, wherever it begins

    def emit(code: Code, buffer: Any, place: Any, out: Any, at: Any, _bits: Any) -> None:
        read = code.load(buffer, place, ir.VectorType(_BYTE, width))
        firsts, shifts = zip(*(divmod(lane * wide, 8) for lane in range(_LANES)), strict=True)
        order = [min(first + byte, width - 1) for first in firsts for byte in range(held)]
        lanes = ir.VectorType(ir.IntType(8 * held), _LANES)
        spread = code.builder.bitcast(code.shuffled(read, read, order), lanes)
        codes = code.builder.lshr(spread, ir.Constant(lanes, list(shifts)))
        codes = code.builder.and_(codes, ir.Constant(lanes, [(1 << wide) - 1] * _LANES))
        narrow = codes if size == 8 * held else code.builder.trunc(codes, ir.VectorType(ir.IntType(size), _LANES))
        code.store(out, at, narrow, align=size // 8)

    return declared(emit, (buffer, place, out, at, bits))


@intrinsic(prefer_literal=True)
def _pack(typing, codes, at, out, place, bits):
    """Write eight codes from `at` on to the byte `place` and those after it."""
    wide = bits.literal_value

    def emit(code: Code, codes: Any, at: Any, out: Any, place: Any, _bits: Any) -> None:
        builder, lanes, whole = code.builder, ir.VectorType(_LONG, _LANES), ir.IntType(8 * _width(wide))
        long = builder.zext(code.load(codes, at), lanes)
        long = builder.and_(long, ir.Constant(lanes, [(1 << wide) - 1] * _LANES))
        even, odd = (code.shuffled(long, long, list(range(first, _LANES, 2))) for first in (0, 1))
        pairs = builder.or_(even, builder.shl(odd, ir.Constant(even.type, [wide] * (_LANES // 2))))
        packed = ir.Constant(whole, 0)
        for number in range(_LANES // 2):
            pair = builder.zext(builder.extract_element(pairs, ir.Constant(_NUMBER, number)), whole)
            packed = builder.or_(packed, builder.shl(pair, ir.Constant(whole, 2 * wide * number)))
        code.store(out, place, packed, align=1)

    return declared(emit, (codes, at, out, place, bits), lanes=_LANES)
