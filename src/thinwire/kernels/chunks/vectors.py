"""Weighted sums of vectors of 64 bytes, several at a time in registers, which Numba's loops do not express."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from thinwire.kernels import simd
from thinwire.kernels.compiled import compiled, intrinsic

BYTES = 64
TOGETHER = 8
"""How many sums share what they load."""
_SCALARS: dict[Any, Any] = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}
_CONTRACT = ("contract",)


class Code:
    """Instructions on vectors of one type of number. Every product and sum is rounded on its own without `flags`."""

    def __init__(self, builder: Any, dtype: Any, flags: tuple[str, ...] = (), lanes: int | None = None) -> None:
        self.builder, self.flags, self.itemsize = builder, flags, dtype.bitwidth // 8
        self.kind = ir.VectorType(_SCALARS[dtype], lanes or BYTES // self.itemsize)
        self.zero = ir.Constant(self.kind, [0.0] * self.kind.count)

    def load(self, data: Any, at: Any) -> Any:
        """Load the vector at an index."""
        vector = self.builder.load(self._address(data, at))
        vector.align = self.itemsize
        return vector

    def store(self, data: Any, at: Any, vector: Any) -> None:
        """Write the vector at an index."""
        self.builder.store(vector, self._address(data, at)).align = self.itemsize

    def spread(self, value: Any) -> Any:
        """Return a vector with `value` in every lane."""
        empty, zeros = ir.Constant(self.kind, ir.Undefined), ir.VectorType(ir.IntType(32), self.kind.count)
        first = self.builder.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(first, empty, ir.Constant(zeros, [0] * self.kind.count))

    def more(self, total: Any, weight: Any, vector: Any) -> Any:
        """Return total + weight · vector."""
        product = self.builder.fmul(self.spread(weight), vector, flags=self.flags)
        return self.builder.fadd(total, product, flags=self.flags)

    def index(self, start: Any, *steps: tuple[Any, Any]) -> Any:
        """Return start + Σ number · step."""
        for number, step in steps:
            number = ir.Constant(start.type, number) if isinstance(number, int) else number
            start = self.builder.add(start, self.builder.mul(number, step))
        return start

    def element(self, data: Any, at: Any) -> Any:
        """Load one number."""
        return self.builder.load(self.builder.gep(data, [at]))

    def _address(self, data: Any, at: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(data, [at]), self.kind.as_pointer())


def declared(
    emit: Callable[..., None], args: tuple[Any, ...], flags: tuple[str, ...] = (), lanes: int | None = None
) -> tuple[Any, Any]:
    """Return signature and code of an intrinsic whose first argument is the array that it writes to."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        given = (None if k == types.none else v for k, v in zip(signature.args, values, strict=True))
        kinds = zip(signature.args, given, strict=True)
        emit(
            Code(builder, signature.args[0].dtype, flags, lanes),
            *(context.make_array(k)(context, builder, v).data if isinstance(k, types.Array) else v for k, v in kinds),
        )
        return context.get_dummy_value()

    whole = (types.intp if isinstance(arg, types.Integer) else arg for arg in args)
    return types.void(*whole), generate


def _sums(flags: tuple[str, ...], *, listed: bool = False, less: bool = False) -> Any:
    def emit(
        code: Code, y: Any, to: Any, pitch: Any, weights: Any, first: Any, apart: Any, step: Any, x: Any, at: Any,
        far: Any, order: Any, count: Any,
    ) -> None:  # fmt: skip
        totals = [cgutils.alloca_once_value(code.builder, code.zero) for _ in range(TOGETHER)]
        with cgutils.for_range(code.builder, count) as loop:
            t = code.element(order, loop.index) if listed else loop.index
            vector, begin = code.load(x, code.index(at, (t, far))), code.index(first, (t, step))
            for row, total in enumerate(totals):
                weight = code.element(weights, code.index(begin, (row, apart)))
                code.builder.store(code.more(code.builder.load(total), weight, vector), total)
        for row, total in enumerate(totals):
            place, found = code.index(to, (row, pitch)), code.builder.load(total)
            code.store(y, place, code.builder.fsub(code.load(y, place), found) if less else found)

    @intrinsic
    def code(typing, y, to, pitch, weights, first, apart, step, x, at, far, order, count):
        return declared(emit, (y, to, pitch, weights, first, apart, step, x, at, far, order, count), flags)

    return code


weigh = _sums(_CONTRACT)
"""(y, to, pitch, weights, first, apart, step, x, at, far, order, count): write eight sums of vectors.

For r from 0 to 7, write Σ weights[first + r · apart + t · step] · x[at + t · far :] over t < `count`, in this order, to
y[to + r · pitch :].
"""
weigh_listed, subtract_listed = _sums((), listed=True), _sums((), listed=True, less=True)
"""The same over the first `count` t of `order`: write the sums, or subtract them. All is rounded one by one."""


@intrinsic
def copy(typing, y, to, x, at):
    """Copy a vector."""

    def emit(code: Code, y: Any, to: Any, x: Any, at: Any) -> None:
        code.store(y, to, code.load(x, at))

    return declared(emit, (y, to, x, at))


@intrinsic
def add_up(typing, y, at, x, g, scale, decay):
    """Write decay · x[at:] + scale · g[at:] to y[at:]; a decay of None is 1."""

    def emit(code: Code, y: Any, at: Any, x: Any, g: Any, scale: Any, decay: Any) -> None:
        kept = code.load(x, at)
        if decay is not None:
            kept = code.builder.fmul(code.spread(decay), kept, flags=_CONTRACT)
        code.store(y, at, code.more(kept, scale, code.load(g, at)))

    return declared(emit, (y, at, x, g, scale, decay), _CONTRACT)


@intrinsic
def fold(typing, y, plus, minus, x, first, last):
    """Write x[first:] + x[last:] to y[plus:], and x[first:] - x[last:] to y[minus:]."""

    def emit(code: Code, y: Any, plus: Any, minus: Any, x: Any, first: Any, last: Any) -> None:
        one, other = code.load(x, first), code.load(x, last)
        code.store(y, plus, code.builder.fadd(one, other))
        code.store(y, minus, code.builder.fsub(one, other))

    return declared(emit, (y, plus, minus, x, first, last))


@intrinsic
def times(typing, y, to, weight, x, at):
    """Write weight · x[at:] to y[to:]."""

    def emit(code: Code, y: Any, to: Any, weight: Any, x: Any, at: Any) -> None:
        code.store(y, to, code.builder.fmul(code.spread(weight), code.load(x, at)))

    return declared(emit, (y, to, weight, x, at))


@intrinsic
def add(typing, y, to, weight, x, at):
    """Add weight · x[at:] to y[to:]."""

    def emit(code: Code, y: Any, to: Any, weight: Any, x: Any, at: Any) -> None:
        code.store(y, to, code.more(code.load(y, to), weight, code.load(x, at)))

    return declared(emit, (y, to, weight, x, at))


@compiled
def buffer(like, numel):
    """Return zeros, at least `numel` and a block more, that begin at a cache line: no vector lies in two."""
    room = np.zeros(numel + simd.BLOCK + BYTES, like.dtype)
    start = -room.ctypes.data % BYTES // like.itemsize
    return room[start : start + numel + simd.BLOCK]
