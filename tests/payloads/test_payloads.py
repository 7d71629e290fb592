"""Payload laws: round trip, golden bytes, sums, and what happens to malformed buffers."""

import struct
from dataclasses import replace

import pytest
import torch
from cases import CODECS, CodecCase, vector
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._jit_internal import _extract_tensors  # what torch's own futures record

from thinwire.codecs import FFT, BlockTopK, Cast, ChunkTopK, TopK
from thinwire.errors import PayloadError
from thinwire.formats import Levels, OffsetFloat, Ternary
from thinwire.kernels import Chunking, Numbering
from thinwire.kernels.parts import Cut
from thinwire.payloads import Blocks, Chunks, Dense, Keyed, Payload, Sparse, Spectral
from thinwire.payloads.wire import DTYPE_CODES, HEADER_BYTES
from thinwire.signals import Plains

codec_cases = pytest.mark.parametrize("case", CODECS.values(), ids=CODECS)
DTYPES = sorted(DTYPE_CODES, key=str)


def _encode(case: CodecCase, numel: int = 1000, seed: int = 0) -> Payload:
    return case.codec.encode(vector(numel, seed), seed=3)


def test_vectors_without_elements() -> None:
    none, nothing = torch.empty(0), torch.empty(0, dtype=torch.int32)
    blocks = Blocks(keys=nothing, values=none, numel=0, width=2)
    payloads: list[Payload] = [
        Dense(values=none),
        Sparse(indices=nothing, values=none, numel=0),
        Sparse(indices=nothing, values=none, numel=0, seeds=(3,)),
        blocks,
        Spectral(coefficients=blocks, block=8, numel=0),
    ]
    for payload in payloads:
        buffer = payload.to_buffer()
        assert buffer.numel() == payload.nbytes
        assert payload.from_buffers(buffer[None]).dense().numel() == 0
        assert type(payload).from_buffer(buffer).dense().numel() == 0  # type: ignore[attr-defined]


@given(st.lists(st.floats(-100, 100, width=16), max_size=40), st.sampled_from(DTYPES))
def test_dense_round_trip(values: list[float], dtype: torch.dtype) -> None:
    payload = Dense(values=torch.tensor(values, dtype=dtype))
    buffer = payload.to_buffer()
    assert buffer.numel() == payload.nbytes
    assert torch.equal(Dense.from_buffer(buffer).values, payload.values)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(3, dtype=torch.uint8), "at least 16 bytes"),
        (torch.zeros(16), "flat uint8"),
        (torch.zeros(2, 16, dtype=torch.uint8), "flat uint8"),
        (torch.zeros(32, dtype=torch.uint8), "version 0"),
    ],
)
def test_what_is_no_payload_is_refused(buffer: Tensor, message: str) -> None:
    for kind in (Dense, Sparse):
        with pytest.raises(PayloadError, match=message):
            kind.from_buffer(buffer)


def test_wrong_kind_count_and_range_are_refused() -> None:
    good = Sparse(indices=torch.tensor([1, 2], dtype=torch.int32), values=torch.ones(2), numel=3).to_buffer()
    with pytest.raises(PayloadError, match="kind"):
        Dense.from_buffer(good)
    for place, value in ((4, 1), (4, 3), (8, 1), (2, 9), (3, 1), (15, 1), (15, 2), (15, 9)):
        # count, count, numel, dtype, bits, coding
        bad = good.clone()
        bad[place] = value
        with pytest.raises(PayloadError):
            Sparse.from_buffer(bad)
    for length in range(good.numel()):
        with pytest.raises(PayloadError):
            Sparse.from_buffer(good[:length])
    with pytest.raises(PayloadError):
        Sparse.from_buffer(torch.cat([good, torch.zeros(8, dtype=torch.uint8)]))
    negative = good.clone()
    negative[27] = 0x80
    with pytest.raises(PayloadError, match="indices reach"):
        Sparse.from_buffer(negative)


