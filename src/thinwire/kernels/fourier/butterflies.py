"""Butterflies of a Fourier transform on vectors of 32 bytes: as many transforms side by side as fit.

Number k of all these transforms takes two vectors, 2k and 2k + 1: real parts, then imaginary parts. Every product, sum
and difference is rounded on its own, in the order written here, so the bits are the same on every processor.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from thinwire.kernels.compiled import intrinsic

_SCALARS: dict[Any, Any] = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}
_Number = tuple[Any, Any]


class _Code:
    """Instructions on complex vectors."""

    def __init__(self, context: Any, builder: Any, signature: Any, dtype: Any) -> None:
        self.context, self.builder, self.signature = context, builder, signature
        self.lanes = 256 // dtype.bitwidth
        self.kind = ir.VectorType(_SCALARS[dtype], self.lanes)
        self.align = dtype.bitwidth // 8

    def load(self, array: Any, at: Any) -> _Number:
        """Load complex number `at`."""
        return self._part(array, at, 0), self._part(array, at, 1)

    def store(self, array: Any, at: Any, number: _Number) -> None:
        """Write complex number `at`."""
        for part, vector in enumerate(number):
            self.builder.store(vector, self._address(array, at, part)).align = self.align

    def weight(self, cos: Any, sin: Any, at: Any) -> _Number:
        """Return cos[at] + i·sin[at] in every lane."""
        return self._spread(cos, at), self._spread(sin, at)

    def add(self, a: _Number, b: _Number) -> _Number:
        """Return a + b."""
        return self.builder.fadd(a[0], b[0]), self.builder.fadd(a[1], b[1])

    def subtract(self, a: _Number, b: _Number) -> _Number:
        """Return a − b."""
        return self.builder.fsub(a[0], b[0]), self.builder.fsub(a[1], b[1])

    def times(self, a: _Number, b: _Number) -> _Number:
        """Return a · b."""
        multiply = self.builder.fmul
        real = self.builder.fsub(multiply(a[0], b[0]), multiply(a[1], b[1]))
        return real, self.builder.fadd(multiply(a[0], b[1]), multiply(a[1], b[0]))

    def quarter_turn(self, a: _Number, b: _Number) -> _Number:
        """Return i · (a − b)."""
        return self.builder.fsub(b[1], a[1]), self.builder.fsub(a[0], b[0])

    def step(self, at: Any, by: Any, times: int) -> Any:
        """Return at + times · by."""
        return self.builder.add(at, self.builder.mul(by, ir.Constant(by.type, times)))

    def _part(self, array: Any, at: Any, part: int) -> Any:
        vector = self.builder.load(self._address(array, at, part))
        vector.align = self.align
        return vector

    def _address(self, array: Any, at: Any, part: int) -> Any:
        place = self.step(ir.Constant(at.type, part * self.lanes), at, 2 * self.lanes)
        return self.builder.bitcast(self._element(array, place), self.kind.as_pointer())

    def _spread(self, array: Any, at: Any) -> Any:
        value = self.builder.load(self._element(array, at))
        empty, zeros = ir.Constant(self.kind, ir.Undefined), ir.VectorType(ir.IntType(32), self.lanes)
        first = self.builder.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(first, empty, ir.Constant(zeros, [0] * self.lanes))

    def _element(self, array: Any, at: Any) -> Any:
        index, value = array
        kind = self.signature.args[index]
        data = self.context.make_array(kind)(self.context, self.builder, value)
        return cgutils.get_item_pointer(self.context, self.builder, kind, data, [at])


def _declared(emit: Callable[..., None], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return signature and code of an intrinsic. Each array comes with its place among the arguments."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        code = _Code(context, builder, signature, args[0].dtype)
        numbered = enumerate(zip(args, values, strict=True))
        emit(code, *((place, value) if isinstance(kind, types.Array) else value for place, (kind, value) in numbered))
        return context.get_dummy_value()

    return types.void(*(arg if isinstance(arg, types.Array) else types.intp for arg in args)), codegen


def _two(code: _Code, x: Any, at: Any, far: Any, y: Any, to: Any, near: Any, cos: Any, sin: Any, turn: Any) -> None:
    a, b = (code.load(x, code.step(at, far, m)) for m in range(2))
    code.store(y, to, code.add(a, b))
    code.store(y, code.step(to, near, 1), code.times(code.subtract(a, b), code.weight(cos, sin, turn)))


def _four(code: _Code, x: Any, at: Any, far: Any, y: Any, to: Any, near: Any, cos: Any, sin: Any, turn: Any) -> None:
    a, b, c, d = (code.load(x, code.step(at, far, m)) for m in range(4))
    even, odd, sum_, turned = code.add(a, c), code.subtract(a, c), code.add(b, d), code.quarter_turn(b, d)
    turns = [code.weight(cos, sin, code.step(ir.Constant(turn.type, 0), turn, j)) for j in range(4)]
    code.store(y, to, code.add(even, sum_))
    for j, found in ((1, code.add(odd, turned)), (2, code.subtract(even, sum_)), (3, code.subtract(odd, turned))):
        code.store(y, code.step(to, near, j), code.times(found, turns[j]))


def _set(code: _Code, y: Any, to: Any, x: Any, at: Any, cos: Any, sin: Any, turn: Any) -> None:
    code.store(y, to, code.times(code.load(x, at), code.weight(cos, sin, turn)))


def _add(code: _Code, y: Any, to: Any, x: Any, at: Any, cos: Any, sin: Any, turn: Any) -> None:
    product = code.times(code.load(x, at), code.weight(cos, sin, turn))
    code.store(y, to, code.add(code.load(y, to), product))


def _butterfly(emit: Callable[..., None]) -> Any:
    @intrinsic
    def code(typing, x, at, far, y, to, near, cos, sin, turn):
        return _declared(emit, (x, at, far, y, to, near, cos, sin, turn))

    return code


def _turned(emit: Callable[..., None]) -> Any:
    @intrinsic
    def code(typing, y, to, x, at, cos, sin, turn):
        return _declared(emit, (y, to, x, at, cos, sin, turn))

    return code


two, four = (_butterfly(emit) for emit in (_two, _four))
"""(x, at, far, y, to, near, cos, sin, turn): combine a, b, … from `at` + m · `far` into numbers at `to` + j · `near`.

Let w be number `turn` of the table. `two` writes a + b and (a - b)·w; `four` writes (a + c) + (b + d),
(a - c + i(b - d))·w, (a + c - (b + d))·w², (a - c - i(b - d))·w³.
"""
set_turned, add_turned = (_turned(emit) for emit in (_set, _add))
"""(y, to, x, at, cos, sin, turn): write x[at]·w to y[to], or add it."""
