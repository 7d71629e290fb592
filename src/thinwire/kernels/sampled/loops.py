"""What happens to vectors `first` to `last`: a sample, its threshold, the sum and the picks, one vector at a time.

`table` has the addresses of each vector's tensors, `drawn` the fields of its draw, and from `starts` on `indices` and
`found` (the bits there) take its picks. `sign` masks the sign off; so magnitudes compare as integers, NaN highest.
"""

import numpy as np

from thinwire.kernels.compiled import compiled
from thinwire.kernels.select import loops
from thinwire.kernels.several import vector

_LANES = 64  # bytes that `peaks` holds


@compiled
def sums(table, lengths, drawn, starts, indices, found, like, sign, first, last, scales):
    # out = residual + scale · gradient. The sample's sums come first, as the threshold must be there before the pass.
    sample, picks, bits = _scratch(lengths, drawn, found, first, last)
    peaks, numbers = np.zeros(_LANES // found.itemsize, found.dtype), sample.view(like.dtype)
    for at in range(first, last):
        size, scale = lengths[at], scales[at]
        out, residual = vector(table[at, 0], size, like), vector(table[at, 1], size, like)
        gradient, count = vector(table[at, 2], size, like), 0
        if drawn[at, 1] == 1:  # without a stride, it vectorises
            count = size - drawn[at, 0]
            for i in range(count):
                numbers[i] = residual[drawn[at, 0] + i] + scale * gradient[drawn[at, 0] + i]
        else:
            for i in range(drawn[at, 0], size, drawn[at, 1]):
                numbers[count] = residual[i] + scale * gradient[i]
                count += 1
        bar, room = _threshold(sample[:count], sign, drawn[at, 2], like), _room(size, drawn[at])
        each = out.view(found.dtype)
        count = loops.accumulate_select(
            each, sign, bar, 0, size, picks, bits, room, peaks, False, out, residual, gradient, scale
        )
        here, there = indices[starts[at] : starts[at + 1]], found[starts[at] : starts[at + 1]]
        _keep(each, sign, picks, bits, count, room, here, there)


@compiled
def momentum_sums(table, lengths, drawn, starts, indices, found, like, sign, first, last, scales, m, nesterov):
    # The same with momentum, m. `scales`: of the gradients, one for each tensor.
    sample, picks, bits = _scratch(lengths, drawn, found, first, last)
    peaks, numbers = np.zeros(_LANES // found.itemsize, found.dtype), sample.view(like.dtype)
    for at in range(first, last):
        size, scale = lengths[at], scales[at]
        out, moving = vector(table[at, 0], size, like), vector(table[at, 1], size, like)
        residual, velocity = vector(table[at, 2], size, like), vector(table[at, 3], size, like)
        gradient, count = vector(table[at, 4], size, like), 0
        if drawn[at, 1] == 1 and not nesterov:
            count = size - drawn[at, 0]
            for i in range(count):
                new = m * velocity[drawn[at, 0] + i] + scale * gradient[drawn[at, 0] + i]
                numbers[i] = residual[drawn[at, 0] + i] + new
        for i in range(drawn[at, 0] + count, size, drawn[at, 1]):
            new = m * velocity[i] + scale * gradient[i]
            numbers[count] = (residual[i] + scale * gradient[i]) + m * new if nesterov else residual[i] + new
            count += 1
        bar, room = _threshold(sample[:count], sign, drawn[at, 2], like), _room(size, drawn[at])
        each = out.view(found.dtype)
        count = loops.momentum_select(
            each,
            sign,
            bar,
            0,
            size,
            picks,
            bits,
            room,
            peaks,
            False,
            out,
            moving,
            residual,
            velocity,
            gradient,
            scale,
            m,
            nesterov,
        )
        here, there = indices[starts[at] : starts[at + 1]], found[starts[at] : starts[at + 1]]
        _keep(each, sign, picks, bits, count, room, here, there)


@compiled
def _room(size, draw):
    # `Draw.room`.
    promised = 3 * draw[2] * draw[1] + 80 if draw[2] else size
    return min(size, max(promised, draw[3]))


@compiled
def _scratch(lengths, drawn, found, first, last):
    # Room for the most that any of these vectors needs, made once for all of them.
    samples = room = 0
    for at in range(first, last):
        samples = max(samples, (lengths[at] - drawn[at, 0]) // drawn[at, 1] + 1)
        room = max(room, _room(lengths[at], drawn[at]))
    return np.empty(samples, found.dtype), np.empty(room + 1, np.int32), np.empty(room + 1, found.dtype)


@compiled
def _threshold(sample, sign, rank, like):
    # As bits, and at least 1, because zeros are not picked. If the sample has a NaN, it is infinity.
    one, top = sample.dtype.type(1), sample.dtype.type(0)
    if rank == 0:
        return one
    for i in range(sample.size):
        top = max(top, sample[i] & sign)
    infinity = np.full(1, np.inf, like.dtype).view(sample.dtype)[0]
    if top > infinity:
        return infinity
    bar, _ = loops.kth(sample, sign, rank)
    return max(one, sample.dtype.type(bar))


@compiled
def _keep(each, sign, picks, bits, count, room, indices, found):
    # Keeps the largest of the picks, or of all elements if there were more picks than room, and fills up with −1.
    if count > room:
        taken = loops.take_largest(np.arange(each.size).astype(np.int32), each, sign, indices, found)
    else:
        taken = loops.take_largest(picks[:count], bits[:count], sign, indices, found)
    indices[taken:] = -1
    found[taken:] = 0
