"""Index coding and bit packing: every backend does what the reference does, on whole and on damaged buffers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import EliasFano
from thinwire.kernels.dispatch import Backend
from thinwire.kernels.hashing.reference import slot_indices

pytestmark = pytest.mark.usefixtures("two_threads")

BACKENDS: tuple[Backend, ...] = ("reference", "cpu")
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
EDGES = {1, 2, 3, 4, 5, 7, 8, 9, 11, 16, 17, 25, 26, 31}  # and what recipes use


def _indices(count: int, space: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(max(1, space), (count,), generator=generator, dtype=torch.int32).sort().values


@pytest.mark.parametrize(("count", "space"), SIZES)
def test_elias_fano(count: int, space: int) -> None:
    last = torch.full((count,), max(0, space - 1), dtype=torch.int32)
    for indices in (_indices(count, space), last, torch.zeros_like(last)):
        expected = kernels.elias_fano_encode.reference(indices, space)
        assert expected.numel() == EliasFano.of(count, space).nbytes
        for backend in BACKENDS:
            assert torch.equal(kernels.elias_fano_encode.on(backend)(indices, space), expected)
            assert torch.equal(kernels.elias_fano_decode.on(backend)(expected[None], count, space)[0], indices)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ones(backend: Backend) -> None:
    bits = torch.tensor([0, 1, 1, 0, 0, 1, 0], dtype=torch.uint8)
    for count, expected in ((0, []), (2, [1, 2]), (3, [1, 2, 5]), (5, [1, 2, 5, -1, -1])):
        places, found = kernels.ones.on(backend)(bits, count)
        assert places.dtype == torch.int32
        assert places.tolist() == expected
        assert int(found) == 3
    assert kernels.ones.on(backend)(bits[:0], 1)[0].tolist() == [-1]


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5, 2**64 - 1])
def test_slots_by_seeds_that_only_the_device_knows(seed: int) -> None:
    codes = torch.arange(40, dtype=torch.int32) % 26  # 25 stands for an empty slot
    signed = torch.tensor([[seed - 2**64 if seed >= 2**63 else seed], [3]])
    found = slot_indices(torch.stack([codes, codes]), 1000, signed)
    assert torch.equal(found[0], slot_indices(codes, 1000, seed))
    assert torch.equal(found[1], slot_indices(codes, 1000, 3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_elias_fano(backend: Backend) -> None:
    several = torch.stack([_indices(3000, 10**6, seed) for seed in range(3)])
    rows = torch.stack([kernels.elias_fano_encode(indices, 10**6) for indices in several])
    wider = torch.nn.functional.pad(rows, (8, 8))[:, 8:-8]
    for given_rows in (rows, wider):
        assert torch.equal(kernels.elias_fano_decode.on(backend)(given_rows, 3000, 10**6), several)
    rows[1, -1] ^= 255
    found = kernels.elias_fano_decode.on(backend)(rows, 3000, 10**6)
    assert (found[:, 0] < 0).tolist() == [False, True, False]


def test_elias_fano_where_bytes_begin_between_two_words() -> None:
    indices = _indices(100, 10**6)
    buffer = torch.cat([torch.ones(3, dtype=torch.uint8), kernels.elias_fano_encode.reference(indices, 10**6)])[3:]
    assert buffer.data_ptr() % 8
    assert torch.equal(kernels.elias_fano_decode.cpu(buffer[None], 100, 10**6)[0], indices)


@given(st.integers(1, 80), st.integers(0, 5000), st.lists(st.tuples(st.integers(0), st.integers(0, 7)), max_size=4))
@settings(max_examples=400)
def test_damaged_elias_fano(count: int, more: int, flips: list[tuple[int, int]]) -> None:
    """Whatever is not what encode writes gives −1 throughout, and alike in each backend."""
    space = count + more
    buffer = kernels.elias_fano_encode.reference(_indices(count, space, more), space)
    for place, bit in flips:
        buffer[place % buffer.numel()] ^= 1 << bit
    (found,) = kernels.elias_fano_decode.reference(buffer[None], count, space)
    assert torch.equal(kernels.elias_fano_decode.cpu(buffer[None], count, space)[0], found)
    if int(found[0]) < 0:
        assert bool((found == -1).all())
    else:
        assert torch.equal(kernels.elias_fano_encode.reference(found, space), buffer)


@given(st.binary(min_size=16, max_size=16))
@settings(max_examples=200)
def test_any_bytes_may_be_elias_fano(noise: bytes) -> None:
    buffer = torch.tensor(list(noise), dtype=torch.uint8)
    for count, space in ((20, 100), (3, 60_000)):  # 8 bytes of low bits and 8 of high parts; and with few of each
        assert EliasFano.of(count, space).nbytes == 16
        found = [kernels.elias_fano_decode.on(backend)(buffer[None], count, space) for backend in BACKENDS]
        assert torch.equal(*found)


# Each width is a loop of its own, which takes a second to compile.
@pytest.mark.grid
@pytest.mark.parametrize("bits", [pytest.param(n, marks=[pytest.mark.slow] * (n not in EDGES)) for n in range(1, 32)])
@pytest.mark.parametrize("numel", [0, 1, 31, 33, 1000])
def test_bits_of_every_width(bits: int, numel: int) -> None:
    for dtype, most in WIDTHS.items():
        if bits <= most:
            _check_bits(bits, torch.randint(2**bits, (numel,), dtype=torch.int64).to(dtype))


def test_bits_in_several_ranges() -> None:
    for bits in (1, 11, 31):
        _check_bits(bits, torch.randint(2**bits, (3 * (1 << 18) + 17,), dtype=torch.int64).to(torch.int32))


def _check_bits(bits: int, codes: Tensor) -> None:
    packed = kernels.pack_bits.reference(codes, bits)
    assert packed.numel() == -(-codes.numel() * bits // 8)
    longer = torch.cat([packed, torch.full((5,), 255, dtype=torch.uint8)])
    for backend in BACKENDS:
        assert torch.equal(kernels.pack_bits.on(backend)(codes, bits), packed)
        assert torch.equal(kernels.unpack_bits.on(backend)(packed, codes.numel(), bits, codes.dtype), codes)
        assert torch.equal(kernels.unpack_bits.on(backend)(longer, codes.numel(), bits, codes.dtype), codes)


def test_only_the_low_bits_are_packed() -> None:
    codes = torch.tensor([0b101, 0b011, 0b110], dtype=torch.int32)
    for backend in BACKENDS:
        assert kernels.pack_bits.on(backend)(codes | ~0b111, 3).tolist() == [0b10_011_101, 0b1]
        assert kernels.pack_bits.on(backend)(torch.tensor([-1, 256 + 7], dtype=torch.int32), 8).tolist() == [255, 7]
