"""Butterflies of a Fourier transform on vectors of 32 bytes: as many transforms side by side as fit.

Number k of all these transforms takes two vectors, 2k and 2k + 1: real parts, then imaginary parts. Every product, sum
and difference is rounded on its own, in the order written here, so the bits are the same on every processor.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from thinwire.kernels.compiled import intrinsic
from thinwire.kernels.simd import Code, declared

_Number = tuple[Any, Any]


class _Code(Code):
    """Instructions on complex vectors."""

    def __init__(self, builder: Any, dtype: Any) -> None:
        super().__init__(builder, dtype, lanes=256 // dtype.bitwidth)

    def number(self, data: Any, at: Any) -> _Number:
        """Load complex number `at`."""
        real, imaginary = (self.load(data, place) for place in self._places(at))
        return real, imaginary

    def put(self, data: Any, at: Any, number: _Number) -> None:
        """Write complex number `at`."""
        for place, vector in zip(self._places(at), number, strict=True):
            self.store(data, place, vector)

    def weight(self, cos: Any, sin: Any, at: Any) -> _Number:
        """Return cos[at] + i·sin[at] in every lane."""
        return self.spread(self.element(cos, at)), self.spread(self.element(sin, at))

    def add(self, a: _Number, b: _Number) -> _Number:
        """Return a + b."""
        return self.builder.fadd(a[0], b[0]), self.builder.fadd(a[1], b[1])

    def subtract(self, a: _Number, b: _Number) -> _Number:
        """Return a − b."""
        return self.builder.fsub(a[0], b[0]), self.builder.fsub(a[1], b[1])

    def turned(self, a: _Number, b: _Number) -> _Number:
        """Return a · b."""
        multiply = self.builder.fmul
        real = self.builder.fsub(multiply(a[0], b[0]), multiply(a[1], b[1]))
        return real, self.builder.fadd(multiply(a[0], b[1]), multiply(a[1], b[0]))

    def quarter_turn(self, a: _Number, b: _Number) -> _Number:
        """Return i · (a − b)."""
        return self.builder.fsub(b[1], a[1]), self.builder.fsub(a[0], b[0])

    def _places(self, at: Any) -> list[Any]:
        """Return where the two parts of complex number `at` begin."""
        return [self.index(ir.Constant(at.type, part * self.count), (2 * self.count, at)) for part in (0, 1)]


def _two(code: _Code, x: Any, at: Any, far: Any, y: Any, to: Any, near: Any, cos: Any, sin: Any, turn: Any) -> None:
    a, b = (code.number(x, code.index(at, (m, far))) for m in range(2))
    code.put(y, to, code.add(a, b))
    code.put(y, code.index(to, (1, near)), code.turned(code.subtract(a, b), code.weight(cos, sin, turn)))


def _four(code: _Code, x: Any, at: Any, far: Any, y: Any, to: Any, near: Any, cos: Any, sin: Any, turn: Any) -> None:
    a, b, c, d = (code.number(x, code.index(at, (m, far))) for m in range(4))
    even, odd, sum_, turned = code.add(a, c), code.subtract(a, c), code.add(b, d), code.quarter_turn(b, d)
    turns = [code.weight(cos, sin, code.index(ir.Constant(turn.type, 0), (j, turn))) for j in range(4)]
    code.put(y, to, code.add(even, sum_))
    for j, found in ((1, code.add(odd, turned)), (2, code.subtract(even, sum_)), (3, code.subtract(odd, turned))):
        code.put(y, code.index(to, (j, near)), code.turned(found, turns[j]))


def _set(code: _Code, y: Any, to: Any, x: Any, at: Any, cos: Any, sin: Any, turn: Any) -> None:
    code.put(y, to, code.turned(code.number(x, at), code.weight(cos, sin, turn)))


def _add(code: _Code, y: Any, to: Any, x: Any, at: Any, cos: Any, sin: Any, turn: Any) -> None:
    product = code.turned(code.number(x, at), code.weight(cos, sin, turn))
    code.put(y, to, code.add(code.number(y, to), product))


def _butterfly(emit: Callable[..., None]) -> Any:
    @intrinsic
    def code(typing, x, at, far, y, to, near, cos, sin, turn):
        return declared(emit, (x, at, far, y, to, near, cos, sin, turn), code=_Code)

    return code


def _turned(emit: Callable[..., None]) -> Any:
    @intrinsic
    def code(typing, y, to, x, at, cos, sin, turn):
        return declared(emit, (y, to, x, at, cos, sin, turn), code=_Code)

    return code


two, four = (_butterfly(emit) for emit in (_two, _four))
"""(x, at, far, y, to, near, cos, sin, turn): combine a, b, … from `at` + m · `far` into numbers at `to` + j · `near`.

Let w be number `turn` of the table. `two` writes a + b and (a - b)·w; `four` writes (a + c) + (b + d),
(a - c + i(b - d))·w, (a + c - (b + d))·w², (a - c - i(b - d))·w³.
"""
set_turned, add_turned = (_turned(emit) for emit in (_set, _add))
"""(y, to, x, at, cos, sin, turn): write x[at]·w to y[to], or add it."""