@pytest.mark.parametrize("kind", [Dense, Sparse, Blocks, Spectral])
def test_a_header_that_asks_for_gigabytes_is_refused_by_its_length(kind: type[Dense]) -> None:
    """Nothing is set aside for what a header promises; that the machine has the memory is not the point."""
    number = {Dense: 1, Sparse: 2, Blocks: 3, Spectral: 4}[kind]
    for coding in range(5):
        for count, numel in ((2**32 - 1, 2**56 - 1), (2**31 - 1, 2**31 - 1), (1, 2**56 - 1)):
            head = struct.pack("<BBBBIQ", 2, number, 0, 0, count, numel | coding << 56)
            for body in (b"", b"\xff" * 64, struct.pack("<BBBBIQII", 2, 3, 0, 0, count, numel, 2**32 - 1, 2**32 - 1)):
                with pytest.raises(PayloadError):
                    kind.from_buffer(torch.frombuffer(bytearray(head + body), dtype=torch.uint8))


def test_rows_of_another_layout_are_refused_and_nothing_is_written() -> None:
    mine = Sparse(indices=torch.tensor([0, 1], dtype=torch.int32), values=torch.ones(2), numel=4)
    rows = torch.stack([mine.to_buffer(), mine.to_buffer()])
    assert torch.equal(mine.from_buffers(rows).dense(), torch.tensor([2.0, 2.0, 0.0, 0.0]))
    other = rows.clone()
    other[1, 4] = 1
    with pytest.raises(PayloadError, match="rank 1"):
        mine.from_buffers(other)
    outside = rows.clone()
    outside[1, 28] = 200
    with pytest.raises(PayloadError, match="indices reach from 0 to 200"):
        mine.from_buffers(outside)
    with pytest.raises(PayloadError, match="expected buffers of 32 uint8"):
        mine.from_buffers(rows[:, :-8])


def test_golden_bytes() -> None:
    """The wire format as docs/explanation/wire-format.md states it: a change here is a change of version."""
    sparse = Sparse(indices=torch.tensor([7, 258], dtype=torch.int32), values=torch.tensor([1.0, -2.0]), numel=300)
    assert bytes(sparse.to_buffer().tolist()).hex() == (
        "02020000" "02000000" "2c01000000000000"  # version, kind, dtype, bits; count; numel, coding
        "0000803f" "000000c0"  # values
        "07000000" "02010000"  # indices
    )  # fmt: skip
    dense = Dense(values=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16))
    assert bytes(dense.to_buffer().tolist()).hex() == "02010200030000000300000000000000003c004000420000"


def test_golden_bytes_of_blocks() -> None:
    """Three of 20 blocks of two, named by a bitmap; and one of 20, by its number."""
    some = torch.tensor([0, 3, 19], dtype=torch.int32)
    blocks = Blocks(keys=some, values=torch.tensor([1.0, 0, 2, 0, 0, 3], dtype=torch.float16), numel=40, width=2)
    assert bytes(blocks.to_buffer().tolist()).hex() == (
        "02030200" "03000000" "2800000000000001"  # version, kind, dtype, bits; count; numel, coding
        "02000000" "14000000"  # width, blocks in all
        "003c0000" "00400000" "00000042" "00000000"  # values, padded
        "0900080000000000"  # bits 0, 3 and 19
    )  # fmt: skip
    one = Blocks(keys=some[2:], values=torch.tensor([1.0, 2.0]), numel=400, width=2)
    assert bytes(one.to_buffer().tolist()).hex().endswith("0000803f000000401300000000000000")


def test_golden_bytes_of_elias_fano() -> None:
    """Ten of 1000, 6 low bits each: 3, 3, 64, 100, 250, 500, 501, 640, 998 and, as padding, 999."""
    indices = torch.tensor([3, 3, 64, 100, 250, 500, 501, 640, 998, 999], dtype=torch.int32)
    payload = Sparse(indices=indices, values=torch.ones(10, dtype=torch.float16), numel=1000)
    assert bytes(payload.to_buffer().tolist()).hex() == (
        "02020200" "0a000000" "e803000000000002"  # version, kind, dtype, bits; count; numel, coding
        "003c003c003c003c003c003c003c003c003c003c00000000"  # values, padded
        "c300903a5d03e609"  # low bits: 3, 3, 0, 36, 58, 52, 53, 0, 38, 39
        "9b30820100000000"  # bits 0, 1, 3, 4, 7, 12, 13, 17, 23 and 24: high parts 0, 0, 1, 1, 3, 7, 7, 10, 15, 15
    )  # fmt: skip


