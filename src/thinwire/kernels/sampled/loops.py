"""What happens to vectors `first` to `last`: a sample, its threshold, the sum and the picks, one vector at a time.

`table` has the addresses of each vector's tensors, `drawn` the fields of its draw, and from `starts` on `indices` and
`found` (the bits there) take its picks. `sign` masks the sign off; so magnitudes compare as integers, NaN highest.
"""

import numpy as np

from thinwire.kernels.accumulate.cpu import sum_at
from thinwire.kernels.compiled import compiled
from thinwire.kernels.select import loops
from thinwire.kernels.several import element, vector, vector_if

_LANES = 64  # bytes that `peaks` holds


@compiled
def sums(table, lengths, drawn, starts, indices, found, like, sign, first, last, scales, decays, m, ahead):
    # The sample's sums come first, as the threshold must be there before the pass.
    sample, picks, bits = _scratch(lengths, drawn, found, first, last)
    peaks, numbers = np.zeros(_LANES // found.itemsize, found.dtype), sample.view(like.dtype)
    for at in range(first, last):
        size, scale, decay = lengths[at], scales[at], element(decays, at)
        out, residual = vector(table[at, 0], size, like), vector(table[at, 1], size, like)
        gradient = vector(table[at, 2], size, like)
        moving = vector_if(m, table[at, -2], size, like)
        velocity = vector_if(m, table[at, -1], size, like)
        count, offset = 0, drawn[at, 0]
        if drawn[at, 1] == 1:  # without a stride, it vectorises
            count = size - offset
            for i in range(count):
                numbers[i] = sum_at(residual, gradient, offset + i, scale, decay, velocity, m, ahead)
        for i in range(offset + count, size, drawn[at, 1]):
            numbers[count] = sum_at(residual, gradient, i, scale, decay, velocity, m, ahead)
            count += 1
        bar, room = _threshold(sample[:count], sign, drawn[at, 2], like), _room(size, drawn[at])
        each = out.view(found.dtype)
        count = loops.accumulate_select(
            each, sign, bar, 0, size, picks, bits, room, peaks, False,
            out, residual, gradient, scale, decay, moving, velocity, m, ahead,
        )  # fmt: skip
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
