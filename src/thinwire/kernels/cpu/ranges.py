"""Ranges of a large tensor, side by side: no thread pool of Numba's, so that any thread may call."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

_T = TypeVar("_T")
_RANGE, _PIECES = 1 << 18, 4


def map_ranges(run: Callable[[int, int], _T], numel: int, align: int = 1) -> list[_T]:
    """Return run(lo, hi) of ranges that cover 0 to numel, in order, each from a multiple of `align` on.

    Large ones are cut into several pieces per thread: a thread that was held up takes fewer.
    """
    workers = max(1, min(torch.get_num_threads(), numel // _RANGE))
    if workers == 1:
        return [run(0, numel)]
    pieces = workers * max(1, min(_PIECES, numel // workers // (_PIECES * _RANGE)))
    edges = [*(numel * i // pieces // align * align for i in range(pieces)), numel]
    return list(_pool(workers).map(run, edges[:-1], edges[1:]))


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="thinwire")
