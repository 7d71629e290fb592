"""What each kernel is tried on: its arguments at a size, and how close it must come to the reference."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import Chunking, Draw, Numbering, OffsetGrid, Slotted
from thinwire.tools.check.material import CONTENTS, Kit, Near, Trial, framed

Trials = Iterator[Trial]
_SCALE, _DECAY = 0.25, 0.5  # powers of two: a fused multiply-add then rounds like two operations
_SEED, _BITS, _GROUP, _WIDTH = 2**40 + 7, 10, 512, 32
_FLOATS = (torch.float32, torch.float64)
_ALL_FLOATS = (*_FLOATS, torch.bfloat16, torch.float16)
_LIBRARY = Near(relative=1e-4, absolute=1e-5)  # a GPU's own libraries choose their order of additions


@dataclass(frozen=True, kw_only=True)
class Case:
    """How one kernel is tried.

    near, near_on_gpu: how far floats may be from the reference's; by default no bit may differ. alike: compares
    instead, and returns what is wrong. nbytes: memory that the reference takes per element, roughly.
    """

    make: Callable[[Kit, int], Trials]
    dtypes: tuple[torch.dtype, ...] = _FLOATS
    contents: tuple[str, ...] = CONTENTS
    near: Near = Near()  # noqa: RUF009 - frozen
    near_on_gpu: Near | None = None
    alike: Callable[[Trial, list[Any], list[Any]], str] | None = None
    nbytes: int = 64

    def bound(self, device: torch.device) -> Near:
        """Return how far floats may be from the reference's on this device."""
        return self.near_on_gpu if self.near_on_gpu and device.type != "cpu" else self.near


def _accumulate(kit: Kit, n: int) -> Trials:
    yield Trial((kit.room(n), kit.vector(n, 1), kit.vector(n), _SCALE), (0,))


def _accumulate_each(kit: Kit, n: int) -> Trials:
    rooms, *inputs = (_pieces(x) for x in (kit.room(n), kit.vector(n, 1), kit.vector(n)))
    yield Trial((rooms, *inputs, [_SCALE] * len(rooms)), (0,))


def _fading(kit: Kit, n: int) -> Trials:
    yield Trial((kit.room(n), kit.vector(n, 1), kit.vector(n), _SCALE, _DECAY), (0,))


def _momentum(kit: Kit, n: int) -> Trials:
    for nesterov in (False, True):
        inputs = (kit.vector(n, 1), kit.vector(n, 2), kit.vector(n))
        yield Trial((kit.room(n), kit.room(n), *inputs, _SCALE, _DECAY, nesterov), (0, 1))


def _rounded(kit: Kit, n: int) -> Trials:
    room = kit.room(n, dtype=torch.bfloat16)
    yield Trial((room, framed(kit.vector(n, 1).bfloat16()), kit.vector(n), _SCALE, _SEED), (0,))


