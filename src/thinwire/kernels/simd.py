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
CONTRACT = ("contract",)
_SCALARS: dict[Any, Any] = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}
_HITS, _NUMBER = ir.IntType(BLOCK), ir.IntType(32)
_READ_SOON = (0, 3, 1)  # to read, into the nearest cache, of data


class Code:
    """Instructions on vectors of some numbers of one type: of 64 bytes, unless `lanes` says how many.

    Every product and sum is rounded on its own without `flags`.
    """

    def __init__(self, builder: Any, dtype: Any, flags: tuple[str, ...] = (), lanes: int | None = None) -> None:
        self.builder, self.flags, self.bits = builder, flags, dtype.bitwidth
        self.count = lanes or 512 // self.bits
        self.integer = ir.VectorType(ir.IntType(self.bits), self.count)
        self.kind = ir.VectorType(_SCALARS[dtype], self.count) if dtype in _SCALARS else self.integer

    def load(self, data: Any, at: Any, kind: Any = None) -> Any:
        """Load the vector at an index; or another kind of vector."""
        vector = self.builder.load(self._address(data, at, kind or self.kind))
        vector.align = self.bits // 8
        return vector

    def store(self, data: Any, at: Any, vector: Any, *, align: int = 0, stream: bool = False) -> None:
        """Write a vector at an index; if `stream`, past the cache, where it must begin at a multiple of 64 bytes."""
        stored = self.builder.store(vector, self._address(data, at, vector.type))
        stored.align = 64 if stream else align or self.bits // 8
        if stream:
            stored.set_metadata("nontemporal", self.builder.module.add_metadata([ir.Constant(_NUMBER, 1)]))

    def spread(self, value: Any) -> Any:
        """Return a vector with `value` in every lane."""
        empty, zeros = ir.Constant(ir.VectorType(value.type, self.count), ir.Undefined), [0] * self.count
        return self.shuffled(self.builder.insert_element(empty, value, ir.Constant(_NUMBER, 0)), empty, zeros)

    def shuffled(self, a: Any, b: Any, places: list[int]) -> Any:
        """Return the numbers at these places of a, and behind it b."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_NUMBER, len(places)), places))

    def times(self, a: Any, b: Any) -> Any:
        """Return a · b."""
        return self.builder.fmul(a, b, flags=self.flags)

    def plus(self, a: Any, b: Any) -> Any:
        """Return a + b."""
        return self.builder.fadd(a, b, flags=self.flags)

    def more(self, total: Any, weight: Any, vector: Any) -> Any:
        """Return total + weight · vector."""
        return self.plus(total, self.times(self.spread(weight), vector))

    def magnitudes(self, vector: Any) -> Any:
        """Return a vector's magnitudes as integers."""
        ones = ir.Constant(self.integer, [(1 << (self.bits - 1)) - 1] * self.count)
        return self.builder.and_(self.builder.bitcast(vector, self.integer), ones)

    def index(self, start: Any, *steps: tuple[Any, Any]) -> Any:
        """Return start + Σ number · step."""
        for number, step in steps:
            number = ir.Constant(start.type, number) if isinstance(number, int) else number
            start = self.builder.add(start, self.builder.mul(number, step))
        return start

    def element(self, data: Any, at: Any) -> Any:
        """Load one number."""
        return self.builder.load(self.builder.gep(data, [at]))

    def block(self, data: Any, start: Any) -> list[Any]:
        """Load the 64 elements from `start` on."""
        return [self.load(data, at) for at in self._each(start)]

    def write(self, vectors: list[Any], data: Any, place: Any, *, stream: bool) -> None:
        """Write a block from `place` on. Do so after all loads: the compiler cannot move loads across stores."""
        for at, vector in zip(self._each(place), vectors, strict=True):
            self.store(data, at, vector, stream=stream)

    def hits(self, vectors: list[Any], threshold: Any, peaks: Any = None) -> Any:
        """Return which magnitudes of a block reach the threshold, and update the peaks."""
        hits, bar = ir.Constant(_HITS, 0), self.spread(threshold)
        first = ir.Constant(ir.IntType(64), 0)
        peak = None if peaks is None else self.load(peaks, first, self.integer)
        for number, vector in enumerate(vectors):
            found = self.magnitudes(vector)
            if peak is not None:
                peak = self.builder.select(self.builder.icmp_signed(">", peak, found), peak, found)
            lanes = self.builder.bitcast(self.builder.icmp_signed(">=", found, bar), ir.IntType(self.count))
            wide = lanes if self.count == BLOCK else self.builder.zext(lanes, _HITS)
            hits = self.builder.or_(hits, self.builder.shl(wide, ir.Constant(_HITS, number * self.count)))
        if peak is not None:
            self.store(peaks, first, peak)
        return hits

    def _each(self, first: Any) -> list[Any]:
        """Return where every vector of a block begins, the first one at `first`."""
        return [self.builder.add(first, ir.Constant(first.type, at)) for at in range(0, BLOCK, self.count)]

    def _address(self, data: Any, at: Any, kind: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(data, [at]), kind.as_pointer())


