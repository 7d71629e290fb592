"""Index coding and bit packing: every backend does what the reference does, on whole and on damaged buffers."""

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.kernels import cpu, reference
from thinwire.kernels.reference.indices import EliasFano

BACKENDS = (reference, cpu)
SIZES = [
    (0, 0),
    (0, 5),
    (1, 1),
    (1, 2**31 - 1),
    (5, 5),
    (64, 64),
    (7, 3),
    (64, 64 * 1000),
    (63, 999_999),
    (3000, 2**31 - 1),
]
WIDTHS = {torch.uint8: 8, torch.int16: 15, torch.int32: 31}


def _indices(count: int, space: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(max(1, space), (count,), generator=generator, dtype=torch.int32).sort().values


@pytest.mark.parametrize(("count", "space"), SIZES)
def test_elias_fano(count: int, space: int) -> None:
    last = torch.full((count,), max(0, space - 1), dtype=torch.int32)
    for indices in (_indices(count, space), last, torch.zeros_like(last)):
        expected = reference.elias_fano_encode(indices, space)
        assert expected.numel() == EliasFano.of(count, space).nbytes
        for backend in BACKENDS:
            assert torch.equal(backend.elias_fano_encode(indices, space), expected)
            assert torch.equal(backend.elias_fano_decode(expected, count, space), indices)


def test_elias_fano_where_bytes_begin_between_two_words() -> None:
    indices = _indices(100, 10**6)
    buffer = torch.cat([torch.ones(3, dtype=torch.uint8), reference.elias_fano_encode(indices, 10**6)])[3:]
    assert buffer.data_ptr() % 8
    assert torch.equal(cpu.elias_fano_decode(buffer, 100, 10**6), indices)


@given(st.integers(1, 80), st.integers(0, 5000), st.lists(st.tuples(st.integers(0), st.integers(0, 7)), max_size=4))
@settings(deadline=None, max_examples=400)
def test_damaged_elias_fano(count: int, more: int, flips: list[tuple[int, int]]) -> None:
    """Whatever is not what encode writes gives −1 throughout, and alike in each backend."""
    space = count + more
    buffer = reference.elias_fano_encode(_indices(count, space, more), space)
    for place, bit in flips:
        buffer[place % buffer.numel()] ^= 1 << bit
    found = reference.elias_fano_decode(buffer, count, space)
    assert torch.equal(cpu.elias_fano_decode(buffer, count, space), found)
    if int(found[0]) < 0:
        assert bool((found == -1).all())
    else:
        assert torch.equal(reference.elias_fano_encode(found, space), buffer)


@given(st.binary(min_size=16, max_size=16))
@settings(deadline=None, max_examples=200)
def test_any_bytes_may_be_elias_fano(noise: bytes) -> None:
    buffer = torch.tensor(list(noise), dtype=torch.uint8)
    for count, space in ((20, 100), (3, 60_000)):  # 8 bytes of low bits and 8 of high parts; and with few of each
        assert EliasFano.of(count, space).nbytes == 16
        found = [backend.elias_fano_decode(buffer, count, space) for backend in BACKENDS]
        assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("bits", range(1, 32))
@pytest.mark.parametrize("numel", [0, 1, 31, 33, 1000])
def test_bits_of_every_width(bits: int, numel: int) -> None:
    for dtype, most in WIDTHS.items():
        if bits <= most:
            _check_bits(bits, torch.randint(2**bits, (numel,), dtype=torch.int64).to(dtype))


def test_bits_in_several_ranges() -> None:
    for bits in (1, 11, 31):
        _check_bits(bits, torch.randint(2**bits, (3 * (1 << 18) + 17,), dtype=torch.int64).to(torch.int32))


def _check_bits(bits: int, codes: Tensor) -> None:
    packed = reference.pack_bits(codes, bits)
    assert packed.numel() == -(-codes.numel() * bits // 8)
    longer = torch.cat([packed, torch.full((5,), 255, dtype=torch.uint8)])
    backend: ModuleType
    for backend in BACKENDS:
        assert torch.equal(backend.pack_bits(codes, bits), packed)
        assert torch.equal(backend.unpack_bits(packed, codes.numel(), bits, codes.dtype), codes)
        assert torch.equal(backend.unpack_bits(longer, codes.numel(), bits, codes.dtype), codes)


def test_only_the_low_bits_are_packed() -> None:
    codes = torch.tensor([0b101, 0b011, 0b110], dtype=torch.int32)
    for backend in BACKENDS:
        assert backend.pack_bits(codes | ~0b111, 3).tolist() == [0b10_011_101, 0b1]
        assert backend.pack_bits(torch.tensor([-1, 256 + 7], dtype=torch.int32), 8).tolist() == [255, 7]
