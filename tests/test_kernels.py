"""Every backend does what the reference does, on awkward shapes, in poisoned memory."""

from collections.abc import Callable

import pytest
import torch
from cases import vector
from torch import Tensor

from thinwire.kernels import backend, cpu, integer_backend, reference

INPUTS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "empty": lambda dtype: torch.empty(0, dtype=dtype),
    "one": lambda dtype: vector(1, dtype=dtype),
    "63": lambda dtype: vector(63, dtype=dtype),
    "64": lambda dtype: vector(64, dtype=dtype),
    "1000": lambda dtype: vector(1000, dtype=dtype),
    "several ranges": lambda dtype: vector(3 * (1 << 18) + 17, dtype=dtype),
    "zeros": lambda dtype: torch.zeros(1000, dtype=dtype),
    "negative zeros": lambda dtype: torch.full((100,), -0.0, dtype=dtype),
    "equal": lambda dtype: torch.ones(1000, dtype=dtype),
    "one NaN": lambda dtype: vector(1000, dtype=dtype).index_fill(0, torch.tensor([501]), torch.nan),
    "one Inf": lambda dtype: vector(1000, dtype=dtype).index_fill(0, torch.tensor([999]), -torch.inf),
    "denormal": lambda dtype: torch.full((100,), torch.finfo(dtype).tiny / 4, dtype=dtype),
}
inputs = pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def _poison(like: Tensor) -> Tensor:
    return torch.full_like(like, torch.nan)


def _same(found: Tensor | None, expected: Tensor | None) -> bool:
    return found is expected if found is None or expected is None else torch.equal(found, expected)


def _threshold(x: Tensor) -> float:
    finite = x[x.isfinite()].abs()
    return float(finite.quantile(0.9)) if finite.numel() and finite.numel() < 2**20 else 0.5


@inputs
@dtypes
def test_select(make: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> None:
    x = make(dtype)
    for threshold in (0.0, _threshold(x), float("inf")):
        for capacity in (0, 10, x.numel()):
            assert _same(cpu.select(x, threshold, capacity), reference.select(x, threshold, capacity))


@inputs
@dtypes
def test_accumulate_select(make: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> None:
    gradient = make(dtype)
    residual = vector(gradient.numel(), seed=1, dtype=dtype)
    out, expected = _poison(gradient), _poison(gradient)
    args = (residual, gradient, 0.25, _threshold(gradient), gradient.numel())
    indices = cpu.accumulate_select(out, *args)
    assert _same(indices, reference.accumulate_select(expected, *args))
    torch.testing.assert_close(out, expected, equal_nan=True)


@inputs
@dtypes
@pytest.mark.parametrize("nesterov", [False, True])
def test_accumulate_momentum_select(make: Callable[[torch.dtype], Tensor], dtype: torch.dtype, nesterov: bool) -> None:
    gradient = make(dtype)
    residual, velocity = (vector(gradient.numel(), seed=seed, dtype=dtype) for seed in (1, 2))
    found, expected = ((_poison(gradient), _poison(gradient)) for _ in range(2))
    args = (residual, velocity, gradient, 0.25, 0.5, nesterov, _threshold(gradient), gradient.numel())
    indices = cpu.accumulate_momentum_select(found[0], found[1], *args)
    assert _same(indices, reference.accumulate_momentum_select(expected[0], expected[1], *args))
    torch.testing.assert_close(found, expected, equal_nan=True)


@inputs
def test_accumulate_select_against_float64(make: Callable[[torch.dtype], Tensor]) -> None:
    gradient = make(torch.float32)
    residual = vector(gradient.numel(), seed=1)
    out = _poison(gradient)
    cpu.accumulate_select(out, residual, gradient, 1 / 3, 1.0, gradient.numel())
    expected = residual.double() + gradient.double() / 3
    torch.testing.assert_close(out.double(), expected, equal_nan=True, rtol=1e-6, atol=1e-7)


def test_more_than_the_capacity_is_told() -> None:
    x = torch.ones(1000)
    assert cpu.select(x, 1.0, 999) is None
    assert reference.select(x, 1.0, 999) is None
    assert cpu.select(x, 1.0, 1000) is not None


@dtypes
def test_scatter_add(dtype: torch.dtype) -> None:
    indices = torch.tensor([0, 3, 0, 2, 3, 3], dtype=torch.int32)
    values = vector(6, dtype=dtype)
    found, expected = torch.zeros(5, dtype=dtype), torch.zeros(5, dtype=dtype)
    cpu.scatter_add(found, indices, values, (2, 2, 1, 1))
    reference.scatter_add(expected, indices, values, (2, 2, 1, 1))
    assert torch.equal(found, expected)
    assert found[0] == values[0] + values[2]


def test_mix_is_one_to_one_and_changes_with_the_seed() -> None:
    indices = torch.arange(1 << 16, dtype=torch.int32)
    assert reference.mix(indices, 1).unique().numel() == indices.numel()
    assert not torch.equal(reference.mix(indices, 1), reference.mix(indices, 2))
    assert int(reference.mix(indices, 3).min()) >= 0
    assert int(reference.mix(indices, 3).max()) < 1 << 32


@pytest.mark.parametrize("slots", [1, 7, 1000, 100_000])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**63])
def test_hashed_slots(slots: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 2**32)
    for indices in (torch.empty(0, dtype=torch.int32), torch.randperm(5000, generator=generator).int() * 400_000):
        priorities = torch.randint(0, 2**31 - 1, indices.shape, generator=generator, dtype=torch.int32)
        args = (indices, priorities, slots, seed)
        assert torch.equal(cpu.hashed_slots(*args), reference.hashed_slots(*args))


