"""Every backend does what the reference does, on awkward shapes, in poisoned memory."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from inspect import signature
from typing import Any

import pytest
import torch
from cases import MOMENTA, SUMS, joined, summed, vector
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import Kernel, Picks, Slotted, Sum
from thinwire.kernels.blocks import cpu as blocks_cpu
from thinwire.kernels.dispatch import Backend
from thinwire.kernels.hashing.reference import index_of, slot_of
from thinwire.kernels.ranges import map_ranges
from thinwire.kernels.select import cpu as select_cpu
from thinwire.kernels.select.cpu import STREAM_BYTES
from thinwire.kernels.sums import How

pytestmark = pytest.mark.usefixtures("two_threads")

BACKENDS: tuple[Backend, ...] = ("cpu", "reference")
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


def _same(found: Picks, expected: Picks) -> bool:
    return torch.equal(found.indices, expected.indices) and torch.allclose(found.peak, expected.peak, equal_nan=True)


def _threshold(x: Tensor) -> Tensor:
    finite = x[x.isfinite()].abs()
    return finite.quantile(0.9) if finite.numel() and finite.numel() < 2**20 else torch.tensor(0.5)


@pytest.mark.grid
@inputs
@dtypes
def test_select(make: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> None:
    x = make(dtype)
    for threshold in (torch.tensor(0.0), _threshold(x), torch.tensor(torch.inf), torch.tensor(torch.nan)):
        for capacity in (0, 10, x.numel() // 8, x.numel()):
            args = (x, threshold, min(capacity, x.numel()))
            assert _same(kernels.select.cpu(*args), kernels.select.reference(*args))


@pytest.mark.grid
@inputs
@dtypes
@pytest.mark.parametrize("few", [1 << 20, 100])
def test_largest(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[torch.dtype], Tensor], dtype: torch.dtype, few: int
) -> None:
    monkeypatch.setattr(select_cpu, "FEW", few)
    x = make(dtype)
    for share in (0, 1e-3, 0.1, 0.3, 1):
        k = round(share * x.numel())
        found = kernels.largest.cpu(x, k)
        assert torch.equal(found, kernels.largest.reference(x, k))
        assert found.dtype == torch.int32
        if k:
            assert torch.equal(found, found.unique()), "ascending, each once"


def test_largest_where_a_sample_misleads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large values where no sample looks, and fewer values than wanted that are not zero."""
    monkeypatch.setattr(select_cpu, "FEW", 1000)
    x = torch.zeros(1 << 18)
    x[1 : 4 * 2000 : 4] = torch.linspace(1, 2, 2000)
    for k in (1, 500, 2000, 3000):
        assert torch.equal(kernels.largest.cpu(x, k), kernels.largest.reference(x, k))


@pytest.mark.grid
@inputs
@dtypes
@pytest.mark.parametrize("how", SUMS)
def test_sums_and_what_is_picked_from_them(make: Callable[[torch.dtype], Tensor], dtype: torch.dtype, how: How) -> None:
    gradient = make(dtype)
    plain, found, expected = (summed(how, gradient) for _ in range(3))
    args = (_threshold(gradient), gradient.numel())
    kernels.accumulate.cpu(plain)
    picks = kernels.accumulate_select.cpu(found, *args)
    assert _same(picks, kernels.accumulate_select.reference(expected, *args))
    near: Any = {"rtol": 0, "atol": 0} if how == "rounded" else {}
    for each in (plain, found):
        torch.testing.assert_close(each.outs, expected.outs, equal_nan=True, **near)
        torch.testing.assert_close(each.moving or [], expected.moving or [], equal_nan=True)
    assert torch.equal(picks.values.nan_to_num(), found.outs[0][picks.indices].nan_to_num()), "to the bit"


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("how", SUMS)
def test_sums_are_those_of_float64(name: str, how: How) -> None:
    gradient = INPUTS[name](torch.float32)
    found, (exact, moving) = summed(how, gradient), _in_float64(how, gradient)
    kernels.accumulate_select.cpu(found, torch.tensor(1.0), gradient.numel())
    relative = 2**-7 if how == "rounded" else 1e-6  # off by less than one unit in the last place
    torch.testing.assert_close(found.outs[0].double(), exact, equal_nan=True, rtol=relative, atol=1e-6)
    for each in found.moving or ():
        torch.testing.assert_close(each.double(), moving, equal_nan=True, rtol=1e-6, atol=1e-6)


