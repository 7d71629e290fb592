"""Payload laws: round trip, golden bytes, sums, and what happens to malformed buffers."""

import pytest
import torch
from cases import CODECS, CodecCase, vector
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import PayloadError
from thinwire.codecs import FFT, BlockTopK, Cast
from thinwire.formats import OffsetFloat
from thinwire.payloads import Blocks, Dense, Keyed, Payload, Sparse
from thinwire.payloads.wire import DTYPE_CODES

codec_cases = pytest.mark.parametrize("case", CODECS.values(), ids=CODECS)
DTYPES = sorted(DTYPE_CODES, key=str)


def _encode(case: CodecCase, numel: int = 1000, seed: int = 0) -> Payload:
    return case.codec.encode(vector(numel, seed), seed=3)


@st.composite
def sparse_payloads(draw: st.DrawFn) -> Sparse:
    numel = draw(st.integers(1, 300))
    indices = draw(st.lists(st.integers(0, numel - 1), unique=True, max_size=40))
    values = draw(st.lists(st.floats(-100, 100, width=16), min_size=len(indices), max_size=len(indices)))
    dtype = draw(st.sampled_from(DTYPES))
    where = torch.tensor(indices, dtype=torch.int32)
    return Sparse(indices=where, values=torch.tensor(values, dtype=dtype), numel=numel)


@given(sparse_payloads())
@settings(deadline=None)
def test_sparse_round_trip(payload: Sparse) -> None:
    buffer = payload.to_buffer()
    again = Sparse.from_buffer(buffer)
    assert buffer.numel() == payload.nbytes
    assert torch.equal(again.indices, payload.indices)
    assert torch.equal(again.values, payload.values)
    assert torch.equal(again.to_buffer(), buffer)


@given(st.lists(st.floats(-100, 100, width=16), max_size=40), st.sampled_from(DTYPES))
@settings(deadline=None)
def test_dense_round_trip(values: list[float], dtype: torch.dtype) -> None:
    payload = Dense(values=torch.tensor(values, dtype=dtype))
    buffer = payload.to_buffer()
    assert buffer.numel() == payload.nbytes
    assert torch.equal(Dense.from_buffer(buffer).values, payload.values)


@given(st.binary(max_size=200), sparse_payloads(), st.integers(0, 10**6))
@settings(deadline=None)
def test_hostile_bytes_raise_or_decode_within_bounds(noise: bytes, payload: Sparse, place: int) -> None:
    """Damage a real buffer anywhere: it is refused, or decodes to something of the size it says."""
    buffer = payload.to_buffer()
    damage = torch.frombuffer(bytearray(noise or b"\0"), dtype=torch.uint8)
    start = place % buffer.numel()
    stop = min(buffer.numel(), start + damage.numel())
    buffer[start:stop] = damage[: stop - start]
    try:
        decoded = Sparse.from_buffer(buffer)
    except PayloadError:
        return
    assert decoded.values.numel() <= decoded.numel
    if decoded.values.numel():
        assert 0 <= int(decoded.indices.min()) <= int(decoded.indices.max()) < decoded.numel


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
    for place, value in ((4, 1), (4, 3), (8, 2), (2, 9)):  # count, count, numel, dtype
        bad = good.clone()
        bad[place] = value
        with pytest.raises(PayloadError):
            Sparse.from_buffer(bad)
    for length in range(good.numel()):
        with pytest.raises(PayloadError):
            Sparse.from_buffer(good[:length])
    negative = good.clone()
    negative[27] = 0x80
    with pytest.raises(PayloadError, match="indices reach"):
        Sparse.from_buffer(negative)


def test_rows_of_another_layout_are_refused_and_nothing_is_written() -> None:
    mine = Sparse(indices=torch.tensor([0, 1], dtype=torch.int32), values=torch.ones(2), numel=4)
    rows = torch.stack([mine.to_buffer(), mine.to_buffer()])
    assert torch.equal(mine.from_rows(rows).dense(), torch.tensor([2.0, 2.0, 0.0, 0.0]))
    other = rows.clone()
    other[1, 4] = 1
    with pytest.raises(PayloadError, match="rank 1"):
        mine.from_rows(other)
    outside = rows.clone()
    outside[1, 24] = 200
    with pytest.raises(PayloadError, match="indices reach from 0 to 200"):
        mine.from_rows(outside)


def test_golden_bytes() -> None:
    """The wire format as docs/wire-format.md states it: a change here is a change of version."""
    sparse = Sparse(indices=torch.tensor([7, 258], dtype=torch.int32), values=torch.tensor([1.0, -2.0]), numel=300)
    assert bytes(sparse.to_buffer().tolist()).hex() == (
        "01020000" "02000000" "2c01000000000000"  # version, kind, dtype, zero; count; numel
        "0000803f" "000000c0"  # values
        "07000000" "02010000"  # indices
    )  # fmt: skip
    dense = Dense(values=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16))
    assert bytes(dense.to_buffer().tolist()).hex() == "01010200030000000300000000000000003c004000420000"


