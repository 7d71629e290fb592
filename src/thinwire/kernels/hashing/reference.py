"""Hashing indices to slots of a table, and into count sketches; and indices in slot order, region by region, packed."""

from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from thinwire.kernels.bits.reference import pack_bits, unpack_bits
from thinwire.kernels.parts import Array, Found, Ints, Regions, Vectors, gather
from thinwire.kernels.places.reference import differ, placed

Seed = int | Tensor
"""A tensor (int64) holds seeds that only the device knows, of a shape that broadcasts."""
SKETCH_ROWS = 64
"""How far apart the hash seeds of two sketches are."""


def mix(indices: Tensor, seed: Seed) -> Tensor:
    """Hash int32 indices to [0, 2³²) as int64, one to one for a given seed (multiply and xor-shift, twice).

    The key enters twice. If it entered once, by an addition or xor, a new seed would only permute neighbouring indices,
    and those that collided would collide again.
    """
    high, low = keys(seed)
    x = (indices.to(torch.int64) + high) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x ^= low
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


@overload
def keys(seed: int) -> tuple[int, int]: ...
@overload
def keys(seed: Tensor) -> tuple[Tensor, Tensor]: ...
@overload
def keys(seed: Array) -> tuple[Array, Array]: ...
def keys(seed: Any) -> Any:
    """Return two 32-bit keys for `mix`. Several seeds, and their keys, are int64."""
    key = (seed + 1) * (0x9E3779B97F4A7C15 - (1 << 64))  # modulo 2⁶⁴, so that int64 has room for it
    return (key >> 32) & 0xFFFFFFFF, key & 0xFFFFFFFF


