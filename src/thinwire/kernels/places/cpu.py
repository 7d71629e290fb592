"""Indices on their way: moved to where their vectors lie, and checked when they arrive."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.compiled import compiled


def placed(indices: Tensor, regions: Sequence[tuple[int, int]], runs: Sequence[int]) -> Tensor:
    out = np.empty(indices.numel(), np.int32)
    _place_loop(indices.numpy(), np.array(regions, np.int64), np.array(runs, np.int64), out)
    return torch.from_numpy(out)


def misplaced(keys: Tensor, edges: Tensor, least: int | None, inside: Tensor | None = None) -> Tensor:
    if inside is not None:
        torch.clamp(keys, 0, max(0, int(edges[-1]) - 1), out=inside)
    return torch.tensor(_misplaced_loop(keys.numpy(), edges.numpy(), -1 if least is None else least), device="cpu")


def differ(rows: Tensor, fixed: Tensor) -> Tensor:
    return torch.tensor(_differ_loop(rows.numpy(), fixed.numpy()), device="cpu")


@compiled
def _differ_loop(rows, fixed):
    wrong = False
    for row in rows:
        for i in range(fixed.shape[1]):
            wrong |= (row[fixed[0, i]] & fixed[2, i]) != fixed[1, i]
    return wrong


@compiled
def _place_loop(indices, regions, runs, out):
    at = 0
    for i in range(runs.size):
        offset, last = regions[i, 0], regions[i, 0] + regions[i, 1] - 1
        for place in range(at, at + runs[i]):
            index = indices[place]
            out[place] = last if index < 0 else index + offset
        at += runs[i]


@compiled
def _misplaced_loop(keys, edges, least):
    for row in keys:
        low, high, wrong = edges[0], edges[1], False  # of the interval that the key before lies in
        before = np.int64(edges[0]) - 1
        for key in row:
            if key < low or key >= high:
                at = np.searchsorted(edges, key, side="right")
                if at % 2 == 0:
                    return True
                low, high = edges[at - 1], edges[at]
            wrong |= least >= 0 and key < before + least
            before = np.int64(key)
        if wrong:
            return True
    return False
