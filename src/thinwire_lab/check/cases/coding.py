"""Kernels that write numbers in few bits, and read them: what they are tried on."""

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, product
from typing import get_args

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.formats import base
from thinwire.kernels import Groups, Norm, Numbered, Numbering, OffsetGrid, Packed, Rounding, Section, UniformGrid
from thinwire.kernels.bits.reference import CODED
from thinwire.kernels.parts import Parts, cut_of_runs
from thinwire.payloads import exponents
from thinwire_lab.check.material import ONLY_32, SEED, WHOLE, Case, Kit, Near, Trial, Trials, as_read, framed

BITS, GROUP = 10, 512


def _group_norms(kit: Kit, n: int) -> Trials:
    for order in (1.0, 2.0, torch.inf):
        for groups in _groups(n):
            yield Trial((kit.vector(n), groups, order))


def _group_scales(kit: Kit, n: int) -> Trials:
    """Yield means, norms and clipped magnitudes; some numbers are beyond float32."""
    for groups, factor in product(_groups(n), (1.0, 1e38)):
        x, widths = framed(kit.vector(n) * factor), base.widths(groups, kit.device)
        for order, many, zero, clip in (
            (1.0, widths, 0.0, None), (2.0, None, 1.0, None), (torch.inf, None, 0.0, None),
            (torch.inf, widths, 0.0, 1.5),
        ):  # fmt: skip
            yield Trial((x, groups, order, many, zero, clip))