def _in_float64(how: How, gradient: Tensor) -> tuple[Tensor, Tensor]:
    sums = summed(how, gradient)
    residual, new = sums.residuals[0].double(), gradient.double() / 3
    if sums.velocities is None:
        return (residual if sums.decays is None else 0.9 * residual) + new, new
    moving = 0.9 * sums.velocities[0].double() + new
    return residual + (new + 0.9 * moving if how == "nesterov" else moving), moving


@dtypes
@pytest.mark.parametrize("how", SUMS)
def test_several_sums_are_those_of_each(how: How, dtype: torch.dtype) -> None:
    lengths = (300, 0, 1, 5000, 64)
    draws = [kernels.Draw(min(n, 2), 3, rank=n // 30, capacity=min(n, 20), first=n, last=7) for n in lengths]
    each = [summed(how, vector(n, n, dtype)) for n in lengths]
    plain, found, expected = (joined(each) for _ in range(3))
    kernels.accumulate.cpu(plain)
    picks = kernels.accumulate_sampled_select.cpu(found, draws)
    wanted = kernels.accumulate_sampled_select.reference(expected, draws)
    alone = [kernels.accumulate_sampled_select.cpu(one, [draw]) for one, draw in zip(each, draws, strict=True)]
    for sums in (plain, found):
        torch.testing.assert_close(sums.outs, expected.outs)
        torch.testing.assert_close(sums.moving or [], expected.moving or [])
    assert picks.carried == wanted.carried
    for mine, others, parts in zip(picks[:2], wanted[:2], zip(*(one[:2] for one in alone), strict=True), strict=True):
        torch.testing.assert_close(mine, others)
        assert torch.equal(mine, torch.cat(parts))


@pytest.mark.grid
@pytest.mark.parametrize("how", ["sum", "fading", *MOMENTA])
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_large_tensors_are_streamed_and_unaligned_ones_not(shift: int, how: How) -> None:
    d = STREAM_BYTES // 4 + 77
    rooms = []

    def framed(x: Tensor) -> Tensor:
        rooms.append(torch.full((d + 51,), torch.nan))
        return rooms[-1][shift : shift + d].copy_(x)

    found, expected = summed(how, vector(d), frame=framed), summed(how, vector(d))
    picks = kernels.accumulate_select.cpu(found, torch.tensor(3.0), d)
    assert _same(picks, kernels.accumulate_select.reference(expected, torch.tensor(3.0), d))
    torch.testing.assert_close(found.outs, expected.outs)
    torch.testing.assert_close(found.moving or [], expected.moving or [])
    assert torch.equal(picks.values, found.outs[0][picks.indices])
    kernels.scatter.cpu(found.outs[0], [(0, d)], picks.indices, picks.values, [picks.indices.numel()])
    assert torch.equal(found.outs[0], torch.zeros(d).index_copy(0, picks.indices.long(), picks.values))
    assert all(int(room.isnan().sum()) == 51 for room in rooms)


def test_more_than_the_capacity_gives_the_largest_and_of_equals_the_first() -> None:
    x = torch.ones(1000)
    x[990] = 2
    for backend in BACKENDS:
        assert kernels.select.on(backend)(x, torch.tensor(1.0), 3).indices.tolist() == [0, 1, 990]


@dtypes
def test_scatter_add(dtype: torch.dtype) -> None:
    indices = torch.tensor([0, 3, 0, 2, 3, 3], dtype=torch.int32)
    values = vector(6, dtype=dtype)
    found, expected = torch.zeros(5, dtype=dtype), torch.zeros(5, dtype=dtype)
    kernels.scatter_add.cpu([found], [0], indices, values, (2, 2, 1, 1))
    kernels.scatter_add.reference([expected], [0], indices, values, (2, 2, 1, 1))
    assert torch.equal(found, expected)
    assert found[0] == values[0] + values[2]


@pytest.mark.grid
@dtypes
@pytest.mark.parametrize("numel", [1, 63, 5000, (1 << 19) + 5])
@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("runs", [1, 5])
def test_scatter(dtype: torch.dtype, numel: int, ascending: bool, runs: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    some = [torch.randperm(numel, generator=generator)[: -(-numel // 20)].int() for _ in range(runs)]
    indices = torch.cat([part.sort().values if ascending else part for part in some])
    values = vector(indices.numel(), dtype=dtype)
    lengths = [part.numel() for part in some]
    found, expected = (torch.full((numel,), torch.nan, dtype=dtype) for _ in range(2))
    kernels.scatter.cpu(found, [(0, numel)], indices, values, lengths)
    kernels.scatter.reference(expected, [(0, numel)], indices, values, lengths)
    assert torch.equal(found, expected), "the same order of summation gives the same bits"


@dtypes
def test_mask(dtype: torch.dtype) -> None:
    indices, values = torch.tensor([0, 4, 2, 4], dtype=torch.int32), torch.tensor([1.0, 0.0, torch.nan, 0.0])
    for backend in BACKENDS:
        x = torch.ones(5, dtype=dtype)
        kernels.scatter_add.on(backend)((), [0], indices, values, [4], masked=[x])
        assert x.tolist() == [0, 1, 0, 1, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_belong_to_one_vector_after_another(backend: Backend) -> None:
    indices, values = torch.tensor([7, 1, 8, 7, 2], dtype=torch.int32), torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    outs, masked = ([torch.full((3,), x) for _ in range(2)] for x in (0.0, 1.0))
    kernels.scatter_add.on(backend)(outs, [7, 0], indices, values, (1, 1, 2, 1), -1.0, masked)
    assert [out.tolist() for out in outs] == [[-9.0, -4.0, 0.0], [0.0, -2.0, -16.0]]
    assert [x.tolist() for x in masked] == [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]


def test_scatter_writes_its_spans_only() -> None:
    regions, runs = [(2, 3), (5, 4), (12, 2)], [1, 2, 1, 1, 2, 1]
    indices = torch.tensor([3, 5, 8, 12, 2, 5, 8, 13], dtype=torch.int32)
    for backend in BACKENDS:
        out = torch.full((15,), torch.nan)
        kernels.scatter.on(backend)(out, regions, indices, torch.ones(8), runs)
        assert out[2:9].tolist() == [1, 1, 0, 2, 0, 0, 2]
        assert out[12:14].tolist() == [1, 1]
        assert bool(out[[0, 1, 9, 10, 11, 14]].isnan().all())


@pytest.mark.grid
@dtypes
@pytest.mark.parametrize("width", [1, 2, 32, 1000])
@pytest.mark.parametrize("numel", [0, 1, 63, 1000, (1 << 19) + 5])
def test_block_energies(dtype: torch.dtype, numel: int, width: int) -> None:
    x = vector(numel, dtype=dtype)
    energies = kernels.block_energies.reference(x, width)
    torch.testing.assert_close(kernels.block_energies.cpu(x, width), energies, rtol=1e-5, atol=1e-6)


@pytest.mark.grid
@dtypes
@pytest.mark.parametrize(("numel", "width"), [(0, 2), (1, 2), (1001, 2), (1001, 8), ((1 << 19) + 514, 2), (1 << 18, 7)])
def test_largest_blocks(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, numel: int, width: int) -> None:
    """Sums taken in another order may rank near-equal blocks otherwise: integers have none."""
    monkeypatch.setattr(blocks_cpu, "FEW", 1000)
    monkeypatch.setattr(select_cpu, "FEW", 1000)
    x = torch.randint(-3, 4, (numel,), generator=torch.Generator().manual_seed(0)).to(dtype)
    if numel > 5:
        x[[3, -1]] = torch.tensor([torch.nan, 50.0], dtype=dtype)
    blocks = -(-numel // width)
    for share in (0, 0.001, 0.15, 1):
        k = round(share * blocks)
        assert torch.equal(kernels.largest_blocks.cpu(x, width, k), kernels.largest_blocks.reference(x, width, k))


ROWS = [(0, 1), (0, 7), (1, 1), (5, 1), (1, 63), (9, 64), (3, 1000), (701, 500), (2, 1 << 16)]
"""Rows, and how wide they are: the last two make several ranges."""


@pytest.mark.grid
@dtypes
@pytest.mark.parametrize(("rows", "width"), ROWS)
def test_largest_in_rows(dtype: torch.dtype, rows: int, width: int) -> None:
    room = torch.full((rows * width + 128,), torch.nan, dtype=dtype)
    x = room[64 : 64 + rows * width]
    smooth = vector(x.numel(), dtype=dtype)
    odd = smooth.clone()
    odd[width // 2 :: width], odd[-2:] = torch.nan, torch.inf
    near = torch.ones_like(x) + (smooth > 0) * torch.finfo(dtype).eps  # alike but for the last bit
    for content in (smooth, smooth.round(), torch.zeros_like(x), -torch.zeros_like(x), odd, near):
        x.copy_(content)
        for k in {0, 1, width // 3, width - 1, width}:
            found = kernels.largest_in_rows.cpu(x, width, k)
            assert found.dtype == torch.int32
            assert torch.equal(found, kernels.largest_in_rows.reference(x, width, k))


def test_the_largest_of_each_row_are_those_of_python() -> None:
    x = vector(7 * 40).round()
    x[45], x[130] = torch.nan, -torch.inf
    for k in (1, 5, 40):
        expected = []
        for row in range(7):
            ranks = [
                (-(torch.inf if value != value else abs(value)), value == value, i)
                for i, value in enumerate(x[40 * row : 40 * row + 40].tolist())
            ]
            expected += sorted(40 * row + i for _, _, i in sorted(ranks)[:k])
        for backend in BACKENDS:
            assert kernels.largest_in_rows.on(backend)(x, 40, k).tolist() == expected


def test_mix_is_one_to_one_and_changes_with_the_seed() -> None:
    indices = torch.arange(1 << 16, dtype=torch.int32)
    assert kernels.mix(indices, 1).unique().numel() == indices.numel()
    assert not torch.equal(kernels.mix(indices, 1), kernels.mix(indices, 2))
    assert int(kernels.mix(indices, 3).min()) >= 0
    assert int(kernels.mix(indices, 3).max()) < 1 << 32


@pytest.mark.grid
@pytest.mark.parametrize("slots", [1, 7, 1000, 100_000])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**63])
def test_hashed_slots(slots: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 2**32)
    x = torch.randn(200_000, generator=generator)
    for indices in (torch.empty(0, dtype=torch.int32), torch.randperm(5000, generator=generator).int() * 40):
        priorities = torch.randint(0, 2**31 - 1, indices.shape, generator=generator, dtype=torch.int32)
        for picks in (indices, torch.nn.functional.pad(indices, (0, 3), value=-1)):
            args = (picks, torch.nn.functional.pad(priorities, (0, picks.numel() - indices.numel())), [picks.numel()])
            found, expected = (
                call([x], *args, [slots], [seed], [(7, 200_000)])
                for call in (kernels.hashed_slots_of_each.cpu, kernels.hashed_slots_of_each.reference)
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.grid
@pytest.mark.parametrize(("numel", "slots"), [(1, 1), (2, 2), (1000, 1), (1000, 7), (1000, 999), (65_537, 66)])
@pytest.mark.parametrize("seed", [0, 5, 2**63])
def test_slot_and_quotient_tell_the_index(numel: int, slots: int, seed: int) -> None:
    indices = torch.arange(numel, dtype=torch.int32)
    slot, quotient = slot_of(indices, slots, numel, seed)
    assert 0 <= int(slot.min()) <= int(slot.max()) < slots
    assert 0 <= int(quotient.min()) <= int(quotient.max()) < -(-numel // slots)
    assert torch.equal(index_of(slot, quotient, slots, numel, seed), indices.long())


@pytest.mark.parametrize(("numel", "slots"), [(1, 1), (1000, 10), (1000, 1000), (65_537, 66), (1 << 20, 9000)])
def test_codes_of_slots_tell_the_indices(numel: int, slots: int) -> None:
    picks = torch.randperm(numel)[: 2 * slots].int()
    table = kernels.hashed_slots(picks, torch.zeros_like(picks), slots, numel, 3)
    indices, parts, seeds = table.masked_fill(table < 0, numel - 1), [Slotted(5, numel, slots)], torch.tensor([3])
    packed, _ = kernels.slots_encode.reference(indices + 5, parts, seeds)
    anything = torch.randint(256, (2, packed.numel()), dtype=torch.uint8)
    expected = kernels.slots_decode.reference(anything, parts, seeds.expand(2, 1))
    assert -1 <= int(expected.min()) <= int(expected.max()) < numel + 5
    for backend in BACKENDS:
        encode, decode = kernels.slots_encode.on(backend), kernels.slots_decode.on(backend)
        codes, misplaced = encode(indices + 5, parts, seeds)
        assert torch.equal(codes, packed)
        assert not int(misplaced)
        assert torch.equal(decode(packed[None], parts, seeds[None])[0], indices + 5)
        assert torch.equal(decode(anything, parts, seeds.expand(2, 1)), expected)
        for given in (expected[0], torch.full_like(indices, 2**31 - 1), torch.full_like(indices, -(2**31))):
            found, wanted = (call(given, parts, seeds) for call in (encode, kernels.slots_encode.reference))
            assert int(found[1]) == int(wanted[1])
        assert slots == 1 or int(encode((indices + 5).roll(1), parts, seeds)[1]), "out of order"


@pytest.mark.parametrize("ties", [False, True])
def test_the_highest_priority_keeps_its_slot_and_of_equals_the_largest_index(ties: bool) -> None:
    indices = torch.arange(1024, dtype=torch.int32)
    priorities = torch.zeros_like(indices) if ties else indices.flip(0).contiguous()
    slot, _ = slot_of(indices, 100, 1_000_000, 7)
    table = kernels.hashed_slots(indices, priorities, 100, 1_000_000, 7)
    for place, winner in enumerate(table.tolist()):
        writers = indices[slot == place].tolist()
        assert winner == ((max(writers) if ties else min(writers)) if writers else -1)


@pytest.mark.parametrize(("slots", "mean", "deviation"), [(1024, 0.36770, 0.00974), (512, 0.13507, 0.01253)])
def test_share_of_empty_slots_is_that_of_independent_hashes(slots: int, mean: float, deviation: float) -> None:
    """DRAGONN's Lemma A.10, for 1024 writers."""
    indices = torch.arange(1024, dtype=torch.int32)
    tables = [kernels.hashed_slots(indices, indices, slots, 126_720_000, seed) for seed in range(300)]
    empty = [float((table < 0).double().mean()) for table in tables]
    assert all(abs(share - mean) < 5 * deviation for share in empty)
    assert abs(sum(empty) / 300 - mean) < 4 * deviation / 300**0.5


def test_backend_by_dtype_and_layout() -> None:
    x, backend = torch.ones(10), kernels.select.backend
    assert backend(x, x[0], 1) == "cpu"
    assert backend(x.double(), x[0].double(), 1) == "cpu"
    assert backend(x[::2], x[0], 1) == "reference"
    assert backend(x.bfloat16(), x[0].bfloat16(), 1) == "reference"
    assert kernels.row_sums.backend(x.view(2, 5)) == "cpu"
    assert kernels.peak_of_each.backend([x, x.double()]) == "reference"


@pytest.mark.grid
@pytest.mark.parametrize("bits", range(1, 16))
@pytest.mark.parametrize("numel", [0, 1, 7, 31, 32, 33, 63, 1000, 2 * (1 << 18) + 17])
def test_pack_and_unpack_bits(bits: int, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    codes = torch.randint(0, 2**bits, (numel,), generator=generator, dtype=torch.int16)
    packed = kernels.pack_bits.reference(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.numel() == -(-numel * bits // 8)
    assert torch.equal(kernels.pack_bits.cpu(codes, bits), packed)
    for backend in BACKENDS:
        assert torch.equal(kernels.unpack_bits.on(backend)(packed, numel, bits), codes)
    if numel * bits % 8:
        assert int(packed[-1]) >> numel * bits % 8 == 0


def test_packing_puts_the_least_significant_bit_first() -> None:
    codes = torch.tensor([0b101, 0b011, 0b110], dtype=torch.int16)
    for backend in BACKENDS:
        assert kernels.pack_bits.on(backend)(codes, 3).tolist() == [0b10_011_101, 0b1]
        assert kernels.pack_bits.on(backend)(codes | ~0b111, 3).tolist() == [0b10_011_101, 0b1], (
            "only the low bits travel"
        )


def test_backend_of_codes_by_layout() -> None:
    codes = torch.zeros(10, dtype=torch.int16)
    assert kernels.pack_bits.backend(codes, 1) == "cpu"
    assert kernels.pack_bits.backend(codes[::2], 1) == "reference"


def test_a_kernel_looks_at_the_tensors_that_it_names() -> None:
    x, threshold = torch.ones(10), torch.tensor(1.0)
    half, apart = x.bfloat16(), torch.ones(20)[::2]
    assert kernels.accumulate.backend(Sum([x], [x], [half], [1.0])) == "cpu", "gradients may be widened"
    assert kernels.accumulate.backend(Sum([half], [half], [half], [1.0])) == "reference"
    assert kernels.accumulate.backend(Sum([half], [half], [x], [1.0], seeds=[0])) == "cpu"
    assert kernels.accumulate.backend(Sum([half], [half], [apart], [1.0], seeds=[0])) == "reference"
    assert kernels.accumulate.backend(Sum([x], [x], [x], [1.0], moving=[x], velocities=[apart])) == "reference"
    assert kernels.select.backend(threshold=threshold, capacity=3, x=apart) == "reference"
    keys = torch.arange(10, dtype=torch.int32)
    assert kernels.merge.backend([keys, keys], [x, x]) == "cpu"
    assert kernels.merge.backend([keys, keys], [x, x.double()]) == "reference"
    assert kernels.scatter_add.backend((), [0], keys, x, [10], masked=[x]) == "cpu"
    assert kernels.scatter_add.backend([x], [0], keys, x, [10], 1.0, [apart]) == "reference"
    rows = torch.zeros(3, 32, dtype=torch.uint8)
    assert kernels.elias_fano_decode.backend(rows[:, :16], 2, 5) == "cpu", "each row is contiguous"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_runs_what_suits_its_tensors(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    x, found = torch.ones(20), torch.tensor([7], dtype=torch.int32)
    monkeypatch.setattr(kernels.largest, backend, lambda x, k: found)
    assert kernels.largest(x if backend == "cpu" else x[::2], 3) is found


def test_implementations_have_the_signature_of_the_reference() -> None:
    """Static checks see those of the CPU; Triton's are imported late, which hides them."""
    every = [kernel for kernel in vars(kernels).values() if isinstance(kernel, Kernel)]
    assert len(every) > 30
    for kernel in every:
        assert signature(kernel) == signature(kernel.reference)
        assert signature(kernel.cpu) == signature(kernel.reference)
        if find_spec("triton"):
            assert signature(kernel.gpu) == signature(kernel.reference)
        assert kernel.__doc__ == kernel.reference.__doc__


@pytest.mark.grid
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
        for backend in BACKENDS:
            found, sums = kernels.merge.on(backend)(ks, rows)
            assert found.dtype == torch.int32
            assert torch.equal(found.long(), torch.cat(ks).unique())
            torch.testing.assert_close(sums.double(), dense[found.long()], rtol=1e-5, atol=1e-5)


def test_merging_keeps_what_is_not_finite_and_adds_in_order() -> None:
    keys = [torch.tensor([3], dtype=torch.int32)] * 3
    rows = [torch.tensor([[x]]) for x in (1.0, 1e8, -1e8)]
    for backend in BACKENDS:
        assert kernels.merge.on(backend)(keys, rows)[1].tolist() == [[0.0]], "(1 + 1e8) - 1e8 in float32"
        assert bool(kernels.merge.on(backend)(keys[:2], [rows[0], rows[1] * torch.inf])[1].isinf())


def _work(seed: int) -> list[Tensor]:
    d = (1 << 19) + 77
    residual, gradient, out = vector(d, seed=seed), vector(d, seed=seed + 1), torch.empty(d)
    picks = kernels.accumulate_select.cpu(Sum([out], [residual], [gradient], [0.5]), torch.tensor(2.0), d)
    total = torch.empty(d)
    kernels.scatter.cpu(total, [(0, d)], picks.indices, picks.values, [picks.indices.numel()])
    return [out, *picks, total, kernels.largest.cpu(out, d // 3)]


def test_several_threads_at_once() -> None:
    expected = [_work(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(_work, range(6)))
    for ours, alone in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, alone))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    ranges = map_ranges(lambda lo, hi: (lo, hi), 1 << 20)
    child = os.fork()
    if not child:
        os._exit(0 if map_ranges(lambda lo, hi: (lo, hi), 1 << 20) == ranges else 1)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0), "the child hangs"


def test_more_than_there_are_is_all() -> None:
    for backend in BACKENDS:
        assert kernels.largest.on(backend)(torch.tensor([1.0, -3.0, 2.0]), 5).tolist() == [0, 1, 2]


def test_pairs_end_with_the_vector() -> None:
    beyond = torch.ones(1002)
    beyond[1001] = torch.nan
    assert bool(kernels.block_energies.cpu(beyond[:1001], 2).isfinite().all())


def test_a_nan_that_is_nearly_an_infinity_stays_one() -> None:
    nan = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    for backend in BACKENDS:
        out = torch.zeros(1, dtype=torch.bfloat16)
        kernels.accumulate.on(backend)(Sum([out], [out.clone()], [nan], [1.0], seeds=[3]))
        assert bool(out.isnan())


@pytest.mark.parametrize("place", [0, 30, 62])
@pytest.mark.parametrize("value", [-9.0, torch.inf, -torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_peak_of_each_vector(dtype: torch.dtype, value: float, place: int) -> None:
    xs = [vector(n, dtype=dtype) for n in (100, 63, 0, 1)]
    xs[1][place] = value
    found, expected = (kernels.peak_of_each.on(backend)(xs) for backend in BACKENDS)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert kernels.peak_of_each.backend(xs) == "cpu"
    assert [float(x.abs().max()) for x in (xs[0], xs[3])] == [float(found[0]), float(found[3])]
    assert float(found[1].abs()) == abs(value) or found[1].isnan() == (value != value)