def _selecting(make: Callable[[Kit, int], Trials], last: tuple[Any, ...] = ()) -> Callable[[Kit, int], Trials]:
    """Return the trials of a kernel that also selects: with enough capacity, and with too little."""

    def trials(kit: Kit, n: int) -> Trials:
        for trial in make(kit, n):
            yield Trial((*trial.args, kit.number(2.5), n // 16 + 8, *last), trial.writes)
            yield Trial((*trial.args, kit.number(0.5), n // 50, *last), trial.writes)

    return trials


def _select(kit: Kit, n: int) -> Trials:
    yield Trial((kit.vector(n),))


def _largest(kit: Kit, n: int) -> Trials:
    for k in {1, n // 100, n}:
        yield Trial((kit.vector(n), k))


def _pieces(x: Tensor) -> list[Tensor]:
    """Return a vector as several, of which some may be empty."""
    return list(x.tensor_split([x.numel() // 9, x.numel() // 2, x.numel() // 2]))


def _largest_of_each(kit: Kit, n: int) -> Trials:
    pieces = _pieces(kit.vector(n))
    for share in (100, 1):
        yield Trial((pieces, [-(-x.numel() // share) for x in pieces]))


def _draw(numel: int, capacity: int) -> Draw:
    if numel < 10:
        return Draw(offset=0, stride=1, rank=0, capacity=min(numel, capacity))
    return Draw(offset=2, stride=3, rank=numel // 60 + 1, capacity=min(numel, capacity))


def _sampled(kit: Kit, n: int, momentum: tuple[float | bool, ...] = ()) -> Trials:
    outs = 2 if momentum else 1
    for capacity in (n // 16 + 8, n // 50):
        rooms = [_pieces(kit.room(n)) for _ in range(outs)]
        inputs = [_pieces(kit.vector(n, seed)) for seed in range(outs + 1)]
        scales, draws = [_SCALE] * len(rooms[0]), [_draw(x.numel(), capacity) for x in rooms[0]]
        yield Trial((*rooms, *inputs, scales, *momentum, draws), tuple(range(outs)))


def _momentum_sampled(kit: Kit, n: int) -> Trials:
    for nesterov in (False, True):
        yield from _sampled(kit, n, (_DECAY, nesterov))


def _largest_in_rows(kit: Kit, n: int) -> Trials:
    width = min(n, 500)
    for k in {1, -(-width // 100), width}:
        yield Trial((framed(kit.vector(n)[: n // width * width]), width, k))


def _block_energies(kit: Kit, n: int) -> Trials:
    for width in (_WIDTH, 3000):
        yield Trial((kit.vector(n), width))


def _largest_blocks(kit: Kit, n: int) -> Trials:
    yield Trial((kit.vector(n), _WIDTH, -(-n // _WIDTH) // 3))


def _group_norms(kit: Kit, n: int) -> Trials:
    for order in (1.0, 2.0, torch.inf):
        yield Trial((kit.vector(n), _GROUP, order))


def _pack_bits(kit: Kit, n: int) -> Trials:
    for bits, dtype in ((1, torch.uint8), (_BITS, torch.int16), (19, torch.int32)):
        yield Trial((kit.whole(n, 0, torch.iinfo(dtype).max, dtype), bits))


def _unpack_bits(kit: Kit, n: int) -> Trials:
    for bits, dtype in ((1, torch.uint8), (_BITS, torch.int16), (19, torch.int32)):
        yield Trial((kit.whole(-(-n * bits // 8), 0, 256, torch.uint8), n, bits, dtype))


def _ones(kit: Kit, n: int) -> Trials:
    for count in (0, n // 3, n):
        yield Trial((kit.whole(n, 0, 2, torch.uint8), count))


def _elias_fano(encode: bool, rows: bool = False) -> Callable[[Kit, int], Trials]:
    def trials(kit: Kit, n: int) -> Trials:
        indices = kit.picks(n)
        buffer = kernels.elias_fano_encode.reference(indices, n)
        if encode:
            yield Trial((indices, n))
        else:
            yield Trial((torch.stack([buffer] * 3) if rows else buffer, indices.numel(), n))

    return trials


def _runs(kit: Kit, n: int, ranks: int = 3) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Return indices and values that some ranks sent, rank after rank, and how many each did."""
    parts = [kit.picks(n, rank) for rank in range(ranks)]
    indices = torch.cat(parts)
    return framed(indices), kit.vector(indices.numel()), tuple(part.numel() for part in parts)


def _scatter(kit: Kit, n: int) -> Trials:
    indices, values, runs = _runs(kit, n)
    yield Trial((kit.vector(n, 1), ((0, n),), indices, values, runs), (0,))


def _scatter_add(kit: Kit, n: int) -> Trials:
    indices, values, runs = _runs(kit, n)
    yield Trial((kit.vector(n, 1), indices, values, runs, -1.0), (0,))


def _in_pieces(kit: Kit, n: int) -> tuple[list[Tensor], list[int], Tensor, Tensor, list[int]]:
    """Return vectors, offsets, and a run of indices and values for each."""
    pieces, offsets = _pieces(kit.vector(n, 1)), [7, 0, 0, 1 << 20]
    picks = [kit.picks(x.numel()) if x.numel() else kit.whole(0, 0, 1) for x in pieces]
    indices = framed(torch.cat([found + offset for found, offset in zip(picks, offsets, strict=True)]))
    return pieces, offsets, indices, kit.vector(indices.numel()), [each.numel() for each in picks]


def _scatter_add_each(kit: Kit, n: int) -> Trials:
    yield Trial((*_in_pieces(kit, n), -1.0), (0,))


def _mask_each(kit: Kit, n: int) -> Trials:
    yield Trial(_in_pieces(kit, n), (0,))


def _mask(kit: Kit, n: int) -> Trials:
    indices = kit.picks(n)
    yield Trial((kit.vector(n, 1), indices, kit.vector(indices.numel())), (0,))


def _merge(kit: Kit, n: int) -> Trials:
    indices, values, runs = _runs(kit, n)
    yield Trial((list(indices.split(runs)), [part[:, None] for part in values.split(runs)]))


def _slots(n: int) -> int:
    return n // 7 + 1


def _slot_of(kit: Kit, n: int) -> Trials:
    yield Trial((kit.whole(n, 0, n), _slots(n), n, _SEED))


def _index_of(kit: Kit, n: int) -> Trials:
    yield Trial((*kernels.slot_of.reference(kit.whole(n, 0, n), _slots(n), n, _SEED), _slots(n), n, _SEED))


def _hashed_slots(kit: Kit, n: int) -> Trials:
    for most in (3, 2**31 - 1):
        yield Trial((kit.picks(n), kit.whole(kit.picks(n).numel(), 0, most), n // 40 + 1, n, _SEED))


def _hashed_slots_of_each(kit: Kit, n: int) -> Trials:
    pieces = _pieces(kit.vector(n))
    picks = [kit.picks(x.numel()) if x.numel() else kit.whole(0, 0, 1) for x in pieces]
    runs, slots = [each.numel() for each in picks], [-(-x.numel() // 40) for x in pieces]
    priorities = kit.whole(sum(runs), 0, 2**31 - 1)
    yield Trial((pieces, framed(torch.cat(picks)), priorities, runs, slots, [_SEED, 1, 2, 3]))


def _slot_codes(kit: Kit, n: int) -> Trials:
    yield Trial((_in_slots(kit, n), n, _SEED))


def _slot_indices(kit: Kit, n: int) -> Trials:
    yield Trial((kernels.slot_codes.reference(_in_slots(kit, n), n, _SEED), n, _SEED))


def _slotted(kit: Kit, n: int) -> tuple[Tensor, list[Slotted], Tensor]:
    """Return indices in the slots of several regions, of which some have none, the regions and their seeds."""
    slots, within = _in_slots(kit, n).numel(), _in_slots(kit, n)
    parts = [Slotted(3, n, slots), Slotted(n + 3, 5, 0), Slotted(n + 8, n, slots)]
    return framed(torch.cat([within + 3, within + n + 8])), parts, kit.seeds([_SEED, 9, _SEED])


def _slots_encode(kit: Kit, n: int) -> Trials:
    indices, parts, seeds = _slotted(kit, n)
    yield Trial((indices, parts, seeds))


def _slots_decode(kit: Kit, n: int) -> Trials:
    indices, parts, seeds = _slotted(kit, n)
    packed, _ = kernels.slots_encode.reference(indices, parts, seeds)
    rows = torch.stack([packed, kit.whole(packed.numel(), 0, 256, torch.uint8)])
    yield Trial((rows, parts, seeds.expand(2, -1)))


def _in_slots(kit: Kit, n: int) -> Tensor:
    (trial,) = list(_hashed_slots(kit, n))[:1]
    table = kernels.hashed_slots.reference(*trial.args)
    return framed(table.masked_fill(table < 0, n - 1))


def _sketch_insert(kit: Kit, n: int) -> Trials:
    yield Trial((framed(kit.vector(n).round()), 3, n // 30 + 1, _SEED))  # sums of whole numbers have no rounding


def _sketch_query(kit: Kit, n: int) -> Trials:
    yield Trial((framed(kit.vector(3 * (n // 30 + 1)).view(3, -1)), n, _SEED))


def _row_sums(kit: Kit, n: int) -> Trials:
    yield Trial((framed(torch.stack([kit.vector(n, rank) for rank in range(3)])),))


def _factors(kit: Kit, n: int) -> tuple[Tensor, Tensor]:
    """Return factors of rank 4 of a matrix of about n elements."""
    rows = max(4, int(n**0.5))
    columns = max(4, n // rows)
    return framed(kit.vector(4 * rows).view(-1, 4)), framed(kit.vector(4 * columns, 1).view(-1, 4))


def _outer_sums(kit: Kit, n: int) -> Trials:
    a, b = _factors(kit, n)
    yield Trial((kit.room(len(a), len(b)), a, b), (0,))


def _orthonormal(kit: Kit, n: int) -> Trials:
    rows = max(5, n // 4)  # of a square matrix, a GPU's library gives the last column the other sign
    yield Trial((framed(kit.vector(4 * rows).view(-1, 4)),))


def _inverse_fourier(kit: Kit, n: int) -> Trials:
    width = min(4096, n)
    pairs = -(-n // width) * (width // 2 + 1)
    yield Trial((framed(kit.vector(2 * pairs).view(-1, 2)), n, width))


def _scales(kit: Kit, n: int, *, powers: bool = False) -> Tensor:
    """Return a scale for each group, if asked a power of two; NaN for a group with anything but finite numbers."""
    lots = kit.whole(-(-n // _GROUP), 1, 5).float()
    scales = torch.exp2(lots) / 4 if powers else lots * 0.7
    groups = torch.arange(n, device=kit.device) // _GROUP
    scales[groups[~kit.vector(n).isfinite()]] = torch.nan
    return framed(scales)


def _encoding(*rest: Any, scaled: bool = True, powers: bool = False) -> Callable[[Kit, int], Trials]:
    """Return the trials of a kernel that writes codes; what it takes after the group is `rest`."""

    def trials(kit: Kit, n: int) -> Trials:
        for code in (torch.uint8, torch.int16):
            more = (_scales(kit, n, powers=powers), _GROUP, *rest) if scaled else ()
            yield Trial((kit.room(n, dtype=code), kit.vector(n), *more), (0,))

    return trials


def _offset_encode(kit: Kit, n: int) -> Trials:
    for grid in (OffsetGrid(20, 0x3E0, 33, 33), OffsetGrid(23, 0x78, 10, 5)):
        for rounding in ("truncate", "nearest", "stochastic"):
            yield from _encoding(grid, rounding, _SEED, powers=True)(kit, n)


def _table_decode(kit: Kit, n: int) -> Trials:
    table = framed(Kit(kit.device).vector(64))
    for code in (torch.uint8, torch.int16):
        yield Trial((kit.room(n), kit.whole(n, 0, 128, code), table, _scales(kit, n), _GROUP), (0,))


def _cut(n: int) -> Chunking:
    shape = (n // 256, 256) if n >= 512 else (n,)
    return Chunking.of(shape, 16, "dct", lambda size: max(1, size // 40))


def _chunk_topk(kit: Kit, n: int) -> Trials:
    cut = _cut(n)
    yield Trial((framed(kit.vector(n)[: cut.numel]), cut))


def _fading_chunk_topk(kit: Kit, n: int) -> Trials:
    cut = _cut(n)
    before, new = (framed(kit.vector(n, seed)[: cut.numel]) for seed in (1, 2))
    yield Trial((kit.room(cut.numel), before, new, _SCALE, _DECAY, cut), (0,))


def _same_coefficients(trial: Trial, found: list[Any], expected: list[Any]) -> str:
    """Compare magnitudes, because sums in another order may swap the last of a chunk."""
    cut: Chunking = trial.args[-1]
    places = found[-2].view(-1, cut.kept)
    if not bool((places.diff(dim=1) > 0).all()) or not bool(((places >= 0) & (places < cut.size)).all()):
        return "positions do not ascend within a chunk"
    mine, others = (each[-1].abs().to(found[-1].device).view(-1, cut.kept).sort().values for each in (found, expected))
    off = int((~torch.isclose(mine, others, rtol=1e-4, atol=1e-5, equal_nan=True)).sum())
    return f"{off} of {mine.numel()} coefficients differ" if off else ""


def _decoding_chunks(kit: Kit, n: int) -> Trials:
    cut = _cut(n)
    positions = torch.arange(cut.kept, dtype=torch.int16, device=kit.device).repeat(2 * cut.chunks)
    yield Trial((kit.vector(cut.numel, 1), framed(positions), kit.vector(2 * cut.count), cut), (0,))


def _numbering() -> Numbering:
    found = Numbering.of(256, 6)
    assert found, "six of 256 can be numbered"
    return found


def _subsets(decode: bool) -> Callable[[Kit, int], Trials]:
    def trials(kit: Kit, n: int) -> Trials:
        numbers = -(-n // 256)
        steps = kit.whole(6 * numbers, 1, 256 // 6).view(-1, 6)
        positions = framed((steps.cumsum(1) - 1).to(torch.int16).view(-1))
        buffer = kernels.subsets_encode.reference(positions, _numbering())
        yield Trial((buffer[None], numbers, _numbering()) if decode else (positions, _numbering()))

    return trials


_ADDING = Near(relative=1e-5, absolute=1e-6)
_ONLY_32 = (torch.float32,)
_FINITE = ("normal", "whole", "zeros")

CASES: Mapping[str, Case] = MappingProxyType(
    {
        "accumulate": Case(make=_accumulate),
        "accumulate_each": Case(make=_accumulate_each),
        "accumulate_fading": Case(make=_fading),
        "accumulate_fading_chunk_topk": Case(
            make=_fading_chunk_topk, contents=("normal",), alike=_same_coefficients, nbytes=100
        ),
        "accumulate_fading_select": Case(make=_selecting(_fading)),
        "accumulate_momentum": Case(make=_momentum),
        "accumulate_momentum_select": Case(make=_selecting(_momentum)),
        "accumulate_momentum_sampled_select": Case(make=_momentum_sampled),
        "accumulate_rounded": Case(make=_rounded),
        "accumulate_rounded_select": Case(make=_selecting(_rounded)),
        "accumulate_sampled_select": Case(make=_sampled),
        "accumulate_select": Case(make=_selecting(_accumulate)),
        "block_energies": Case(make=_block_energies, near=_ADDING),
        "chunk_subtract": Case(make=_decoding_chunks, contents=_FINITE, near_on_gpu=_LIBRARY, nbytes=100),
        "chunk_topk": Case(make=_chunk_topk, contents=("normal",), alike=_same_coefficients, nbytes=100),
        "chunk_write": Case(make=_decoding_chunks, contents=_FINITE, near_on_gpu=_LIBRARY, nbytes=100),
        "elias_fano_decode": Case(make=_elias_fano(encode=False), dtypes=_ONLY_32, contents=("normal",)),
        "elias_fano_decode_rows": Case(
            make=_elias_fano(encode=False, rows=True), dtypes=_ONLY_32, contents=("normal",)
        ),
        "elias_fano_encode": Case(make=_elias_fano(encode=True), dtypes=_ONLY_32, contents=("normal",)),
        "group_norms": Case(make=_group_norms, dtypes=_ONLY_32, near=Near(relative=1e-12)),
        "hashed_slots": Case(make=_hashed_slots, dtypes=_ONLY_32, contents=("normal",)),
        "hashed_slots_of_each": Case(make=_hashed_slots_of_each),
        "index_of": Case(make=_index_of, dtypes=_ONLY_32, contents=("normal",), nbytes=100),
        "inverse_fourier": Case(make=_inverse_fourier, contents=_FINITE, near_on_gpu=_LIBRARY, nbytes=100),
        "largest": Case(make=_largest, dtypes=_ALL_FLOATS),
        "largest_blocks": Case(make=_largest_blocks, contents=("whole", "zeros")),  # sums without rounding
        "largest_in_rows": Case(make=_largest_in_rows, dtypes=_ALL_FLOATS),
        "largest_of_each": Case(make=_largest_of_each, dtypes=_ALL_FLOATS),
        "levels_encode": Case(make=_encoding(7, _SEED), dtypes=_ONLY_32),
        "mask": Case(make=_mask),
        "mask_each": Case(make=_mask_each),
        "merge": Case(make=_merge),
        "offset_encode": Case(make=_offset_encode, dtypes=_ONLY_32),
        "ones": Case(make=_ones, dtypes=_ONLY_32, contents=("normal",)),
        "orthonormal": Case(make=_orthonormal, contents=("normal",), near_on_gpu=_LIBRARY, nbytes=150),
        "outer_sums": Case(make=_outer_sums, contents=_FINITE, near_on_gpu=_LIBRARY),
        "pack_bits": Case(make=_pack_bits, dtypes=_ONLY_32, contents=("normal",), nbytes=300),
        "row_sums": Case(make=_row_sums),
        "scatter": Case(make=_scatter),
        "scatter_add": Case(make=_scatter_add),
        "scatter_add_each": Case(make=_scatter_add_each),
        "select": Case(make=_selecting(_select), dtypes=_ALL_FLOATS),
        "sign_encode": Case(make=_encoding(scaled=False), dtypes=_ONLY_32),
        "sketch_insert": Case(make=_sketch_insert, contents=_FINITE, nbytes=150),
        "sketch_query": Case(make=_sketch_query, contents=_FINITE, nbytes=150),
        "slot_codes": Case(make=_slot_codes, dtypes=_ONLY_32, contents=("normal",)),
        "slot_indices": Case(make=_slot_indices, dtypes=_ONLY_32, contents=("normal",)),
        "slot_of": Case(make=_slot_of, dtypes=_ONLY_32, contents=("normal",), nbytes=100),
        "slots_decode": Case(make=_slots_decode, dtypes=_ONLY_32, contents=("normal",)),
        "slots_encode": Case(make=_slots_encode, dtypes=_ONLY_32, contents=("normal",)),
        "subsets_decode": Case(make=_subsets(decode=True), dtypes=_ONLY_32, contents=("normal",)),
        "subsets_encode": Case(make=_subsets(decode=False), dtypes=_ONLY_32, contents=("normal",)),
        "table_decode": Case(make=_table_decode, dtypes=(torch.float32, torch.float16)),
        "ternary_encode": Case(make=_encoding(_SEED), dtypes=_ONLY_32),
        "unpack_bits": Case(make=_unpack_bits, dtypes=_ONLY_32, contents=("normal",), nbytes=300),
    }
)
"""How each kernel is tried, by its name in `thinwire.kernels`."""