def _groups(n: int) -> Iterator[Groups]:
    """Yield one vector in groups, three of which two may be empty, and these as a group each."""
    runs = (n - n // 3 - n // 7, n // 7, n // 3)
    yield from (Groups((n,), GROUP), Groups(runs, GROUP), Groups(runs))


def _numbers_read(kit: Kit, n: int) -> Trials:
    """Three ranks' bytes, in rows with a gap between them: sound ones, and ones of which a check found fault."""
    none = kit.whole(0, 0, 1).view(3, 0)
    table, fault = kit.vector(1 << BITS).float(), kit.whole(2000, 0, 1).bool()
    for groups, summed, wrong in product(_groups(n), (False, True), ([], [fault[:5], fault], [fault] * 3 + [~fault])):
        scales = torch.stack([_scales(kit, groups).view(torch.uint8)] * 3)
        codes = kit.whole(3 * -(-n * BITS // 8), 0, 256, torch.uint8).view(3, -1)
        at = Packed(8, 8 + -(-scales.shape[1] // 8) * 8, BITS)
        rows = scales.new_zeros(3, -(-(at.codes + codes.shape[1]) // 8) * 8 + 8)
        rows[:, 8 : 8 + scales.shape[1]], rows[:, at.codes : at.codes + codes.shape[1]] = scales, codes
        yield Trial((rows, at, table, groups, torch.float32, wrong, none, summed))
        if summed:
            room = kit.room(n, dtype=torch.bfloat16)
            yield Trial((rows, at, table, groups, torch.float32, wrong, none, summed, room), (8,))
    plain = torch.stack([kit.vector(n, seed) for seed in range(3)])
    rows = torch.nn.functional.pad(plain.view(torch.uint8), (16, 16 - n * plain.element_size() % 8))
    other = kit.seeds([0, 1, 255]).int().view(3, 1)  # bytes that are not there
    for summed, wrong, fixed in ((False, [], none), (True, [fault], none), (False, [~fault], none), (True, [], other)):
        yield Trial((rows, Packed(0, 16, 0), kit.vector(0), Groups((n,)), plain.dtype, wrong, fixed, summed))
    yield Trial(
        (rows, Packed(0, 16, 0), kit.vector(0), Groups((n,)), plain.dtype, [], other, True, kit.vector(n)), (8,)
    )


def _pack_bits(kit: Kit, n: int) -> Trials:
    for bits, dtype in ((1, torch.uint8), (BITS, torch.int16), (19, torch.int32)):
        yield Trial((kit.whole(n, 0, torch.iinfo(dtype).max, dtype), bits))


def _unpack_bits(kit: Kit, n: int) -> Trials:
    for bits, dtype in ((1, torch.uint8), (BITS, torch.int16), (19, torch.int32)):
        yield Trial((kit.whole(-(-n * bits // 8), 0, 256, torch.uint8), n, bits, dtype))


def _elias_fano_decode(kit: Kit, n: int) -> Trials:
    indices = kit.picks(n)
    buffer = kernels.elias_fano_encode.reference(indices, n)
    yield Trial((torch.stack([buffer] * 3), indices.numel(), n))


def _sections_write(kit: Kit, n: int) -> Trials:
    """Yield numbers of each kind, and more of them than one launch takes."""
    codes, indices = kit.whole(n, 0, 1 << 10, torch.int16), kit.picks(n)
    given = [Section(x) for x in (kit.whole(16, 0, 256, torch.uint8), kit.vector(n), kit.vector(0), indices)]
    given += [Section(codes, BITS), Section(codes.to(torch.uint8), 1), Section(indices, space=n)]
    for some in (given, given[:4] + given[-1:], given[-1:], given[4:6], [Section(indices, space=40 * n), *given[:1]]):
        *starts, end = accumulate((-(-section.nbytes // 8) * 8 for section in some), initial=0)
        yield Trial((kit.room(end, dtype=torch.uint8), some, starts), (0,))


def _elias_fano_read(kit: Kit, n: int) -> Trials:
    """Yield indices that lie within the edges, or not; and the bytes of one row damaged."""
    indices = kit.picks(n)
    rows = torch.stack([kernels.elias_fano_encode.reference(indices, n)] * 3)
    most = int(indices[-1])
    for edges in ([0, n], [0, most, most, n], [0, most], [0, most, n + 1, n + 2]):
        yield Trial((rows, indices.numel(), n, kit.seeds(edges).int()))
    for place in (0, -1):
        damaged = rows.clone()
        damaged[1, place] ^= 128
        yield Trial((damaged, indices.numel(), n, kit.seeds([0, n]).int()))


def _scales(kit: Kit, groups: Groups, *, powers: bool = False) -> Tensor:
    """Return a scale for each group, if asked a power of two; NaN for a group with anything but finite numbers."""
    lots = kit.whole(sum(groups.counts), 1, 5).float()
    scales = torch.exp2(lots) / 4 if powers else lots * 0.7
    norms = kernels.group_norms.reference(kit.vector(sum(groups.runs)).float(), groups, torch.inf)
    return framed(torch.where(norms.isfinite(), scales, torch.nan))


def _codes_encode(kit: Kit, n: int) -> Trials:
    grids = (OffsetGrid(20, 0x3E0, 33, 33), OffsetGrid(23, 0x78, 10, 5))
    offsets = [grid._replace(rounding=rounding) for grid in grids for rounding in get_args(Rounding)]
    table = framed(Kit(kit.device).vector(64))
    for how in (*offsets, UniformGrid(7), "ternary", "sign"):
        for code, groups in product((torch.uint8, torch.int16), _groups(n)):
            seeds, scales = [SEED + run for run in range(len(groups.runs))], _scales(kit, groups, powers=how in offsets)
            args = (kit.room(n, dtype=code), kit.vector(n), scales, groups, how, seeds)
            yield Trial(args, (0,))
            yield Trial((*args, table, kit.room(n)), (0, 7))


def _scaled_encode(kit: Kit, n: int) -> Trials:
    """Yield each norm with a code; and numbers that are to be multiplied, or are of 16 bits."""
    table = framed(Kit(kit.device).vector(64))
    for groups, factor, dtype in zip(
        _groups(n), (1.0, 1 / 3, 0.25), (kit.dtype, kit.dtype, torch.bfloat16), strict=True
    ):
        widths, seeds = base.widths(groups, kit.device), [SEED + run for run in range(len(groups.runs))]
        for how, norm in (
            (UniformGrid(7), Norm(2.0, None, 1.0)), ("sign", Norm(1.0, widths, 0.0)),
            ("ternary", Norm(torch.inf, None, 0.0)), ("ternary", Norm(torch.inf, widths, 0.0, 1.5)),
        ):  # fmt: skip
            xs = Parts(kit.vector(n).to(dtype), cut_of_runs(groups.runs))
            args = (kit.room(n, dtype=torch.uint8), xs, groups, norm, how, seeds, factor)
            yield Trial(args, (0,))
            yield Trial((*args, table, kit.room(n)), (0, 8))


def _table_decode(kit: Kit, n: int) -> Trials:
    table = framed(Kit(kit.device).vector(64))
    for code, groups in product((torch.uint8, torch.int16), _groups(n)):
        yield Trial((kit.room(n), kit.whole(n, 0, 128, code), table, _scales(kit, groups), groups), (0,))


def _subsets(decode: bool) -> Callable[[Kit, int], Trials]:
    """Return the trials of numbers of one digit, and of two."""

    def trials(kit: Kit, n: int) -> Trials:
        for kept in (6, 26):
            numbers, numbering = -(-n // 256), Numbering.of(256, kept)
            assert numbering, f"{kept} of 256 can be numbered"
            steps = kit.whole(2 * kept * numbers, 1, numbering.space // kept).view(-1, kept)
            positions = framed((steps.cumsum(1) - 1).to(torch.int16).view(-1)).view(2, kept * numbers)
            runs = (Numbered(numbering, 2, numbers),)
            rows = kernels.subsets_encode.reference(positions.view(-1), runs).view(2, -1)
            yield Trial((rows, numbers, numbering) if decode else (positions.view(-1), runs))

    return trials


def _subsets_read(kit: Kit, n: int) -> Trials:
    """Yield two ranks' rows, with a gap behind, of three regions of one digit and one of two; and damaged ones."""
    (rows, numbers, short), (others, _, long) = (trial.args for trial in _subsets(decode=True)(kit, n))
    some = torch.cat([rows, rows.flip(0), rows, others], dim=1)
    runs, whole, each = (Numbered(short, 3, numbers), Numbered(long, 1, numbers)), some.shape[1], rows.shape[1]
    for damaged in (0, 2 * each, whole) if numbers else ():
        other = torch.nn.functional.pad(some, (0, 5))
        other[1, max(0, damaged - 1)] |= 255 if damaged else 0
        yield Trial((other[:, :whole], runs))


def _exponents(decode: bool) -> Callable[[Kit, int], Trials]:
    """Return a trial of numbers with any bits."""

    def trials(kit: Kit, n: int) -> Trials:
        n = min(n, 1000) if decode and kit.device.type != "cuda" else n  # Triton's interpreter takes seconds
        x = kit.whole(n, -(1 << 15), 1 << 15, torch.int16)
        counts = kernels.exponents_count.reference(x).tolist()
        lengths = exponents.code_lengths(counts)
        pairs = zip(exponents.prefix_codes(lengths), lengths, strict=True)
        codes = torch.tensor([code | length << 16 for code, length in pairs], dtype=torch.int32, device=x.device)
        room = sum(a * b for a, b in zip(counts, lengths, strict=True)) // 8 + -(-n // CODED)
        if not decode:
            yield Trial((x, codes, room))
        elif n:
            parts = kernels.exponents_encode.reference(x, codes, room)
            yield Trial((kit.room(n, dtype=torch.int16), *parts, exponents.table_of(lengths).to(x.device)), (0,))

    return trials


CASES: Mapping[str, Case] = {
    "codes_encode": Case(make=_codes_encode, dtypes=ONLY_32),
    "scaled_encode": Case(make=_scaled_encode, dtypes=ONLY_32, near=Near(relative=2.0**-23)),
    "elias_fano_decode": Case(make=_elias_fano_decode, **WHOLE),
    "elias_fano_encode": Case(make=lambda kit, n: [Trial((kit.picks(n), n))], **WHOLE),
    "elias_fano_read": Case(make=_elias_fano_read, **WHOLE, alike=as_read),
    "exponents_count": Case(make=lambda kit, n: [Trial((kit.whole(n, -(1 << 15), 1 << 15, torch.int16),))], **WHOLE),
    "exponents_decode": Case(make=_exponents(decode=True), **WHOLE),
    "exponents_encode": Case(make=_exponents(decode=False), **WHOLE),
    "group_norms": Case(make=_group_norms, dtypes=ONLY_32, near=Near(relative=1e-12)),
    "group_scales": Case(make=_group_scales, dtypes=ONLY_32, near=Near(relative=2.0**-23)),
    "numbers_read": Case(make=_numbers_read),
    "ones": Case(
        make=lambda kit, n: [Trial((kit.whole(n, 0, 2, torch.uint8), count)) for count in (0, n // 3, n)], **WHOLE
    ),
    "pack_bits": Case(make=_pack_bits, **WHOLE, nbytes=300),
    "sections_write": Case(make=_sections_write, **WHOLE),
    "subsets_decode": Case(make=_subsets(decode=True), **WHOLE),
    "subsets_encode": Case(make=_subsets(decode=False), **WHOLE),
    "subsets_read": Case(make=_subsets_read, **WHOLE, alike=as_read),
    "table_decode": Case(make=_table_decode, dtypes=(torch.float32, torch.float16)),
    "unpack_bits": Case(make=_unpack_bits, **WHOLE, nbytes=300),
}