def test_golden_bytes_of_slots() -> None:
    """Eight slots of 300 elements, 6 bits each: quotients 0 to 37, and 38 for an empty slot."""
    indices = torch.tensor([299, 299, 7, 100, 258, 299, 299, 299], dtype=torch.int32)
    values = torch.tensor([0, 0, 1, 2, 3, 0, 0, 0], dtype=torch.float16)
    payload = Sparse(indices=indices, values=values, numel=300, seeds=(6,))
    assert bytes(payload.to_buffer().tolist()).hex() == (
        "02020200" "08000000" "2c01000000000003"  # version, kind, dtype, bits; count; numel, coding
        "00000000003c0040" "0042000000000000"  # values
        "0100000000000000" "0600000000000000"  # one region, its seed
        "a6492d" "0d699a" "0000"  # 38, 38, 20, 11, 13, 36 (299 lies in its slot), 38, 38
    )  # fmt: skip


def test_golden_bytes_of_codes_and_spectra() -> None:
    form = OffsetFloat(bits=8, mantissa=3, eps=0.125, max=2.0, scaled=False)
    coded = Cast(values=form).encode(torch.tensor([0.256, -0.256, 2.0]))
    assert bytes(coded.to_buffer().tolist()).hex() == (
        "02010408" "03000000" "0300000000000000"  # version, kind, codes, of 8 bits; count; numel
        "0000803f00000000"  # scale 1, padded
        "092a210000000000"  # codes 9, 42, 33, padded
    )  # fmt: skip
    wave = FFT(density=1 / 3, block=4, values=torch.float16).encode(torch.tensor([1.0, 0.0, -1.0, 0.0]))
    assert bytes(wave.to_buffer().tolist()).hex() == (
        "02040000" "04000000" "0400000000000000"  # version, kind, 0, 0; block; numel
        "02030200" "01000000" "0600000000000000"  # blocks of pairs: fp16; count; 2 · 3 coefficients
        "02000000" "03000000"  # width 2, 3 coefficients in all
        "003c000000000000"  # 1 + 0i: (1 + 1) / √4, padded
        "0100000000000000"  # coefficient 1, by its number
    )  # fmt: skip


