"""The DCT of a chunk of 16 × 16 in registers: half the work of two products with matrices."""

from functools import cache
from itertools import chain
from typing import Any

from llvmlite import ir

from thinwire.kernels.chunks.chunking import matrix
from thinwire.kernels.simd import CONTRACT, Code, emitted

SIDE = 16
_LANE = 4  # numbers of 128 bits, as float32: what unpacking stays within
Rows = list[Any]


class _Square:
    """Code for 16 rows of 16 numbers."""

    def __init__(self, code: Code) -> None:
        self.code, self._shuffled = code, code.shuffled

    def transformed(self, rows: Rows, scale: float = 1.0) -> Rows:
        """Return the DCT of the rows' columns, of as many rows as there are (a power of two), times `scale`.

        The rows of a DCT read the same backwards, the odd ones with the other sign. So the even ones are the half as
        long DCT of sums of first and last, over √2, and the odd ones weigh the differences (Chen et al. 1977).
        """
        if len(rows) == 1:
            return [self._times(scale, rows[0])]
        half = len(rows) // 2
        pairs = list(zip(rows[:half], rows[: half - 1 : -1], strict=True))
        sums = [self.code.plus(first, last) for first, last in pairs]
        lacks = [self.code.builder.fsub(first, last, flags=CONTRACT) for first, last in pairs]
        odds = [self._weighed([scale * weight for weight in weights], lacks) for weights in _odd_rows(len(rows))]
        return list(chain.from_iterable(zip(self.transformed(sums, scale * 0.5**0.5), odds, strict=True)))

    def _weighed(self, weights: list[float], rows: Rows) -> Any:
        total = self._times(weights[0], rows[0])
        for weight, row in zip(weights[1:], rows[1:], strict=True):
            total = self.code.plus(total, self._times(weight, row))
        return total

    def _times(self, weight: float, row: Any) -> Any:
        return self.code.times(ir.Constant(self.code.kind, [weight] * SIDE), row)

    def transposed(self, rows: Rows) -> Rows:
        """Return the columns."""
        low, high = ([step + i for step in range(0, SIDE, _LANE) for i in at] for at in ((0, 1), (2, 3)))
        ones = [self._woven(a, b, at) for a, b in zip(rows[::2], rows[1::2], strict=True) for at in (low, high)]
        fours = [
            [self._paired(ones[i + at], ones[i + 2 + at], first) for at in (0, 1) for first in (0, 2)]
            for i in range(0, SIDE, _LANE)
        ]
        columns = [self._lanes(list(same)) for same in zip(*fours, strict=True)]
        return list(chain.from_iterable(zip(*columns, strict=True)))

    def _woven(self, a: Any, b: Any, at: list[int]) -> Any:
        """Take the numbers at these places of a and b in turn."""
        return self._shuffled(a, b, [i + of for i in at for of in (0, SIDE)])

    def _paired(self, a: Any, b: Any, first: int) -> Any:
        """Take two numbers of each lane of a, from `first` on, and those of b."""
        lanes = range(0, SIDE, _LANE)
        return self._shuffled(a, b, [lane + first + of + i for lane in lanes for of in (0, SIDE) for i in (0, 1)])

    def _lanes(self, rows: Rows) -> Rows:
        """Transpose four rows of four lanes."""
        halves = rows[:2], rows[2:]
        (a, b), (c, d) = ([self._every_other(one, other, first) for first in (0, 1)] for one, other in halves)
        return [self._every_other(one, other, first) for first in (0, 1) for one, other in ((a, c), (b, d))]

    def _every_other(self, a: Any, b: Any, first: int) -> Any:
        """Take every second lane of a, then of b."""
        return self._shuffled(a, b, [_LANE * lane + i for lane in range(first, 8, 2) for i in range(_LANE)])


@cache
def _odd_rows(size: int) -> list[list[float]]:
    """Return the first halves of a DCT's odd rows."""
    return matrix(size, "dct")[1::2, : size // 2].tolist()


@emitted(flags=CONTRACT, lanes=SIDE)
def transform(code: Code, z: Any, x: Any, first: Any, pitch: Any) -> None:
    """Write the DCT of rows and columns of 16 × 16 numbers to z; row i is x[first + i · pitch :]. They may overlap."""
    square = _Square(code)
    rows = [code.load(x, code.index(first, (i, pitch))) for i in range(SIDE)]
    for _ in range(2):
        rows = square.transposed(square.transformed(rows))
    for i, row in enumerate(rows):
        code.store(z, ir.Constant(first.type, i * SIDE), row)