def declared(
    emit: Callable[..., Any], args: tuple[Any, ...], result: Any = types.void, code: Any = Code, **options: Any
) -> tuple[Any, Any]:
    """Return signature and code of an intrinsic.

    `emit` is given the instructions for the numbers of the first array, and the arguments: of an array where its
    elements begin, and what is None for Numba is None.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        dtypes, given = [], list[Any]()
        for kind, value in zip(signature.args, values, strict=True):
            if isinstance(kind, types.Array):
                dtypes.append(kind.dtype)
                given.append(context.make_array(kind)(context, builder, value).data)
            else:
                given.append(None if kind == types.none else value)
        found = emit(code(builder, dtypes[0] if dtypes else types.int64, **options), *given)
        return context.get_dummy_value() if result == types.void else found

    return result(*args), generate


@intrinsic
def look(typing, bits, peaks, start, threshold):
    """Return the hits of the block of `bits`."""

    def emit(code: Code, bits: Any, peaks: Any, start: Any, threshold: Any) -> Any:
        return code.hits(code.block(bits, start), threshold, peaks)

    return declared(emit, (bits, peaks, start, threshold), types.uint64)


@intrinsic
def reaching(typing, numbers, start, threshold):
    """Return the hits of a block of floats. The threshold is an int64."""

    def emit(code: Code, numbers: Any, start: Any, threshold: Any) -> Any:
        bar = threshold if code.bits == 64 else code.builder.trunc(threshold, ir.IntType(code.bits))
        return code.hits(code.block(numbers, start), bar)

    return declared(emit, (numbers, types.int64, types.int64), types.uint64)


@intrinsic
def ones(typing, hits):
    """Return how many bits are set."""
    return declared(lambda code, hits: code.builder.ctpop(hits), (types.uint64,), types.int64)


@intrinsic
def lowest(typing, hits):
    """Return the number of the lowest bit that is set, or 64 if none is."""

    def emit(code: Code, hits: Any) -> Any:
        return code.builder.cttz(hits, ir.Constant(ir.IntType(1), 0))

    return declared(emit, (types.uint64,), types.uint64)


@intrinsic
def leading(typing, numbers, count, k):
    """Return which k of the first `count` of 16 numbers have the largest magnitudes, as hits. Earlier ones win ties."""

    def emit(code: Code, numbers: Any, *given: Any) -> Any:
        builder, none = code.builder, ir.Constant(code.integer, [-1] * FEW)
        count, k = (code.spread(n if code.bits == 64 else builder.trunc(n, ir.IntType(code.bits))) for n in given)
        found = code.magnitudes(code.load(numbers, ir.Constant(given[0].type, 0)))
        inside = builder.icmp_signed("<", ir.Constant(code.integer, list(range(FEW))), count)
        found, ahead = builder.select(inside, found, none), ir.Constant(code.integer, [0] * FEW)
        for turn in range(1, FEW):
            order = [(lane + turn) % FEW for lane in range(FEW)]
            earlier = ir.Constant(code.integer, [int(place < lane) for lane, place in enumerate(order)])
            more = builder.icmp_signed(">", code.shuffled(found, found, order), builder.sub(found, earlier))
            ahead = builder.sub(ahead, builder.sext(more, code.integer))
        best = builder.bitcast(builder.icmp_signed("<", ahead, k), ir.IntType(FEW))
        return builder.zext(best, _HITS)

    return declared(emit, (numbers, types.int64, types.int64), types.uint64, lanes=FEW)


@intrinsic
def at_most(typing, numbers, at, bar):
    """Return how many of the 16 int64 from an index on are at most `bar`."""

    def emit(code: Code, numbers: Any, at: Any, bar: Any) -> Any:
        lanes = code.builder.icmp_signed("<=", code.load(numbers, at), code.spread(bar))
        return code.builder.ctpop(code.builder.zext(code.builder.bitcast(lanes, ir.IntType(SOME)), ir.IntType(64)))

    return declared(emit, (numbers, types.int64, types.int64), types.int64, lanes=SOME)


@intrinsic
def prefetch(typing, array, at):
    """Fetch the element at an index into the cache. The index may be beyond the end."""

    def emit(code: Code, data: Any, at: Any) -> None:
        address = code.builder.bitcast(code.builder.gep(data, [at]), ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [address.type, _NUMBER, _NUMBER, _NUMBER])
        call = cgutils.get_or_insert_function(code.builder.module, kind, "llvm.prefetch.p0")
        code.builder.call(call, [address, *(ir.Constant(_NUMBER, option) for option in _READ_SOON)])

    return declared(emit, (array, at))


def _add(*, stream: bool) -> Any:
    def emit(
        code: Code, out: Any, moving: Any, peaks: Any, residual: Any, velocity: Any, gradient: Any,
        start: Any, threshold: Any, *factors: Any,
    ) -> Any:  # fmt: skip
        scale, decay, momentum, ahead = (None if factor is None else code.spread(factor) for factor in factors)
        before, new = code.block(residual, start), code.block(gradient, start)

        def sums(xs: list[Any], factor: Any, ys: list[Any]) -> list[Any]:
            products = [code.times(factor, y) for y in ys]
            return [code.plus(x, product) for x, product in zip(xs, products, strict=True)]

        if momentum is None:
            totals = sums(before if decay is None else [code.times(decay, x) for x in before], scale, new)
        else:
            speed = sums([code.times(momentum, u) for u in code.block(velocity, start)], scale, new)
            if ahead is None:
                totals = [code.builder.fadd(x, u) for x, u in zip(before, speed, strict=True)]
            else:
                totals = sums(sums(before, scale, new), ahead, speed)
            code.write(speed, moving, start, stream=stream)
        code.write(totals, out, start, stream=stream)
        return code.hits(totals, threshold, peaks)

    @intrinsic
    def code(typing, out, moving, peaks, residual, velocity, gradient, start, threshold, scale, decay, momentum, ahead):
        arrays, factors = (out, moving, peaks, residual, velocity, gradient), (scale, decay, momentum, ahead)
        return declared(emit, (*arrays, start, threshold, *factors), types.uint64, flags=CONTRACT)

    return code


def _copy(*, stream: bool) -> Any:
    def emit(code: Code, source: Any, out: Any, start: Any, place: Any) -> None:
        code.write(code.block(source, start), out, place, stream=stream)

    @intrinsic
    def code(typing, source, out, start, place):
        return declared(emit, (source, out, start, place))

    return code


add, add_streaming = (_add(stream=stream) for stream in (False, True))
"""(out, moving, peaks, residual, velocity, gradient, start, threshold, scale, decay, m, ahead): return the hits of out.

out = residual + scale · gradient, or with a decay that is not None decay · residual + scale · gradient. With m,
moving = m · velocity + scale · gradient, and out = residual + moving, or with `ahead` as well
out = residual + scale · gradient + ahead · moving.
"""
copy, copy_streaming = (_copy(stream=stream) for stream in (False, True))
"""(source, out, start, place): copy the block from `start` to `place`."""
