"""Packing and unpacking eight codes at a time, which are shifted by constants in vectors.

A loop is compiled for each number of bits, on first use, since shifts and shuffles must be constants to be fast. Eight
codes of b bits are b bytes. Loops read and write 16 or 32 bytes at a time, and stop where these would end too late.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types

from thinwire.kernels.compiled import compiled, intrinsic

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
    wide = bits.literal_value
    width, held = _width(wide), 4 if wide <= 25 else 8  # bytes in which a code lies, wherever it begins

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, into = (context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 2))
        read = _load(builder, data, args[1], ir.VectorType(_BYTE, width), 1)
        firsts, shifts = zip(*(divmod(lane * wide, 8) for lane in range(_LANES)), strict=True)
        spread = _shuffle(builder, read, [min(first + byte, width - 1) for first in firsts for byte in range(held)])
        lanes = ir.VectorType(ir.IntType(8 * held), _LANES)
        codes = builder.lshr(builder.bitcast(spread, lanes), ir.Constant(lanes, list(shifts)))
        codes = builder.and_(codes, ir.Constant(lanes, [(1 << wide) - 1] * _LANES))
        size = signature.args[2].dtype.bitwidth
        narrow = ir.VectorType(ir.IntType(size), _LANES)
        codes = codes if size == 8 * held else builder.trunc(codes, narrow)
        _store(builder, codes, into, args[3], size // 8)
        return context.get_dummy_value()

    return types.void(buffer, place, out, at, bits), generate


@intrinsic(prefer_literal=True)
def _pack(typing, codes, at, out, place, bits):
    """Write eight codes from `at` on to the byte `place` and those after it."""
    wide = bits.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, into = (context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 2))
        size = signature.args[0].dtype.bitwidth
        numbers = _load(builder, data, args[1], ir.VectorType(ir.IntType(size), _LANES), size // 8)
        lanes = ir.VectorType(_LONG, _LANES)
        long = builder.and_(builder.zext(numbers, lanes), ir.Constant(lanes, [(1 << wide) - 1] * _LANES))
        even, odd = (_shuffle(builder, long, list(range(first, _LANES, 2))) for first in (0, 1))
        pairs = builder.or_(even, builder.shl(odd, ir.Constant(even.type, [wide] * (_LANES // 2))))
        whole = ir.IntType(8 * _width(wide))
        packed = ir.Constant(whole, 0)
        for number in range(_LANES // 2):
            pair = builder.zext(builder.extract_element(pairs, ir.Constant(_NUMBER, number)), whole)
            packed = builder.or_(packed, builder.shl(pair, ir.Constant(whole, 2 * wide * number)))
        _store(builder, packed, into, args[3], 1)
        return context.get_dummy_value()

    return types.void(codes, at, out, place, bits), generate


def _load(builder: Any, data: Any, at: Any, kind: Any, align: int) -> Any:
    read = builder.load(builder.bitcast(builder.gep(data, [at]), kind.as_pointer()))
    read.align = align
    return read


def _store(builder: Any, value: Any, data: Any, at: Any, align: int) -> None:
    stored = builder.store(value, builder.bitcast(builder.gep(data, [at]), value.type.as_pointer()))
    stored.align = align


def _shuffle(builder: Any, vector: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_NUMBER, len(order)), order))
