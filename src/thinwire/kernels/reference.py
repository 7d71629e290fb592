"""The executable specification of every kernel, in plain torch.

All tensors are flat. Magnitudes are compared so that NaN ranks above infinity, and infinity above every number: what is
not finite is always selected, never hidden. Zeros are never selected.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

SKETCH_ROWS = 64
"""How far apart the seeds of two sketches' hashes lie."""


def accumulate(out: Tensor, residual: Tensor, gradient: Tensor, scale: float) -> None:
    """Compute out = residual + scale · gradient. `out` may not overlap the inputs."""
    torch.add(residual, gradient.to(residual.dtype), alpha=scale, out=out)


def accumulate_momentum(
    out: Tensor,
    velocity_out: Tensor,
    residual: Tensor,
    velocity: Tensor,
    gradient: Tensor,
    scale: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """Compute u' = m · u + scale · g and out = residual + u', or residual + scale · g + m · u' (Nesterov)."""
    gradient = gradient.to(residual.dtype)
    torch.mul(velocity, momentum, out=velocity_out)
    velocity_out.add_(gradient, alpha=scale)
    if nesterov:
        torch.add(residual, gradient, alpha=scale, out=out).add_(velocity_out, alpha=momentum)
    else:
        torch.add(residual, velocity_out, out=out)


def select(x: Tensor, threshold: float, capacity: int) -> Tensor | None:
    """Return the indices (int32, ascending) of 0 < |x| ≥ threshold, or None when there are more than `capacity`."""
    magnitude = x.abs()
    chosen = ((magnitude >= threshold) & (magnitude > 0)) | magnitude.isnan()
    indices = chosen.nonzero().view(-1).to(torch.int32)
    return indices if indices.numel() <= capacity else None


def accumulate_select(
    out: Tensor, residual: Tensor, gradient: Tensor, scale: float, threshold: float, capacity: int
) -> Tensor | None:
    """`accumulate`, then `select` on its result."""
    accumulate(out, residual, gradient, scale)
    return select(out, threshold, capacity)


def accumulate_momentum_select(
    out: Tensor,
    velocity_out: Tensor,
    residual: Tensor,
    velocity: Tensor,
    gradient: Tensor,
    scale: float,
    momentum: float,
    nesterov: bool,
    threshold: float,
    capacity: int,
) -> Tensor | None:
    """`accumulate_momentum`, then `select` on its result."""
    accumulate_momentum(out, velocity_out, residual, velocity, gradient, scale, momentum, nesterov)
    return select(out, threshold, capacity)


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, runs: tuple[int, ...], sign: float = 1.0) -> None:
    """Add sign · values at indices (int32), run after run. Within a run no index occurs twice with a value but 0.

    The runs give a fixed order of summation, also on devices that add atomically.
    """
    values = values.to(out.dtype)
    for index, value in zip(indices.split(runs), values.split(runs), strict=True):
        out.index_add_(0, index, value, alpha=sign)


def mask(x: Tensor, indices: Tensor, values: Tensor) -> None:
    """Set `x` to zero at indices (int32) whose value is not 0."""
    x[indices[values != 0]] = 0


def mix(indices: Tensor, seed: int) -> Tensor:
    """Hash int32 indices to [0, 2³²) as int64, one to one for a given seed (multiply and xor-shift, twice).

    The key enters twice: added or xored once, it would only permute neighbouring indices, and the same would meet
    again.
    """
    high, low = keys(seed)
    x = (indices.to(torch.int64) + high) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x ^= low
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def keys(seed: int) -> tuple[int, int]:
    """Return two 32-bit keys for `mix`."""
    key = (seed + 1) * 0x9E3779B97F4A7C15
    return (key >> 32) & 0xFFFFFFFF, key & 0xFFFFFFFF


def hashed_slots(indices: Tensor, priorities: Tensor, slots: int, seed: int) -> Tensor:
    """Write each index into slot ⌊mix(index) · slots / 2³²⌋ and return the slots (int32); −1 marks an empty one.

    Where several meet, the highest priority (int32, not negative) stays, and of equal ones the largest index.
    """
    slot = (mix(indices, seed) * slots) >> 32
    ranked = (priorities.to(torch.int64) << 32) | indices.to(torch.int64)
    table = torch.full((slots,), -1, dtype=torch.int64, device=indices.device)
    return table.scatter_reduce_(0, slot, ranked, "amax").to(torch.int32)


def merge(keys: Sequence[Tensor], rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of tables, each of rows (n, width) at keys (int32): keys ascending, each once, added in order."""
    merged, places = torch.unique(torch.cat(list(keys)), return_inverse=True)
    out = rows[0].new_zeros(merged.numel(), rows[0].shape[1])
    for row, place in zip(rows, places.split([key.numel() for key in keys]), strict=True):
        out.index_add_(0, place, row)
    return merged.to(torch.int32), out


def sketch_insert(x: Tensor, rows: int, buckets: int, seed: int) -> Tensor:
    """Return the count sketch S[j, h_j(i)] = Σ s_j(i) · x[i] as a (rows, buckets) table of x's dtype."""
    table = x.new_zeros(rows, buckets)
    for j in range(rows):
        bucket, sign = _sketch_hash(x, buckets, seed, j)
        table[j].index_add_(0, bucket, sign * x)
    return table


def sketch_query(table: Tensor, numel: int, seed: int) -> Tensor:
    """Return for each of `numel` elements the median over j of s_j(i) · S[j, h_j(i)], of two middle ones the mean."""
    rows, buckets = table.shape
    estimates = table.new_empty(rows, numel)
    for j in range(rows):
        bucket, sign = _sketch_hash(estimates[j], buckets, seed, j)
        torch.mul(sign, table[j].index_select(0, bucket), out=estimates[j])
    ordered = estimates.sort(dim=0).values
    return (ordered[(rows - 1) // 2] + ordered[rows // 2]) / 2


def _sketch_hash(like: Tensor, buckets: int, seed: int, j: int) -> tuple[Tensor, Tensor]:
    """Return bucket and sign of each element in row j: the sign is the lowest bit of its hash."""
    mixed = mix(torch.arange(like.numel(), dtype=torch.int32, device=like.device), SKETCH_ROWS * seed + j)
    return ((mixed >> 1) * buckets) >> 31, (1 - 2 * (mixed & 1)).to(like.dtype)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Lay the low `bits` (1 to 15) of each int16 code behind one another: uint8 (⌈n · bits / 8⌉), padded with zeros.

    The least significant bit comes first, in the code and in the byte.
    """
    places = torch.arange(bits, dtype=torch.int16, device=codes.device)
    ones = ((codes[:, None] >> places) & 1).to(torch.uint8).view(-1)
    ones = torch.nn.functional.pad(ones, (0, -ones.numel() % 8)).view(-1, 8)
    return (ones << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(1, dtype=torch.uint8)


def unpack_bits(buffer: Tensor, count: int, bits: int) -> Tensor:
    """Return the `count` codes (int16, not negative) that `pack_bits` laid into uint8 `buffer`."""
    places = torch.arange(8, dtype=torch.uint8, device=buffer.device)
    ones = ((buffer[:, None] >> places) & 1).view(-1)[: count * bits].view(count, bits).to(torch.int16)
    return (ones << torch.arange(bits, dtype=torch.int16, device=buffer.device)).sum(1, dtype=torch.int16)
