"""Blocks of 64 elements at a time, in vectors, with stores that pass by the cache: what Numba's loops cannot say.

A result that is only written need not be read into the cache first, which saves a quarter of the traffic. `scratch`
keeps what was last computed for a second look. Streaming stores want addresses that are multiples of 64 bytes.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

BLOCK = 64
_WIDTHS: dict[Any, Any] = {types.float32: (ir.FloatType(), 32), types.float64: (ir.DoubleType(), 64)}
_INTEGERS: dict[Any, Any] = {types.float32: types.int32, types.float64: types.int64}
_CONTRACT = ("contract",)


class _Block:
    """Code for the 64 elements from `start` on, as vectors of 64 bytes."""

    def __init__(self, context: Any, builder: Any, dtype: Any, start: Any) -> None:
        scalar, self.bits = _WIDTHS[dtype]
        self.context, self.builder, self.start = context, builder, start
        self.count = 512 // self.bits
        self.real = ir.VectorType(scalar, self.count)
        self.integer = ir.VectorType(ir.IntType(self.bits), self.count)

    def each(self) -> list[tuple[Any, Any]]:
        """Return for every vector where it begins, in an array and in the scratch."""
        steps = [ir.Constant(self.start.type, at) for at in range(0, BLOCK, self.count)]
        return [(self.builder.add(self.start, step), step) for step in steps]

    def spread(self, value: Any) -> Any:
        """Return a vector of one value."""
        empty, zeros = ir.Constant(self.real, ir.Undefined), ir.VectorType(ir.IntType(32), self.count)
        first = self.builder.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(first, empty, ir.Constant(zeros, [0] * self.count))

    def load(self, array: Any, at: Any) -> Any:
        """Return elements of an array."""
        loaded = self.builder.load(self._place(array, at))
        loaded.align = self.bits // 8
        return loaded

    def store(self, vector: Any, array: Any, at: Any, *, stream: bool = False) -> None:
        """Write elements."""
        stored = self.builder.store(vector, self._place(array, at))
        stored.align = 64 if stream else self.bits // 8
        if stream:
            stored.set_metadata("nontemporal", self.builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))

    def sum(self, x: Any, factor: Any, y: Any) -> Any:
        """Return x + factor · y."""
        return self.builder.fadd(x, self.builder.fmul(factor, y, flags=_CONTRACT), flags=_CONTRACT)

    def plus(self, x: Any, y: Any) -> Any:
        """Return x + y."""
        return self.builder.fadd(x, y)

    def times(self, factor: Any, x: Any) -> Any:
        """Return factor · x."""
        return self.builder.fmul(factor, x, flags=_CONTRACT)

    def larger(self, peak: Any, vector: Any) -> Any:
        """Return the larger of magnitudes known and those of a vector, as integers."""
        ones = ir.Constant(self.integer, [(1 << (self.bits - 1)) - 1] * self.count)
        found = self.builder.and_(self.builder.bitcast(vector, self.integer), ones)
        return found if peak is None else self.builder.select(self.builder.icmp_signed(">", peak, found), peak, found)

    def largest(self, peak: Any) -> Any:
        """Return the largest integer of a vector."""
        name = f"llvm.vector.reduce.smax.v{self.count}i{self.bits}"
        kind = ir.FunctionType(ir.IntType(self.bits), [self.integer])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), [peak])

    def _place(self, array: Any, at: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(array, [at]), self.real.as_pointer())


def _code(body: Callable[..., Any], arrays: int) -> Callable[..., Any]:
    """Return what generates `body`; the first arguments are arrays, and the next is where the block starts."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pairs = zip(signature.args[:arrays], args[:arrays], strict=True)
        data = [context.make_array(kind)(context, builder, value).data for kind, value in pairs]
        block = _Block(context, builder, signature.args[0].dtype, args[arrays])
        return body(block, *data, *args[arrays + 1 :])

    return generate


def _accumulate(*, stream: bool) -> Any:
    def body(block: _Block, out: Any, residual: Any, gradient: Any, scratch: Any, scale: Any) -> Any:
        peak, scale = None, block.spread(scale)
        for at, near in block.each():
            total = block.sum(block.load(residual, at), scale, block.load(gradient, at))
            block.store(total, out, at, stream=stream)
            block.store(total, scratch, near)
            peak = block.larger(peak, total)
        return block.largest(peak)

    @intrinsic
    def code(typing, out, residual, gradient, scratch, start, scale):
        return _INTEGERS[out.dtype](out, residual, gradient, scratch, start, scale), _code(body, 4)

    return code


def _momentum(*, nesterov: bool, stream: bool) -> Any:
    def body(
        block: _Block,
        out: Any,
        velocity_out: Any,
        residual: Any,
        velocity: Any,
        gradient: Any,
        scratch: Any,
        scale: Any,
        momentum: Any,
    ) -> Any:
        peak, scale, momentum = None, block.spread(scale), block.spread(momentum)
        for at, near in block.each():
            new, before = block.load(gradient, at), block.load(residual, at)
            moving = block.sum(block.times(momentum, block.load(velocity, at)), scale, new)
            block.store(moving, velocity_out, at, stream=stream)
            if nesterov:
                total = block.sum(block.sum(before, scale, new), momentum, moving)
            else:
                total = block.plus(before, moving)
            block.store(total, out, at, stream=stream)
            block.store(total, scratch, near)
            peak = block.larger(peak, total)
        return block.largest(peak)

    @intrinsic
    def code(typing, out, velocity_out, residual, velocity, gradient, scratch, start, scale, momentum):
        given = (out, velocity_out, residual, velocity, gradient, scratch, start, scale, momentum)
        return _INTEGERS[out.dtype](*given), _code(body, 6)

    return code


def _copy(*, stream: bool) -> Any:
    def body(block: _Block, out: Any, source: Any, near: Any) -> Any:
        for at, step in block.each():
            block.store(block.load(source, block.builder.add(near, step)), out, at, stream=stream)
        return block.context.get_dummy_value()

    @intrinsic
    def code(typing, out, source, start, near):
        return types.void(out, source, start, near), _code(body, 2)

    return code


accumulate, accumulate_streaming = (_accumulate(stream=stream) for stream in (False, True))
"""(out, residual, gradient, scratch, start, scale): out = residual + scale · gradient, also into `scratch`.

Returns the bits of the largest magnitude.
"""
momentum, momentum_streaming = (_momentum(nesterov=False, stream=stream) for stream in (False, True))
"""(out, velocity_out, residual, velocity, gradient, scratch, start, scale, m): u = m · velocity + scale · gradient.

out = residual + u, also into `scratch`. Returns the bits of the largest magnitude.
"""
nesterov, nesterov_streaming = (_momentum(nesterov=True, stream=stream) for stream in (False, True))
"""The same with out = residual + scale · gradient + m · u."""
copy, copy_streaming = (_copy(stream=stream) for stream in (False, True))
"""(out, source, start, near): copy 64 elements from `near` of source to `start` of out."""
