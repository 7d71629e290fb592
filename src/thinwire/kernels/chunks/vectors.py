"""Weighted sums of vectors of 64 bytes, several at a time in registers, which Numba's loops do not express."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from thinwire.kernels import simd
from thinwire.kernels.compiled import compiled
from thinwire.kernels.simd import CONTRACT, Code, emitted

BYTES = 64
TOGETHER = 8
"""How many sums share what they load."""


def _sums(flags: tuple[str, ...], *, listed: bool = False, less: bool = False) -> Any:
    @emitted(flags=flags)
    def sums(
        code: Code, y: Any, to: Any, pitch: Any, weights: Any, first: Any, apart: Any, step: Any, x: Any, at: Any,
        far: Any, order: Any, count: Any,
    ) -> None:  # fmt: skip
        zero = ir.Constant(code.kind, [0.0] * code.count)
        totals = [cgutils.alloca_once_value(code.builder, zero) for _ in range(TOGETHER)]
        with cgutils.for_range(code.builder, count) as loop:
            t = code.element(order, loop.index) if listed else loop.index
            vector, begin = code.load(x, code.index(at, (t, far))), code.index(first, (t, step))
            for row, total in enumerate(totals):
                weight = code.element(weights, code.index(begin, (row, apart)))
                code.builder.store(code.more(code.builder.load(total), weight, vector), total)
        for row, total in enumerate(totals):
            place, found = code.index(to, (row, pitch)), code.builder.load(total)
            code.store(y, place, code.builder.fsub(code.load(y, place), found) if less else found)

    return sums


weigh = _sums(CONTRACT)
"""(y, to, pitch, weights, first, apart, step, x, at, far, order, count): write eight sums of vectors.

For r from 0 to 7, write Σ weights[first + r · apart + t · step] · x[at + t · far :] over t < `count`, in this order, to
y[to + r · pitch :].
"""
weigh_listed, subtract_listed = _sums((), listed=True), _sums((), listed=True, less=True)
"""The same over the first `count` t of `order`: write the sums, or subtract them. All is rounded one by one."""


@emitted()
def copy(code: Code, y: Any, to: Any, x: Any, at: Any) -> None:
    """Copy a vector."""
    code.store(y, to, code.load(x, at))


@emitted(flags=CONTRACT)
def add_up(code: Code, y: Any, at: Any, x: Any, g: Any, scale: Any, decay: Any) -> None:
    """Write decay · x[at:] + scale · g[at:] to y[at:]."""
    kept = code.times(code.spread(decay), code.load(x, at))
    code.store(y, at, code.more(kept, scale, code.load(g, at)))


@emitted()
def fold(code: Code, y: Any, plus: Any, minus: Any, x: Any, first: Any, last: Any) -> None:
    """Write x[first:] + x[last:] to y[plus:], and x[first:] - x[last:] to y[minus:]."""
    one, other = code.load(x, first), code.load(x, last)
    code.store(y, plus, code.builder.fadd(one, other))
    code.store(y, minus, code.builder.fsub(one, other))


@emitted()
def times(code: Code, y: Any, to: Any, weight: Any, x: Any, at: Any) -> None:
    """Write weight · x[at:] to y[to:]."""
    code.store(y, to, code.times(code.spread(weight), code.load(x, at)))


@emitted()
def add(code: Code, y: Any, to: Any, weight: Any, x: Any, at: Any) -> None:
    """Add weight · x[at:] to y[to:]."""
    code.store(y, to, code.more(code.load(y, to), weight, code.load(x, at)))


@compiled
def buffer(like, numel):
    """Return zeros, at least `numel` and a block more, that begin at a cache line: no vector lies in two."""
    room = np.zeros(numel + simd.BLOCK + BYTES, like.dtype)
    start = -room.ctypes.data % BYTES // like.itemsize
    return room[start : start + numel + simd.BLOCK]