def test_golden_bytes_of_chunks() -> None:
    """The two largest of each of two chunks of 2 × 4: C(8, 2) = 28 subsets, 5 bits each."""
    x = torch.tensor([[1.0, 2, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 4, -3]])
    payload = ChunkTopK(density=0.25, chunk=4, transform=None, values=torch.float16).encode(x)
    assert bytes(payload.to_buffer().tolist()).hex() == (
        "02050200" "04000000" "1000000000000000"  # version, kind, fp16; count; numel
        "01000000" "01456433"  # one tensor, cut like this
        "003c0040" "004400c2"  # 1, 2; 4, −3
        "6003000000000000"  # 0 for 0 and 1, C(6, 1) + C(7, 2) = 27 for 6 and 7, padded
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_chunks_of_nothing_travel(shape: tuple[int, ...]) -> None:
    payload = ChunkTopK(density=0.05).encode(torch.empty(shape))
    buffer = payload.to_buffer()
    assert payload.from_buffers(torch.stack([buffer, buffer])).dense().numel() == 0


def test_chunks_cut_in_another_way_are_refused() -> None:
    x, mine = vector(32 * 64).view(32, 64), ChunkTopK(density=0.05)
    buffer = mine.encode(x).to_buffer()
    for other in (replace(mine, transform="hadamard"), replace(mine, chunk=8, density=0.0469)):
        theirs = other.encode(x).to_buffer()
        with pytest.raises(PayloadError, match=r"rank 1 sent a header with|expected buffers"):
            mine.encode(x).from_buffers(torch.stack([buffer, theirs]) if theirs.shape == buffer.shape else theirs[None])


FIELDS = {0: "version 3", 1: "kind 3", 2: "dtype code 1", 3: "bits 1", 4: "count 11", 8: "elements 101", 15: "coding 3"}


@pytest.mark.parametrize("place", FIELDS)
def test_a_header_of_another_rank_is_told_by_its_fields(place: int) -> None:
    payload = TopK(density=0.1).encode(vector(100))
    buffers = torch.stack([payload.to_buffer()] * 2)
    buffers[1, place] ^= 1
    with pytest.raises(PayloadError, match=f"rank 1 sent a header with {FIELDS[place]}, not .* attach the same recipe"):
        payload.from_buffers(buffers)


def _chunks() -> Chunks:
    payload = ChunkTopK(density=0.05).encode(vector(300))
    assert isinstance(payload, Chunks)
    return payload


def test_a_sum_of_chunks_does_not_travel() -> None:
    payload = _chunks()
    with pytest.raises(PayloadError, match="a sum of 2 payloads"):
        Chunks.concat([payload, payload]).to_buffer()


def test_chunks_must_fit_their_regions() -> None:
    payload = _chunks()
    with pytest.raises(PayloadError, match=r"tensors of \[300\] elements; expected the regions' \[299\]"):
        replace(payload, numel=299, regions=())
    with pytest.raises(PayloadError, match=r"14 values at 15 torch\.int16 positions; expected 15"):
        replace(payload, values=payload.values[1:])


@pytest.mark.parametrize("place", [-1, -8, -60])
def test_damaged_positions_are_refused_and_nothing_is_written(place: int) -> None:
    mine = ChunkTopK(density=0.3, chunk=32).encode(vector(64 * 64).view(64, 64))
    rows = torch.stack([mine.to_buffer(), mine.to_buffer()])
    torch.testing.assert_close(mine.from_buffers(rows).dense(), 2 * mine.dense())
    rows[1, place] ^= 255
    with pytest.raises(PayloadError):
        mine.from_buffers(rows)


@pytest.mark.parametrize(("place", "flipped"), [(0, 0b001000), (3, 0x80)], ids=["equal positions", "padding"])
def test_damaged_low_bits_are_refused(place: int, flipped: int) -> None:
    """Nine of 4,096: 27 low bits in four bytes, which follow the number."""
    cut, numbering = Chunking(4096, 64, 64, 64, 9, None), Numbering.of(4096, 9)
    assert numbering
    assert numbering.low_bits == 3
    positions = torch.arange(9, dtype=torch.int16)
    payload = Chunks(positions=positions, values=torch.zeros(9), numel=4096, chunkings=(cut,))
    bad = payload.to_buffer()
    assert torch.equal(payload.from_buffers(bad[None]).positions, positions)
    bad[24 + 40 + -(-numbering.bits // 8) + place] ^= flipped
    with pytest.raises(PayloadError, match="9 positions of each chunk of 4096"):
        payload.from_buffers(bad[None])


@pytest.mark.parametrize("case", CODECS.values(), ids=CODECS)
def test_every_tensor_of_a_payload_is_named(case: CodecCase) -> None:
    """One that is not could be given away while another stream still reads it."""
    payload = case.codec.encode(vector(600).view(20, 30), seed=1)
    expected = {x.data_ptr() for x in _extract_tensors(payload)}
    assert {x.data_ptr() for x in payload.tensors()} == expected


@pytest.mark.parametrize("damaged", range(4))
def test_wrong_positions_of_any_tensor_are_refused(damaged: int) -> None:
    """Of each tensor the last chunk, whether its neighbours have chunks of the same size or not."""
    alike, other = (Chunking(5 * n, 5, 1, 5, 1, None) for n in (4, 2)), Chunking(12, 6, 1, 6, 1, None)
    first, second = alike
    cuts = (first, second, other, first)
    mine = Chunks(
        positions=torch.zeros(sum(cut.count for cut in cuts), dtype=torch.int16),
        values=torch.ones(sum(cut.count for cut in cuts)),
        numel=sum(cut.numel for cut in cuts),
        chunkings=cuts,
        regions=((0, 20), (20, 10), (30, 12), (42, 20)),
    )
    buffer = mine.to_buffer()
    assert torch.equal(mine.from_buffers(torch.stack([buffer, buffer])).values, torch.ones(24))
    ends = [sum(-(-3 * cut.chunks // 8) for cut in cuts[: i + 1]) for i in range(4)]
    named = buffer.numel() - (ends[3] + 7) // 8 * 8
    last = 3 * (cuts[damaged].chunks - 1)  # the bit at which the last number begins: 7 says nothing
    start = ends[damaged - 1] if damaged else 0
    for bit in range(last, last + 3):
        buffer[named + start + bit // 8] |= 1 << bit % 8
    with pytest.raises(PayloadError, match=f"1 positions of each chunk of {cuts[damaged].size}"):
        mine.from_buffers(torch.stack([mine.to_buffer(), buffer]))


def test_one_position_a_chunk_that_is_none_is_refused_by_its_size() -> None:
    """Of two tensors, the second one's chunks have 5 positions, and 3 bits can say 5, 6 and 7 too."""
    cuts = Chunking(8, 4, 2, 4, 1, None), Chunking(5, 5, 1, 5, 1, None)
    regions = ((0, 8), (8, 5))
    mine = Chunks(
        positions=torch.tensor([7, 4], dtype=torch.int16),
        values=torch.ones(2),
        numel=13,
        chunkings=cuts,
        regions=regions,
    )
    rows = mine.to_buffer().repeat(2, 1)
    assert mine.from_buffers(rows).positions.tolist() == [7, 4, 7, 4]
    rows[1, 24 + 8 + 1] = 5
    with pytest.raises(PayloadError, match="1 positions of each chunk of 5"):
        mine.from_buffers(rows)


def test_rows_that_name_too_few_blocks_are_refused() -> None:
    mine = BlockTopK(density=0.3, block=4).encode(vector(400))
    rows = torch.stack([mine.to_buffer(), mine.to_buffer()])
    assert torch.equal(mine.from_buffers(rows).dense(), 2 * mine.dense())
    rows[1, -16] ^= 255
    with pytest.raises(PayloadError, match="expected 30"):
        mine.from_buffers(rows)


@codec_cases
def test_declared_bytes_are_real_bytes(case: CodecCase) -> None:
    payload = _encode(case)
    assert payload.to_buffer().numel() == payload.nbytes


@codec_cases
def test_round_trip_of_every_codecs_payload(case: CodecCase) -> None:
    payload = _encode(case)
    assert torch.equal(payload.from_buffers(payload.to_buffer()[None]).dense(), payload.dense())
    coded = getattr(payload.coefficients if isinstance(payload, Spectral) else payload, "coded", None)
    if isinstance(payload, Dense | Keyed | Spectral) and coded is None:
        assert torch.equal(type(payload).from_buffer(payload.to_buffer()).dense()[:1000], payload.dense())


@codec_cases
def test_decoding_a_concatenation_is_adding(case: CodecCase) -> None:
    a, b = _encode(case, seed=1), _encode(case, seed=2)
    if not case.linear:
        return
    torch.testing.assert_close(type(a).concat([a, b]).dense(), a.dense() + b.dense())


@codec_cases
def test_assembled_parts_come_apart_again(case: CodecCase) -> None:
    parts = [_encode(case, numel, seed=numel) for numel in (100, 1, 333)]
    whole = type(parts[0]).assemble(parts, [5, 400, 500], 900)
    out = torch.full((900,), torch.nan)
    whole.write(out)
    covered = torch.zeros(900, dtype=torch.bool)
    waiting = [vector(part.numel, seed=7) for part in parts]
    less = [x.clone() for x in waiting]
    whole.subtract_from(less)
    masked = [torch.ones(part.numel) for part in parts]
    whole.mask([masked[0], None, masked[2]])
    assert list(whole.counts()) == [part.values.numel() for part in parts]
    for i, (part, offset) in enumerate(zip(parts, (5, 400, 500), strict=True)):
        alone, zeros = waiting[i].clone(), torch.ones(part.numel)
        part.subtract_from([alone])
        part.mask([zeros if i != 1 else None])
        assert torch.equal(less[i], alone)
        assert torch.equal(masked[i], zeros)
        torch.testing.assert_close(out[offset : offset + part.numel], part.dense().float())
        covered[offset : offset + part.numel] = True
    assert bool(out[~covered].isnan().all()), "wrote outside its regions"


@codec_cases
def test_subtract_and_mask(case: CodecCase) -> None:
    payload = _encode(case)
    x = vector(1000, seed=9)
    expected = x - payload.dense()
    payload.subtract_from([x])
    torch.testing.assert_close(x, expected)
    masked = torch.ones(1000)
    payload.mask([masked])
    elements = isinstance(payload, Keyed) or (isinstance(payload, Chunks) and not payload.chunkings[0].transform)
    if elements:
        assert torch.equal(masked == 0, payload.dense() != 0)
    else:
        assert bool((masked == 1).all())


def test_values_and_indices_must_match() -> None:
    with pytest.raises(PayloadError, match="3 values for 2"):
        Sparse(indices=torch.zeros(2, dtype=torch.int32), values=torch.zeros(3), numel=5)
    with pytest.raises(PayloadError, match="int64"):
        Sparse(indices=torch.zeros(3, dtype=torch.int64), values=torch.zeros(3), numel=5)
    with pytest.raises(PayloadError, match="smaller buckets"):
        Sparse(indices=torch.zeros(0, dtype=torch.int32), values=torch.zeros(0), numel=2**31)
    with pytest.raises(PayloadError, match="4 values for regions"):
        Dense(values=torch.zeros(4), numel=5)


def test_a_bitmap_names_no_block_beyond_the_space() -> None:
    some = torch.arange(0, 20, 2, dtype=torch.int32)
    mine = Blocks(keys=some, values=torch.ones(20, dtype=torch.float16), numel=40, width=2)
    rows = mine.to_buffer()[None].repeat(2, 1)
    assert rows[1, -8:].tolist()[:3] == [0b01010101, 0b01010101, 0b0101], "a bitmap"
    rows[1, -6], rows[1, -8] = 0b01000101, 0b01010100
    with pytest.raises(PayloadError):
        mine.from_buffers(rows)


def test_plain_numbers_that_should_ascend_and_do_not_are_refused() -> None:
    mine = Sparse(indices=torch.tensor([7, 258], dtype=torch.int32), values=torch.ones(2), numel=300)
    rows = mine.to_buffer()[None].repeat(2, 1)
    assert rows.shape[1] == 16 + 8 + 8
    rows[1, 24:28], rows[1, 28:32] = rows[0, 28:32], rows[0, 24:28]
    with pytest.raises(PayloadError, match="ascend"):
        mine.from_buffers(rows)


@codec_cases
def test_rounding_where_something_was_sent_is_rounding_everywhere(case: CodecCase) -> None:
    part = _encode(case, 700)
    payload = type(part).assemble([part, _encode(case, 300, 1)], [5, 800], 1100)
    waiting = [vector(700, 7).bfloat16(), vector(300, 8).bfloat16()]
    found, expected = ([x.clone() for x in waiting] for _ in range(2))
    payload.subtract_rounded(found, [11, 12])
    Payload.subtract_rounded(payload, expected, [11, 12])
    assert all(map(torch.equal, found, expected))
    assert not all(map(torch.equal, found, waiting))


def test_codes_with_a_bit_behind_the_last_are_refused() -> None:
    mine = Cast(values=Ternary()).encode(vector(11))
    rows = torch.stack([mine.to_buffer()] * 2)
    assert torch.equal(mine.from_buffers(rows).dense(), 2 * mine.dense())
    rows[1, HEADER_BYTES + 8 + 2] |= 0x40  # behind a scale and eleven codes of two bits
    with pytest.raises(PayloadError, match="expected zeros after its first 6 bits"):
        mine.from_buffers(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [3, 8, 11])
def test_codes_of_ranks_are_summed_where_the_sum_belongs(bits: int, dtype: torch.dtype) -> None:
    codec, cut = Cast(values=Levels(bits=bits, group_size=100)), Cut([0, 3, 2504], [3, 2501, 4096])
    signals = [Plains(vector(6600, seed=rank, dtype=dtype).split(cut.lengths)) for rank in range(3)]
    sent = [codec.encode_signals(each, seeds=(1, 2, 3), cut=cut, numel=6600) for each in signals]
    out = torch.full((6600,), torch.nan, dtype=dtype)
    total = sent[0].from_buffers(torch.stack([each.to_buffer() for each in sent]))
    total.write(out)
    assert torch.equal(out, sent[0].dense() + sent[1].dense() + sent[2].dense())
