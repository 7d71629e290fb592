"""Vector code for blocks of 64 elements, with stores that bypass the cache, which Numba's loops cannot express.

A result that is only written need not be read into the cache first, which saves a quarter of the traffic. Streaming
stores need addresses that are multiples of 64 bytes. Functions that look at magnitudes return hits: 64 bits that say
which magnitudes, as integers, reach the threshold. `peaks` (64 bytes of integers) keeps each lane's largest so far.
"""

from collections.abc import Callable
from functools import wraps
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


def emitted(result: Any = types.void, whole: Any = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of what emits its code, as `declared` has it. Numbers are taken as `whole`, if given."""

    def made(emit: Callable[..., Any]) -> Any:
        @intrinsic
        @wraps(emit)  # Numba reads the names of the arguments
        def instruction(typing, *args):
            kinds = [whole if whole and isinstance(kind, types.Number) else kind for kind in args]
            return declared(emit, tuple(kinds), result, **options)

        return instruction

    return made


@emitted(types.uint64)
def look(code: Code, bits: Any, peaks: Any, start: Any, threshold: Any) -> Any:
    """Return the hits of the block of `bits`."""
    return code.hits(code.block(bits, start), threshold, peaks)


@emitted(types.uint64, types.int64)
def reaching(code: Code, numbers: Any, start: Any, threshold: Any) -> Any:
    """Return the hits of a block of floats. The threshold is an int64."""
    bar = threshold if code.bits == 64 else code.builder.trunc(threshold, ir.IntType(code.bits))
    return code.hits(code.block(numbers, start), bar)


@emitted(types.int64, types.uint64)
def ones(code: Code, hits: Any) -> Any:
    """Return how many bits are set."""
    return code.builder.ctpop(hits)


@emitted(types.uint64, types.uint64)
def lowest(code: Code, hits: Any) -> Any:
    """Return the number of the lowest bit that is set, or 64 if none is."""
    return code.builder.cttz(hits, ir.Constant(ir.IntType(1), 0))


@emitted(types.uint64, types.int64, lanes=FEW)
def leading(code: Code, numbers: Any, count: Any, k: Any) -> Any:
    """Return which k of the first `count` of 16 numbers have the largest magnitudes, as hits. Earlier ones win ties."""
    builder, none, first = code.builder, ir.Constant(code.integer, [-1] * FEW), ir.Constant(count.type, 0)
    count, k = (code.spread(n if code.bits == 64 else builder.trunc(n, ir.IntType(code.bits))) for n in (count, k))
    found = code.magnitudes(code.load(numbers, first))
    inside = builder.icmp_signed("<", ir.Constant(code.integer, list(range(FEW))), count)
    found, ahead = builder.select(inside, found, none), ir.Constant(code.integer, [0] * FEW)
    for turn in range(1, FEW):
        order = [(lane + turn) % FEW for lane in range(FEW)]
        earlier = ir.Constant(code.integer, [int(place < lane) for lane, place in enumerate(order)])
        more = builder.icmp_signed(">", code.shuffled(found, found, order), builder.sub(found, earlier))
        ahead = builder.sub(ahead, builder.sext(more, code.integer))
    best = builder.bitcast(builder.icmp_signed("<", ahead, k), ir.IntType(FEW))
    return builder.zext(best, _HITS)


@emitted(types.int64, types.int64, lanes=SOME)
def at_most(code: Code, numbers: Any, at: Any, bar: Any) -> Any:
    """Return how many of the 16 int64 from an index on are at most `bar`."""
    lanes = code.builder.icmp_signed("<=", code.load(numbers, at), code.spread(bar))
    return code.builder.ctpop(code.builder.zext(code.builder.bitcast(lanes, ir.IntType(SOME)), ir.IntType(64)))


@emitted()
def prefetch(code: Code, array: Any, at: Any) -> None:
    """Fetch the element at an index into the cache. The index may be beyond the end."""
    address = code.builder.bitcast(code.builder.gep(array, [at]), ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [address.type, _NUMBER, _NUMBER, _NUMBER])
    call = cgutils.get_or_insert_function(code.builder.module, kind, "llvm.prefetch.p0")
    code.builder.call(call, [address, *(ir.Constant(_NUMBER, option) for option in _READ_SOON)])


@emitted(types.uint64, flags=CONTRACT)
def add(
    code: Code, out: Any, moving: Any, peaks: Any, residual: Any, velocity: Any, gradient: Any,
    start: Any, threshold: Any, scale: Any, decay: Any, m: Any, ahead: Any, stream: Any,
) -> Any:  # fmt: skip
    """Return the hits of out = residual + scale · gradient, or with a decay decay · residual + scale · gradient.

    With m, moving = m · velocity + scale · gradient, and out = residual + moving, or with `ahead` as well
    out = residual + scale · gradient + ahead · moving. What there is not is None, and so is `stream` but for results
    that go past the cache.
    """
    scale, decay, m, ahead = (None if x is None else code.spread(x) for x in (scale, decay, m, ahead))
    before, new = code.block(residual, start), code.block(gradient, start)

    def sums(xs: list[Any], factor: Any, ys: list[Any]) -> list[Any]:
        products = [code.times(factor, y) for y in ys]
        return [code.plus(x, product) for x, product in zip(xs, products, strict=True)]

    if m is None:
        totals = sums(before if decay is None else [code.times(decay, x) for x in before], scale, new)
    else:
        speed = sums([code.times(m, u) for u in code.block(velocity, start)], scale, new)
        if ahead is None:
            totals = [code.builder.fadd(x, u) for x, u in zip(before, speed, strict=True)]
        else:
            totals = sums(sums(before, scale, new), ahead, speed)
        code.write(speed, moving, start, stream=stream is not None)
    code.write(totals, out, start, stream=stream is not None)
    return code.hits(totals, threshold, peaks)


@emitted()
def copy(code: Code, source: Any, out: Any, start: Any, place: Any, stream: Any) -> None:
    """Copy the block from `start` to `place`: past the cache, unless `stream` is None."""
    code.write(code.block(source, start), out, place, stream=stream is not None)
