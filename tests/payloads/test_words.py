"""Payloads as float32 words: round trips, lengths, golden bytes, rounding, and words that nobody wrote."""

import math

import pytest
import torch
from cases import OFFSET_8, vector
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.errors import PayloadError
from thinwire.formats import Levels, OffsetFloat, Sign, Ternary
from thinwire.payloads import Dense, Narrow, Sparse, Words, narrowed
from thinwire.payloads.words import LEAST_BITS, shortened, widened

VALUES: dict[str, Narrow] = {
    "as they are": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "8 bits": OFFSET_8,
    "6 bits": OffsetFloat.balanced(bits=6, mantissa=2, max=2.0, rounding="nearest"),
    "balanced": OffsetFloat.balanced(bits=8),
    "levels": Levels(bits=4, group_size=64),
    "ternary": Ternary(),
    "sign": Sign(),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
PATTERNS = {"zeros": 0, "ones": -1, "NaN": 0x7FC00000, "signalling NaN": 0x7F800001, "Inf": 0x7F800000}
layouts = st.builds(
    lambda numel, share, dtype, values: Words(
        named=None if share is None else min(numel, math.ceil(share * numel)), numel=numel, dtype=dtype, values=values
    ),
    st.sampled_from([0, 1, 2, 7, 63, 300, 1000, 5000]) | st.integers(0, 400),
    st.none() | st.sampled_from([0.01, 0.1, 0.5, 1.0]) | st.floats(0, 1),
    st.sampled_from(DTYPES),
    st.sampled_from(list(VALUES.values())),
)


def _payload(layout: Words, seed: int, padding: bool = False) -> Sparse | Dense:
    generator = torch.Generator().manual_seed(seed)
    x = vector(layout.count, seed, layout.dtype)
    if padding and layout.named is not None:
        x[layout.named // 2 + 1 :] = 0
    values, coded = narrowed(x, layout.values, layout.dtype, seed)
    if layout.named is None:
        return Dense(values=values, coded=coded)
    indices = torch.randperm(layout.numel, generator=generator)[: layout.named].sort().values.int()
    if padding:
        indices[layout.named // 2 :] = layout.numel - 1
    return Sparse(indices=indices, values=values, numel=layout.numel, coded=coded)


def _hex(words: Tensor) -> str:
    return bytes(words.view(torch.uint8).tolist()).hex()


@given(layouts, st.integers(0, 5), st.booleans())
@settings(max_examples=400)
def test_round_trip_and_length(layout: Words, seed: int, padding: bool) -> None:
    payload = _payload(layout, seed, padding)
    words = layout.write(payload)
    assert words.dtype == torch.float32
    assert words.shape == (layout.length,), "a function of the layout alone"
    read = layout.read(words)
    assert read.values.dtype == layout.dtype
    assert torch.equal(read.values, payload.values.to(layout.dtype))
    if isinstance(payload, Sparse):
        assert isinstance(read, Sparse)
        assert read.indices.dtype == torch.int32
        assert torch.equal(read.indices, payload.indices)
    if not isinstance(layout.values, Sign):  # whose zeros are none, so that padding is added up
        assert torch.equal(read.dense(), payload.dense().to(layout.dtype))


@given(layouts, st.integers(0, 5))
@settings(max_examples=400)
def test_gradients_come_back_in_the_bits_declared(layout: Words, seed: int) -> None:
    gradient, bits, own = vector(layout.count, seed, layout.dtype), layout.gradient_bits, 8 * layout.dtype.itemsize
    words = layout.write_gradient(gradient)
    assert words.dtype == torch.float32
    assert words.shape == (layout.length,)
    read = layout.read_gradient(words)
    assert read.dtype == layout.dtype
    room = 32 * layout.length
    assert bits * layout.count <= room, "it fits"
    assert (bits + 1) * layout.count > room or bits in (own, 32) or not layout.count, "and leaves no room"
    assert bits == own or LEAST_BITS <= bits <= 32
    if bits == own:
        assert torch.equal(read, gradient), "unchanged"
    else:
        assert torch.equal(read, _rounded(gradient.float(), bits).to(layout.dtype))


@pytest.mark.parametrize(
    ("named", "numel", "dtype", "values", "length", "bits"),
    [
        (100, 1000, torch.float32, None, 118, 32),  # 400 bytes, and 40 + 32 to name them
        (100, 1000, torch.float32, torch.bfloat16, 68, 21),
        (100, 1000, torch.float32, OFFSET_8, 46, 14),  # a scale too
        (500, 1000, torch.float32, OFFSET_8, 188, 12),  # 8 + 504 bytes, and names; 12 bits each are 750
        (None, 1000, torch.float32, None, 1000, 32),
        (None, 1000, torch.float32, torch.bfloat16, 500, 16),
        (None, 1000, torch.float32, OFFSET_8, 375, 12),
        (None, 1000, torch.bfloat16, None, 500, 16),
        (None, 1000, torch.float64, None, 2000, 64),
        (None, 1000, torch.float64, torch.float32, 1000, 32),
        (100, 1000, torch.float64, torch.float32, 118, 32),  # 37 bits would fit; cut takes float32
        (1, 1, torch.float32, None, 4, 32),  # sections are padded to 8 bytes
        (0, 0, torch.float32, None, 0, 32),
        (None, 0, torch.bfloat16, None, 0, 16),
    ],
)
def test_lengths_and_bits(
    named: int | None, numel: int, dtype: torch.dtype, values: Narrow, length: int, bits: int
) -> None:
    layout = Words(named=named, numel=numel, dtype=dtype, values=values)
    assert (layout.length, layout.gradient_bits) == (length, bits)


@given(layouts, st.sampled_from([*PATTERNS, "random"]), st.integers(0, 1000))
@settings(max_examples=500)
def test_words_that_nobody_wrote_name_nothing_out_of_range(layout: Words, pattern: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31 - 1, (layout.length,), generator=generator, dtype=torch.int32)
    if pattern in PATTERNS:
        words.fill_(PATTERNS[pattern])
    before = words.clone()
    read = layout.read(words.view(torch.float32))
    assert read.values.shape == (layout.count,)
    assert read.values.dtype == layout.dtype
    if isinstance(read, Sparse):
        assert bool(((read.indices >= 0) & (read.indices < layout.numel)).all())
    assert read.dense().shape == (layout.numel,)
    assert layout.read_gradient(words.view(torch.float32)).shape == (layout.count,)
    assert torch.equal(words, before)


@given(layouts, st.integers(-3, 3).filter(bool))
def test_another_number_of_words_or_dtype_is_refused(layout: Words, off: int) -> None:
    words = torch.zeros(max(0, layout.length + off))
    for read in (layout.read, layout.read_gradient):
        if words.numel() != layout.length:
            with pytest.raises(PayloadError, match=rf"got {words.numel()} words.*expected {layout.length}.*density"):
                read(words)
        with pytest.raises(PayloadError, match="float64"):
            read(torch.zeros(layout.length, dtype=torch.float64))


def test_words_in_any_memory_are_read() -> None:
    layout = Words(named=10, numel=100, dtype=torch.float32, values=torch.bfloat16)
    payload = _payload(layout, 1)
    room = torch.full((2 * layout.length + 1,), torch.nan)
    for words in (room[1::2], room[1 : 1 + layout.length]):
        words.copy_(layout.write(payload))
        assert torch.equal(layout.read(words).dense(), payload.dense().float())


def test_golden_words_there() -> None:
    layout = Words(named=2, numel=300, dtype=torch.float32, values=torch.float16)
    indices, values = torch.tensor([7, 258], dtype=torch.int32), torch.tensor([1.0, -2.0], dtype=torch.float16)
    assert _hex(layout.write(Sparse(indices=indices, values=values, numel=300))) == (
        "003c00c000000000"  # values, padded
        "0700000002010000"  # indices
    )  # fmt: skip
    form = OffsetFloat(bits=8, mantissa=3, eps=0.125, max=2.0, scaled=False)
    numbers, coded = narrowed(torch.tensor([0.256, -0.256, 2.0]), form, torch.float32, 0)
    layout = Words(named=None, numel=3, dtype=torch.float32, values=form)
    assert _hex(layout.write(Dense(values=numbers, coded=coded))) == (
        "0000803f00000000"  # scale 1, padded
        "092a210000000000"  # codes 9, 42, 33, padded
    )  # fmt: skip


def test_golden_words_back() -> None:
    named = Words(named=2, numel=300, dtype=torch.float32, values=torch.float16)
    assert _hex(named.write_gradient(torch.tensor([1.0, -2.0]))) == "0000803f000000c00000000000000000"
    layout = Words(named=None, numel=3, dtype=torch.float32, values=torch.bfloat16)
    assert layout.gradient_bits == 21
    # Patterns 3f800 | c0000 | 3eaaaaab >> 11 rounded, from the lowest bit on.
    codes = [0x3F800000 >> 11, 0xC0000000 >> 11, (0x3EAAAAAB + 0x400) >> 11]
    packed = sum(code << 21 * i for i, code in enumerate(codes)).to_bytes(8, "little")
    assert _hex(layout.write_gradient(torch.tensor([1.0, -2.0, 1 / 3]))) == packed.hex()


def _rounded(x: Tensor, bits: int) -> Tensor:
    """Round float32 to nearest and even by arithmetic in float64."""
    wide = x.double()
    _, exponent = torch.frexp(wide)
    unit = torch.exp2((exponent - 1).clamp(min=-126).double() - (bits - 9))
    rounded = (wide / unit).round() * unit
    rounded = torch.where(wide.isfinite(), rounded, wide)
    return torch.where(rounded.abs() >= 2.0**128, rounded.sign() * math.inf, rounded).float()


@given(st.lists(st.floats(width=32), max_size=30), st.integers(LEAST_BITS, 32))
@settings(max_examples=500)
def test_cut_rounds_to_nearest_and_even(numbers: list[float], bits: int) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    found = widened(shortened(x, bits), x.numel(), bits)
    torch.testing.assert_close(found, _rounded(x, bits), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit()[~x.isnan()], x.signbit()[~x.isnan()])


@pytest.mark.parametrize("bits", range(LEAST_BITS, 33))
def test_cut_of_odd_numbers(bits: int) -> None:
    patterns = torch.randint(-(2**31), 2**31 - 1, (5000,), generator=torch.Generator().manual_seed(bits))
    largest = torch.finfo(torch.float32).max
    odd = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, largest, -largest, 1e-45, -1.4e-38])
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF - 2**32, 0xFF800001 - 2**32]).int().view(torch.float32)
    halves = (torch.arange(0, 64).int() << (31 - bits if bits < 32 else 0)).add(0x3F800000).view(torch.float32)
    x = torch.cat((odd, nans, patterns.int().view(torch.float32), halves))
    data = shortened(x, bits)
    assert data.dtype == torch.uint8
    assert data.numel() == -(-bits * x.numel() // 8)
    for buffer in (data, torch.cat((data, data.new_full((9,), 255)))):
        found = widened(buffer, x.numel(), bits)
        torch.testing.assert_close(found, _rounded(x, bits), rtol=0, atol=0, equal_nan=True)
    assert found[5] == (largest if bits == 32 else math.inf), "what is too large is infinite"
    if bits == 32:
        assert torch.equal(found.view(torch.int32), x.view(torch.int32)), "to the bit"
