"""Vector code for blocks of 64 elements, with stores that bypass the cache, which Numba's loops cannot express.

A result that is only written need not be read into the cache first, which saves a quarter of the traffic. Streaming
stores need addresses that are multiples of 64 bytes. Functions that look at magnitudes return hits: 64 bits that say
which magnitudes, as integers, reach the threshold. `peaks` (64 bytes of integers) keeps each lane's largest so far.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from thinwire.kernels.compiled import intrinsic

BLOCK = 64
SOME = 16
"""How many numbers `at_most` looks at."""
FEW = 16
"""How many numbers `leading` ranks."""
_SCALARS: dict[Any, Any] = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}
_CONTRACT = ("contract",)
_HITS = ir.IntType(BLOCK)
_READ_SOON = (0, 3, 1)  # to read, into the nearest cache, of data


class _Block:
    """Emits code for the 64 elements from `start` on, as vectors of 64 bytes."""

    def __init__(self, context: Any, builder: Any, dtype: Any, start: Any, count: int | None = None) -> None:
        self.context, self.builder, self.start = context, builder, start
        self.bits = dtype.bitwidth
        self.count = count or 512 // self.bits
        self.integer = ir.VectorType(ir.IntType(self.bits), self.count)
        self.kind = ir.VectorType(_SCALARS[dtype], self.count) if dtype in _SCALARS else self.integer

    def spread(self, value: Any) -> Any:
        """Return a vector with `value` in every lane."""
        kind = ir.VectorType(value.type, self.count)
        empty, zeros = ir.Constant(kind, ir.Undefined), ir.VectorType(ir.IntType(32), self.count)
        first = self.builder.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(first, empty, ir.Constant(zeros, [0] * self.count))

    def load(self, array: Any) -> list[Any]:
        """Load the block from an array."""
        return [self.one(array, at, self.kind) for at in self._each(self.start)]

    def one(self, array: Any, at: Any, kind: Any) -> Any:
        """Load the vector at `at` from an array."""
        vector = self.builder.load(self._address(array, at, kind))
        vector.align = self.bits // 8
        return vector

    def store(self, vectors: list[Any], array: Any, place: Any, *, stream: bool) -> None:
        """Write the block from `place` on. Do so after all loads: the compiler cannot move loads across stores."""
        for at, vector in zip(self._each(place), vectors, strict=True):
            stored = self.builder.store(vector, self._address(array, at, vector.type))
            stored.align = 64 if stream else self.bits // 8
            if stream:
                stored.set_metadata("nontemporal", self.builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))

    def sum(self, xs: list[Any], factor: Any, ys: list[Any]) -> list[Any]:
        """Return x + factor · y."""
        products = self.times(factor, ys)
        return [self.builder.fadd(x, y, flags=_CONTRACT) for x, y in zip(xs, products, strict=True)]

    def times(self, factor: Any, xs: list[Any]) -> list[Any]:
        """Return factor · x."""
        return [self.builder.fmul(factor, x, flags=_CONTRACT) for x in xs]

    def hits(self, vectors: list[Any], threshold: Any, peaks: Any) -> Any:
        """Return which magnitudes reach the threshold, and update the peaks."""
        first = ir.Constant(self.start.type, 0)
        hits, bar, peak = ir.Constant(_HITS, 0), self.spread(threshold), self.one(peaks, first, self.integer)
        for number, vector in enumerate(vectors):
            found = self.magnitudes(vector)
            peak = self.builder.select(self.builder.icmp_signed(">", peak, found), peak, found)
            hits = self.builder.or_(hits, self.reaching(found, bar, number))
        stored = self.builder.store(peak, self._address(peaks, first, self.integer))
        stored.align = self.bits // 8
        return hits

    def magnitudes(self, vector: Any) -> Any:
        """Return a vector's magnitudes as integers."""
        ones = ir.Constant(self.integer, [(1 << (self.bits - 1)) - 1] * self.count)
        return self.builder.and_(self.builder.bitcast(vector, self.integer), ones)

    def reaching(self, found: Any, bar: Any, number: int) -> Any:
        """Return which lanes of vector `number` reach the bar, as hits."""
        lanes = self.builder.bitcast(self.builder.icmp_signed(">=", found, bar), ir.IntType(self.count))
        wide = lanes if self.count == BLOCK else self.builder.zext(lanes, _HITS)
        return self.builder.shl(wide, ir.Constant(_HITS, number * self.count))

    def _each(self, first: Any) -> list[Any]:
        """Return where every vector begins, the first one at `first`."""
        return [self.builder.add(first, ir.Constant(first.type, at)) for at in range(0, BLOCK, self.count)]

    def _address(self, array: Any, at: Any, kind: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(array, [at]), kind.as_pointer())


def _code(body: Callable[..., Any], arrays: int) -> Callable[..., Any]:
    """Return the code generator for `body`. Its first arguments are arrays; the next is where the block starts.

    What is None for Numba is None for `body`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pairs = zip(signature.args, args, strict=True)
        given = [None if kind == types.none else value for kind, value in pairs]
        for i, (kind, value) in enumerate(zip(signature.args[:arrays], given[:arrays], strict=True)):
            given[i] = None if value is None else context.make_array(kind)(context, builder, value).data
        block = _Block(context, builder, signature.args[0].dtype, args[arrays])
        return body(block, *given[:arrays], *given[arrays + 1 :])

    return generate


@intrinsic
def look(typing, bits, peaks, start, threshold):
    """Return the hits of the block of `bits`."""

    def body(block: _Block, bits: Any, peaks: Any, threshold: Any) -> Any:
        return block.hits(block.load(bits), threshold, peaks)

    return types.uint64(bits, peaks, start, threshold), _code(body, 2)


@intrinsic
def reaching(typing, numbers, start, threshold):
    """Return the hits of a block of floats. The threshold is an int64."""

    def body(block: _Block, numbers: Any, threshold: Any) -> Any:
        bar = block.spread(threshold if block.bits == 64 else block.builder.trunc(threshold, ir.IntType(block.bits)))
        hits = ir.Constant(_HITS, 0)
        for number, vector in enumerate(block.load(numbers)):
            hits = block.builder.or_(hits, block.reaching(block.magnitudes(vector), bar, number))
        return hits

    return types.uint64(numbers, types.int64, types.int64), _code(body, 1)


@intrinsic
def ones(typing, hits):
    """Return how many bits are set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


