"""Sums of sorted tables."""

from collections.abc import Sequence

from torch import Tensor

from thinwire.kernels import reference
from thinwire.kernels.loops import merge as loops


def merge(keys: Sequence[Tensor], rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """See `reference.merge`; where all keys ascend already, two tables at a time are merged like cards."""
    if not all(bool((key[1:] >= key[:-1]).all()) for key in keys):
        return reference.merge(keys, rows)
    merged, out = keys[0][:0], rows[0][:0]
    for key, row in zip(keys, rows, strict=True):
        merged, out = _merge_two(merged, out, key, row)
    return merged, out


def _merge_two(keys_a: Tensor, rows_a: Tensor, keys_b: Tensor, rows_b: Tensor) -> tuple[Tensor, Tensor]:
    most = keys_a.numel() + keys_b.numel()
    keys, rows = keys_a.new_empty(most), rows_a.new_empty(most, rows_a.shape[1])
    arrays = [t.numpy() for t in (keys, rows, keys_a, rows_a, keys_b, rows_b)]
    count = loops.merge(*arrays)
    return keys[:count], rows[:count]