@pytest.mark.parametrize("ties", [False, True])
def test_the_highest_priority_keeps_its_slot_and_of_equals_the_largest_index(ties: bool) -> None:
    indices = torch.arange(1024, dtype=torch.int32)
    priorities = torch.zeros_like(indices) if ties else indices.flip(0).contiguous()
    slot = (reference.mix(indices, 7) * 100) >> 32
    table = reference.hashed_slots(indices, priorities, 100, 7)
    for place, winner in enumerate(table.tolist()):
        writers = indices[slot == place].tolist()
        assert winner == ((max(writers) if ties else min(writers)) if writers else -1)


@pytest.mark.parametrize(("slots", "mean", "deviation"), [(1024, 0.36770, 0.00974), (512, 0.13507, 0.01253)])
def test_share_of_empty_slots_is_that_of_independent_hashes(slots: int, mean: float, deviation: float) -> None:
    """DRAGONN's Lemma A.10, for 1024 writers."""
    indices = torch.arange(1024, dtype=torch.int32)
    empty = [float((reference.hashed_slots(indices, indices, slots, seed) < 0).double().mean()) for seed in range(300)]
    assert all(abs(share - mean) < 5 * deviation for share in empty)
    assert abs(sum(empty) / 300 - mean) < 4 * deviation / 300**0.5


def test_backend_by_dtype_and_layout() -> None:
    x = torch.ones(10)
    assert backend(x, x) is cpu
    assert backend(x.double()) is cpu
    assert backend(x[::2]) is reference
    assert backend(x.bfloat16()) is reference
    assert backend(x, x.double()) is reference


@pytest.mark.parametrize("bits", range(1, 16))
@pytest.mark.parametrize("numel", [0, 1, 7, 31, 32, 33, 63, 1000, 2 * (1 << 18) + 17])
def test_pack_and_unpack_bits(bits: int, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    codes = torch.randint(0, 2**bits, (numel,), generator=generator, dtype=torch.int16)
    packed = reference.pack_bits(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.numel() == -(-numel * bits // 8)
    assert torch.equal(cpu.pack_bits(codes, bits), packed)
    for kernels in (cpu, reference):
        assert torch.equal(kernels.unpack_bits(packed, numel, bits), codes)
    if numel * bits % 8:
        assert int(packed[-1]) >> numel * bits % 8 == 0


def test_packing_puts_the_least_significant_bit_first() -> None:
    codes = torch.tensor([0b101, 0b011, 0b110], dtype=torch.int16)
    for kernels in (cpu, reference):
        assert kernels.pack_bits(codes, 3).tolist() == [0b10_011_101, 0b1]
        assert kernels.pack_bits(codes | ~0b111, 3).tolist() == [0b10_011_101, 0b1], "only the low bits travel"


def test_integer_backend_by_layout() -> None:
    codes = torch.zeros(10, dtype=torch.int16)
    assert integer_backend(codes) is cpu
    assert integer_backend(codes[::2]) is reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("sizes", [(0,), (1,), (0, 0), (63, 1000), (1000, 0, 63), (7, 7, 7, 7)])
def test_merging_tables(sizes: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(sum(sizes))
    keys = [torch.randint(0, 500, (n,), dtype=torch.int32) for n in sizes]
    rows = [torch.randn(n, width, dtype=dtype) for n in sizes]
    for ks in (keys, [key.sort().values for key in keys]):  # with repeats, in any order and ascending
        dense = torch.zeros(500, width, dtype=torch.float64)
        for key, row in zip(ks, rows, strict=True):
            dense.index_add_(0, key, row.double())
        for kernels in (reference, cpu):
            found, sums = kernels.merge(ks, rows)
            assert found.dtype == torch.int32
            assert torch.equal(found.long(), torch.cat(ks).unique())
            torch.testing.assert_close(sums.double(), dense[found.long()], rtol=1e-5, atol=1e-5)


def test_merging_keeps_what_is_not_finite_and_adds_in_order() -> None:
    keys = [torch.tensor([3], dtype=torch.int32)] * 3
    rows = [torch.tensor([[x]]) for x in (1.0, 1e8, -1e8)]
    for kernels in (reference, cpu):
        assert kernels.merge(keys, rows)[1].tolist() == [[0.0]], "(1 + 1e8) - 1e8 in float32"
        assert bool(kernels.merge(keys[:2], [rows[0], rows[1] * torch.inf])[1].isinf())