def slot_of(indices: Tensor, slots: int, numel: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return slot in [0, slots) and quotient in [0, ⌈numel/slots⌉) of indices in [0, numel), int64 both.

    One to one: `index_of` undoes it, so a slot's number carries part of the index. With i = q · slots + s, three
    Feistel rounds add a hash of q to s, of s to q and of q to s, modulo slots and ⌈numel/slots⌉.
    """
    slots = max(1, slots)
    height = -(-numel // slots)
    q, s = indices.to(torch.int64) // slots, indices.to(torch.int64) % slots
    s = (s + _within(q, slots, 3 * seed)) % slots
    q = (q + _within(s, height, 3 * seed + 1)) % height
    return (s + _within(q, slots, 3 * seed + 2)) % slots, q


def index_of(slot: Tensor, quotient: Tensor, slots: int, numel: int, seed: Seed) -> Tensor:
    """Return the indices (int64) that `slot_of` took apart. A pair that belongs to none gives `numel` or more."""
    slots = max(1, slots)
    height = -(-numel // slots)
    s = (slot.to(torch.int64) - _within(quotient, slots, 3 * seed + 2)) % slots
    q = (quotient.to(torch.int64) - _within(s, height, 3 * seed + 1)) % height
    return q * slots + (s - _within(q, slots, 3 * seed)) % slots


def _within(x: Tensor, bound: int, seed: Seed) -> Tensor:
    return (mix(x, seed) * bound) >> 32


def hashed_slots(indices: Tensor, priorities: Tensor, slots: int, numel: int, seed: int) -> Tensor:
    """Put each index (int32) below `numel` into its slot (`slot_of`); return the slots (int32), −1 where empty.

    If several indices hash to a slot, the one of highest priority (int32, not negative) keeps it; on a tie, the largest
    index. Indices below 0 are left out.
    """
    indices, priorities = indices[indices >= 0], priorities[indices >= 0]
    slot, _ = slot_of(indices, slots, numel, seed)
    ranked = (priorities.to(torch.int64) << 32) | indices.to(torch.int64)
    table = torch.full((slots,), -1, dtype=torch.int64, device=indices.device)
    return table.scatter_reduce_(0, slot, ranked, "amax").to(torch.int32)


def hashed_slots_of_each(
    xs: Vectors, indices: Tensor, priorities: Tensor, runs: Ints, slots: Ints, seeds: Ints, regions: Regions
) -> Found:
    """`hashed_slots` for each of n ≥ 1 vectors. `runs` says how many of the indices and priorities are each one's.

    Priorities are int32, or floats of which magnitudes count. Returns the slots (int32) of one vector after another's
    as `placed` returns indices, with a region's last index where empty, and the elements there, 0 where empty.
    """
    if priorities.is_floating_point():
        priorities = priorities.abs().to(torch.float32).view(torch.int32)
    places = zip(xs, indices.split(list(runs)), priorities.split(list(runs)), slots, seeds, strict=True)
    found = [hashed_slots(index, rank, count, x.numel(), seed) for x, index, rank, count, seed in places]
    values = torch.cat([gather(x, at) for x, at in zip(xs, found, strict=True)])
    return Found(placed(torch.cat(found), regions, slots), values, values.count_nonzero())


def slot_codes(indices: Tensor, numel: int, seed: int) -> Tensor:
    """Return codes (int32) of indices (int32), one per slot: the quotient (`slot_of`) of an index in its own slot.

    An empty slot holds `numel` − 1, and its code is the number after all quotients. Any other index outside its slot is
    out of order, and its code is −1.
    """
    slots, last = indices.numel(), numel - 1
    slot, quotient = slot_of(indices.clamp(0, last), slots, numel, seed)
    placed = (slot == torch.arange(slots, device=indices.device)) & (indices >= 0) & (indices <= last)
    elsewhere = torch.where(indices == last, -(-numel // max(1, slots)), -1)
    return torch.where(placed, quotient, elsewhere).to(torch.int32)


def slot_indices(codes: Tensor, numel: int, seed: Seed) -> Tensor:
    """Return the indices (int32) from which `slot_codes` made these codes (int32); −1 where a code stands for none.

    Of several rows of codes, each may have a seed of its own: int64 (rows, 1).
    """
    slots = codes.shape[-1]
    empty = -(-numel // max(1, slots))
    slot = torch.arange(slots, device=codes.device)
    indices = index_of(slot, codes.clamp(0, max(0, empty - 1)), slots, numel, seed)
    indices = torch.where((codes >= 0) & (codes < empty) & (indices < numel), indices, -1)
    return torch.where(codes == empty, numel - 1, indices).to(torch.int32)


class Slotted(NamedTuple):
    """`length` elements of a vector from `offset` on, of which some lie in `slots` slots."""

    offset: int
    length: int
    slots: int

    @property
    def bits(self) -> int:
        """Bits of a code, of which the last is that of an empty slot: the one after all quotients."""
        return (-(-self.length // max(1, self.slots))).bit_length()

    @property
    def nbytes(self) -> int:
        """Bytes of all codes."""
        return -(-self.slots * self.bits // 8)


def slots_encode(indices: Tensor, parts: Sequence[Slotted], seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed `slot_codes` of each part, uint8, one part's after another's, and how many are in no slot.

    The latter is one number, or several to be added.

    `indices` (int32) are those of one part after another, counted from the vector's first element; `seeds` (int64) has
    one for each part. An index that is not in the slot to which its seed assigns it counts, and its code means nothing.
    """
    packed, misplaced = [indices.new_empty(0, dtype=torch.uint8)], []
    for part, index, seed in zip(parts, indices.split([part.slots for part in parts]), seeds.tolist(), strict=True):
        if part.slots:
            codes = slot_codes(index - part.offset, part.length, seed)
            misplaced.append(codes < 0)
            packed.append(pack_bits(codes, part.bits))
    return torch.cat(packed), torch.cat([indices.new_empty(0, dtype=torch.bool), *misplaced]).sum()


def slots_decode(rows: Tensor, parts: Sequence[Slotted], seeds: Tensor) -> Tensor:
    """Return the indices (int32) that `slots_encode` packed into each of the rows (n, bytes), or −1: (n, slots).

    `seeds` (int64): (n, parts), as each row has its own. Where a code stands for no index, −1 is returned.
    """
    found, start = [rows.new_empty(rows.shape[0], 0, dtype=torch.int32)], 0
    for at, part in enumerate(parts):
        if part.slots:
            packed = rows[:, start : start + part.nbytes]
            codes = torch.stack([unpack_bits(row, part.slots, part.bits, torch.int32) for row in packed])
            within = slot_indices(codes, part.length, seeds[:, at, None])
            found.append(torch.where(within < 0, -1, within + part.offset))
            start += part.nbytes
    return torch.cat(found, dim=1)


def slots_read(rows: Tensor, fixed: Tensor, parts: Sequence[Slotted]) -> tuple[Tensor, Tensor]:
    """Return the indices of whole sections, with 0 in place of −1, and bools of which any is set if a row is malformed.

    Before the codes, a row has eight bytes and the parts' seeds. What `fixed` says of it is compared as `differ` does.
    """
    start = 8 + 8 * len(parts)
    found = slots_decode(rows[:, start:], parts, rows[:, 8:start].contiguous().view(torch.int64))
    return found.clamp(min=0), differ(rows, fixed) | (found < 0).any()


def sketch_insert(x: Tensor, rows: int, buckets: int, seed: int) -> Tensor:
    """Return the count sketch S[j, h_j(i)] = Σ s_j(i) · x[i] as a (rows, buckets) table of x's dtype."""
    table = x.new_zeros(rows, buckets)
    for j in range(rows):
        bucket, sign = _sketch_hash(x, buckets, seed, j)
        table[j].index_add_(0, bucket, sign * x)
    return table


def sketch_query(table: Tensor, numel: int, seed: int) -> Tensor:
    """Return the median over j of s_j(i) · S[j, h_j(i)], of two middle ones the mean, for each of `numel` elements."""
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