@intrinsic
def lowest(typing, hits):
    """Return the number of the lowest bit that is set, or 64 if none is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


@intrinsic
def leading(typing, numbers, count, k):
    """Return which k of the first `count` of 16 numbers have the largest magnitudes, as hits. Earlier ones win ties."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = _Block(context, builder, signature.args[0].dtype, args[1], FEW)
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        lanes = [ir.Constant(block.integer, list(range(FEW))), ir.Constant(block.integer, [-1] * FEW)]
        count, k = (
            block.spread(builder.trunc(n, ir.IntType(block.bits))) if block.bits < 64 else block.spread(n)
            for n in args[1:]
        )
        found = block.magnitudes(block.one(data, ir.Constant(args[1].type, 0), block.kind))
        found = builder.select(builder.icmp_signed("<", lanes[0], count), found, lanes[1])
        ahead = ir.Constant(block.integer, [0] * FEW)
        for turn in range(1, FEW):
            order = [(lane + turn) % FEW for lane in range(FEW)]
            other = builder.shuffle_vector(found, found, ir.Constant(ir.VectorType(ir.IntType(32), FEW), order))
            earlier = ir.Constant(block.integer, [int(place < lane) for lane, place in enumerate(order)])
            more = builder.icmp_signed(">", other, builder.sub(found, earlier))
            ahead = builder.sub(ahead, builder.sext(more, block.integer))
        best = builder.bitcast(builder.icmp_signed("<", ahead, k), ir.IntType(FEW))
        return builder.zext(best, _HITS)

    return types.uint64(numbers, types.int64, types.int64), generate


@intrinsic
def at_most(typing, numbers, at, bar):
    """Return how many of the 16 int64 from an index on are at most `bar`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        kind, whole = ir.VectorType(ir.IntType(64), SOME), ir.IntType(SOME)
        vector = builder.load(builder.bitcast(builder.gep(data, [args[1]]), kind.as_pointer()))
        vector.align = 8
        empty, zeros = ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), SOME), [0] * SOME)
        first = builder.insert_element(empty, args[2], ir.Constant(ir.IntType(32), 0))
        lanes = builder.icmp_signed("<=", vector, builder.shuffle_vector(first, empty, zeros))
        return builder.ctpop(builder.zext(builder.bitcast(lanes, whole), ir.IntType(64)))

    return types.int64(numbers, types.int64, types.int64), generate


@intrinsic
def prefetch(typing, array, at):
    """Fetch the element at an index into the cache. The index may be beyond the end."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(call, [address, *(ir.Constant(number, option) for option in _READ_SOON)])
        return context.get_dummy_value()

    return types.void(array, at), generate


def _add(*, stream: bool) -> Any:
    def body(
        block: _Block,
        out: Any,
        moving: Any,
        peaks: Any,
        residual: Any,
        velocity: Any,
        gradient: Any,
        threshold: Any,
        *factors: Any,
    ) -> Any:
        scale, decay, momentum, ahead = (None if factor is None else block.spread(factor) for factor in factors)
        before, new = block.load(residual), block.load(gradient)
        if momentum is None:
            totals = block.sum(before if decay is None else block.times(decay, before), scale, new)
        else:
            speed = block.sum(block.times(momentum, block.load(velocity)), scale, new)
            if ahead is None:
                totals = [block.builder.fadd(x, u) for x, u in zip(before, speed, strict=True)]
            else:
                totals = block.sum(block.sum(before, scale, new), ahead, speed)
            block.store(speed, moving, block.start, stream=stream)
        block.store(totals, out, block.start, stream=stream)
        return block.hits(totals, threshold, peaks)

    @intrinsic
    def code(typing, out, moving, peaks, residual, velocity, gradient, start, threshold, scale, decay, momentum, ahead):
        arrays, factors = (out, moving, peaks, residual, velocity, gradient), (scale, decay, momentum, ahead)
        return types.uint64(*arrays, start, threshold, *factors), _code(body, len(arrays))

    return code


def _copy(*, stream: bool) -> Any:
    def body(block: _Block, source: Any, out: Any, place: Any) -> Any:
        block.store(block.load(source), out, place, stream=stream)
        return block.context.get_dummy_value()

    @intrinsic
    def code(typing, source, out, start, place):
        return types.void(source, out, start, place), _code(body, 2)

    return code


add, add_streaming = (_add(stream=stream) for stream in (False, True))
"""(out, moving, peaks, residual, velocity, gradient, start, threshold, scale, decay, m, ahead): return the hits of out.

out = residual + scale · gradient, or with a decay that is not None decay · residual + scale · gradient. With m,
moving = m · velocity + scale · gradient, and out = residual + moving, or with `ahead` as well
out = residual + scale · gradient + ahead · moving.
"""
copy, copy_streaming = (_copy(stream=stream) for stream in (False, True))
"""(source, out, start, place): copy the block from `start` to `place`."""
