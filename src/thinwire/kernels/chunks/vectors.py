"""Weighted sums of vectors of 64 bytes, which Numba's loops would not keep in registers.

Each function takes (y, to, weights, first, step, x, at, far, count), all arrays of one type: it computes the vector
Σ weights[first + t · step] · x[at + t · far :] over t < `count`, in this order, for y[to:].
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from thinwire.kernels.compiled import intrinsic

BYTES = 64
_SCALARS: dict[Any, Any] = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}


def _sum(flags: tuple[str, ...], *, subtract: bool = False) -> Any:
    @intrinsic
    def code(typing, y, to, weights, first, step, x, at, far, count):
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = zip(signature.args, args, strict=True)
            _emit(builder, [_data(context, builder, *pair) for pair in kinds], _vector(y.dtype), flags, subtract)
            return context.get_dummy_value()

        return types.void(y, types.intp, weights, types.intp, types.intp, x, *(types.intp,) * 3), generate

    return code


def _emit(builder: Any, args: Any, kind: Any, flags: tuple[str, ...], subtract: bool) -> None:
    y, to, weights, first, step, x, at, far, count = args
    total = cgutils.alloca_once_value(builder, ir.Constant(kind, [0.0] * kind.count))
    with cgutils.for_range(builder, count) as loop:
        weight = builder.load(builder.gep(weights, [builder.add(first, builder.mul(loop.index, step))]))
        vector = _load(builder, x, builder.add(at, builder.mul(loop.index, far)), kind)
        product = builder.fmul(_spread(builder, weight, kind), vector, flags=flags)
        builder.store(builder.fadd(builder.load(total), product, flags=flags), total)
    found = builder.load(total)
    found = builder.fsub(_load(builder, y, to, kind), found) if subtract else found
    builder.store(found, _address(builder, y, to, kind)).align = BYTES // kind.count


def _vector(dtype: Any) -> Any:
    return ir.VectorType(_SCALARS[dtype], 8 * BYTES // dtype.bitwidth)


def _data(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value


def _address(builder: Any, data: Any, at: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(data, [at]), kind.as_pointer())


def _load(builder: Any, data: Any, at: Any, kind: Any) -> Any:
    vector = builder.load(_address(builder, data, at, kind))
    vector.align = BYTES // kind.count
    return vector


def _spread(builder: Any, value: Any, kind: Any) -> Any:
    empty, zeros = ir.Constant(kind, ir.Undefined), ir.VectorType(ir.IntType(32), kind.count)
    first = builder.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, empty, ir.Constant(zeros, [0] * kind.count))


weigh: Callable[..., None] = _sum(("contract",))
"""Write the sum."""
weigh_exactly: Callable[..., None] = _sum(())
"""Write the sum, every product and sum rounded on its own."""
subtract: Callable[..., None] = _sum((), subtract=True)
"""Subtract the sum."""
