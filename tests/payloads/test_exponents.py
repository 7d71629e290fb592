"""Exponents in a prefix code: round trips, golden bytes, how near to the entropy, and what damaged bytes do."""

import math
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from cases import vector
from hypothesis import given, settings
from hypothesis import strategies as st
from test_wire import _damaged, damage
from torch import Tensor

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.kernels.bits.reference import CODED, LONGEST
from thinwire.payloads import exponents

SIZES = (0, 1, 2, 63, CODED, CODED + 1, 5000)


def _bits(numel: int) -> Tensor:
    """Return any bits, as int16."""
    return torch.randint(-(2**15), 2**15, (numel,), generator=torch.Generator().manual_seed(numel)).to(torch.int16)


CONTENTS = {
    "weights": lambda n: vector(n).bfloat16(),
    "equal": lambda n: torch.full((n,), -1.5, dtype=torch.bfloat16),
    "zeros": lambda n: torch.zeros(n, dtype=torch.bfloat16),
    "any bits": lambda n: _bits(n).view(torch.bfloat16),  # NaN among them, of any payload
    "falling": lambda n: (0.5 ** (torch.arange(n) % 120).double()).bfloat16(),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("make", CONTENTS.values(), ids=CONTENTS)
def test_every_bit_comes_back(make: Callable[[int], Tensor], dtype: torch.dtype) -> None:
    for numel in SIZES:
        x = make(numel)
        x = x.to(dtype) if dtype != torch.bfloat16 else x
        buffer, out = exponents.pack(x), torch.full_like(x, 7)
        exponents.unpack(out, torch.cat([buffer, torch.full((24,), 99, dtype=torch.uint8)]))
        assert torch.equal(out.view(torch.uint8), x.view(torch.uint8))
        assert buffer.numel() <= 16 + -(-x.nbytes // 8) * 8


def test_codes_come_within_a_tenth_of_a_bit_of_the_entropy() -> None:
    x = vector(200_000).bfloat16()
    share = kernels.exponents_count(x.view(torch.int16)).double() / x.numel()
    entropy = 8 - float((share * share.clamp(min=1e-300).log2()).sum())
    assert entropy < 8 * exponents.pack(x).numel() / x.numel() < entropy + 0.15
    bits = 8 * exponents.pack(vector(200_000)).numel() / x.numel()
    assert bits == pytest.approx(16 + 8 * exponents.pack(x).numel() / x.numel(), abs=0.05)


def test_long_codes_are_cut_and_stay_a_prefix_code() -> None:
    counts = [2**i for i in range(40)] + [0] * 216
    lengths = exponents.code_lengths(counts)
    assert max(lengths) == LONGEST
    assert sum(2.0**-length for length in lengths if length) == 1
    codes = [f"{code:0{n}b}"[::-1] for code, n in zip(exponents.prefix_codes(lengths), lengths, strict=True) if n]
    assert not any(a != b and b.startswith(a) for a in codes for b in codes)


def test_golden_bytes() -> None:
    """Half of 2,048 numbers are 1.0, a quarter 0.5, and the others -2.0: codes 0, 10 and 11."""
    x = torch.tensor([1.0, 1.0, 0.5, -2.0], dtype=torch.bfloat16).repeat(512)
    buffer = bytes(exponents.pack(x).tolist())
    assert buffer[:16].hex() == "02060300000800000008000000000001"
    lengths = [buffer[16 + i // 2] >> 4 * (i % 2) & 15 for i in range(256)]
    assert {i: n for i, n in enumerate(lengths) if n} == {126: 2, 127: 1, 128: 2}
    assert buffer[144:152].hex() == "0003" * 4  # 768 bits a block
    assert buffer[152:156].hex() == "00000080"  # signs and mantissas
    assert len(buffer) == 152 + 2048 + 392  # each of four blocks may begin a byte
    # 0, 0, 10, 11 from the lowest bit on: 0b110100, and so on
    assert buffer[2200:2203].hex() == "344dd3"


@st.composite
def damages(draw: st.DrawFn) -> tuple[int, tuple[str, int, bytes]]:
    return draw(st.sampled_from([40, 700, 1500])), draw(damage())


@given(damages(), st.booleans())
@settings(max_examples=400)
def test_damaged_bytes_are_refused_or_decode_to_something(how: tuple[int, tuple[str, int, bytes]], wide: bool) -> None:
    numel, what = how
    x = torch.full((numel,), 0.75, dtype=torch.float32 if wide else torch.bfloat16)
    x[::3] = 0.01
    frame = torch.full((numel + 128,), 7, dtype=x.dtype)
    bad = _damaged(exponents.pack(x), what)
    with suppress(PayloadError):
        exponents.unpack(frame[64:-64], bad)
    assert bool((frame[:64] == 7).all())
    assert bool((frame[-64:] == 7).all())


@pytest.mark.parametrize("numel", SIZES[1:])
@pytest.mark.parametrize("flips", range(4))
def test_backends_agree_on_whole_and_damaged_blocks(numel: int, flips: int) -> None:
    x = vector(numel).bfloat16().view(torch.int16)
    counts = kernels.exponents_count.reference(x)
    assert torch.equal(counts, kernels.exponents_count.cpu(x))
    lengths = exponents.code_lengths(counts.tolist())
    codes = [code | n << 16 for code, n in zip(exponents.prefix_codes(lengths), lengths, strict=True)]
    room = int((counts * torch.tensor(lengths)).sum()) // 8 + math.ceil(numel / CODED)
    given = (x, torch.tensor(codes, dtype=torch.int32), room)
    parts = kernels.exponents_encode.reference(*given)
    assert all(torch.equal(a, b) for a, b in zip(parts, kernels.exponents_encode.cpu(*given), strict=True))
    rest, sizes, stream = parts
    for flip in range(flips):
        damaged = (stream, sizes.view(torch.uint8))[flip % 2]
        damaged[flip * 37 % damaged.numel()] ^= 1 << flip
    outs = torch.zeros(2, numel, dtype=torch.int16).unbind()
    table = exponents.table_of(lengths)
    good = [
        bool(decode(out, rest, sizes, stream, table))
        for decode, out in zip((kernels.exponents_decode.reference, kernels.exponents_decode.cpu), outs, strict=True)
    ]
    assert good[0] == good[1]
    if good[0]:
        assert torch.equal(*outs)
    assert flips or (good[0] and torch.equal(outs[0], x))
