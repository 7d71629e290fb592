"""Count sketches."""

from typing import Any

import numpy as np
from torch import Tensor

from thinwire.kernels.cpu.ranges import map_ranges
from thinwire.kernels.loops import sketch as loops
from thinwire.kernels.memory import empty
from thinwire.kernels.reference.hashing import keys
from thinwire.kernels.reference.sketch import SKETCH_ROWS


def sketch_insert(x: Tensor, rows: int, buckets: int, seed: int) -> Tensor:
    """See `reference.sketch_insert`; each thread fills its share of the table, in the order of the indices."""
    table = x.new_zeros(rows, buckets)
    arrays, work = (table.numpy(), x.numpy(), _sketch_keys(rows, seed)), max(1, rows * x.numel())

    def run(lo: int, hi: int) -> None:
        loops.sketch_insert(*arrays, rows * buckets * lo // work, rows * buckets * hi // work)

    map_ranges(run, work)
    return table


def sketch_query(table: Tensor, numel: int, seed: int) -> Tensor:
    """See `reference.sketch_query`."""
    out = empty(numel, table.dtype, table.device)
    arrays = (out.numpy(), table.numpy(), _sketch_keys(table.shape[0], seed))
    map_ranges(lambda lo, hi: loops.sketch_query(*arrays, lo, hi), numel)
    return out


def _sketch_keys(rows: int, seed: int) -> np.ndarray[Any, Any]:
    return np.array([keys(SKETCH_ROWS * seed + j) for j in range(rows)], np.uint32)