def test_golden_bytes_of_blocks() -> None:
    """Three of 20 blocks of two, named by a bitmap; and one of 20, by its number."""
    some = torch.tensor([0, 3, 19], dtype=torch.int32)
    blocks = Blocks(keys=some, values=torch.tensor([1.0, 0, 2, 0, 0, 3], dtype=torch.float16), numel=40, width=2)
    assert bytes(blocks.to_buffer().tolist()).hex() == (
        "01030200" "03000000" "2800000000000000"  # version, kind, dtype, bits; count; numel
        "02000000" "14000000"  # width, blocks in all
        "003c0000" "00400000" "00000042" "00000000"  # values, padded
        "0900080000000000"  # bits 0, 3 and 19
    )  # fmt: skip
    one = Blocks(keys=some[2:], values=torch.tensor([1.0, 2.0]), numel=400, width=2)
    assert bytes(one.to_buffer().tolist()).hex().endswith("0000803f000000401300000000000000")


def test_golden_bytes_of_codes_and_spectra() -> None:
    form = OffsetFloat(bits=8, mantissa=3, eps=0.125, max=2.0, scaled=False)
    coded = Cast(values=form).encode(torch.tensor([0.256, -0.256, 2.0]))
    assert bytes(coded.to_buffer().tolist()).hex() == (
        "01010408" "03000000" "0300000000000000"  # version, kind, codes, of 8 bits; count; numel
        "0000803f00000000"  # scale 1, padded
        "092a210000000000"  # codes 9, 42, 33, padded
    )  # fmt: skip
    wave = FFT(density=1 / 3, block=4, values=torch.float16).encode(torch.tensor([1.0, 0.0, -1.0, 0.0]))
    assert bytes(wave.to_buffer().tolist()).hex() == (
        "01040000" "04000000" "0400000000000000"  # version, kind, 0, 0; block; numel
        "01030200" "01000000" "0600000000000000"  # blocks of pairs: fp16; count; 2 · 3 coefficients
        "02000000" "03000000"  # width 2, 3 coefficients in all
        "003c000000000000"  # 1 + 0i: (1 + 1) / √4, padded
        "0100000000000000"  # coefficient 1, by its number
    )  # fmt: skip


@given(st.binary(max_size=200), st.integers(1, 90), st.integers(1, 9), st.integers(0, 10**6))
@settings(deadline=None)
def test_hostile_blocks_raise_or_decode_within_bounds(noise: bytes, space: int, width: int, place: int) -> None:
    keys = torch.arange(0, space, 3, dtype=torch.int32)
    values = torch.ones(keys.numel() * width)
    buffer = Blocks(keys=keys, values=values, numel=space * width, width=width).to_buffer()
    damage = torch.frombuffer(bytearray(noise or b"\0"), dtype=torch.uint8)
    start = place % buffer.numel()
    stop = min(buffer.numel(), start + damage.numel())
    buffer[start:stop] = damage[: stop - start]
    try:
        decoded = Blocks.from_buffer(buffer)
    except PayloadError:
        return
    assert decoded.rows.shape == (decoded.keys.numel(), decoded.width)
    if decoded.keys.numel():
        assert 0 <= int(decoded.keys.min()) <= int(decoded.keys.max()) < decoded.key_space


def test_rows_that_name_too_few_blocks_are_refused() -> None:
    mine = BlockTopK(density=0.3, block=4).encode(vector(400))
    rows = torch.stack([mine.to_buffer(), mine.to_buffer()])
    assert torch.equal(mine.from_rows(rows).dense(), 2 * mine.dense())
    rows[1, -16] ^= 255
    with pytest.raises(PayloadError, match="expected 30 each"):
        mine.from_rows(rows)


@codec_cases
def test_declared_bytes_are_real_bytes(case: CodecCase) -> None:
    payload = _encode(case)
    assert payload.to_buffer().numel() == payload.nbytes


@codec_cases
def test_round_trip_of_every_codecs_payload(case: CodecCase) -> None:
    payload = _encode(case)
    assert torch.equal(payload.from_rows(payload.to_buffer()[None]).dense(), payload.dense())
    if isinstance(payload, Dense | Keyed) and payload.coded is None:
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
    for part, again, offset in zip(parts, whole.split(), (5, 400, 500), strict=True):
        assert torch.equal(again.dense(), part.dense())
        torch.testing.assert_close(out[offset : offset + part.numel], part.dense().float())
        covered[offset : offset + part.numel] = True
    assert bool(out[~covered].isnan().all()), "wrote outside its spans"


@codec_cases
def test_subtract_and_mask(case: CodecCase) -> None:
    payload = _encode(case)
    x = vector(1000, seed=9)
    expected = x - payload.dense()
    payload.subtract_from(x)
    torch.testing.assert_close(x, expected)
    masked = torch.ones(1000)
    payload.mask(masked)
    if isinstance(payload, Keyed):
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
    with pytest.raises(PayloadError, match="4 values for spans"):
        Dense(values=torch.zeros(4), numel=5)
