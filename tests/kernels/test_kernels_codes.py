"""Every backend writes the codes, numbers and sketches of the reference, over whatever was in memory before."""

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import get_args

import pytest
import torch
from cases import vector
from torch import Tensor

from thinwire import kernels
from thinwire.formats import Levels, OffsetFloat, Sign, Ternary
from thinwire.kernels import OffsetGrid, Rounding, UniformGrid
from thinwire.kernels.codes.reference import How
from thinwire.kernels.dispatch import Backend
from thinwire.kernels.memory import empty

pytestmark = pytest.mark.usefixtures("two_threads")

BACKENDS: tuple[Backend, ...] = ("cpu", "reference")

SEVERAL_RANGES = 2 * (1 << 18) + 17
INPUTS: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(0),
    "one": lambda: vector(1),
    "63": lambda: vector(63),
    "1000": lambda: vector(1000),
    "several ranges": lambda: vector(SEVERAL_RANGES),
    "not aligned": lambda: vector(1001)[1:],
    "zeros": lambda: torch.zeros(1000),
    "negative zeros": lambda: torch.full((100,), -0.0),
    "equal": lambda: torch.ones(1000),
    "denormal": lambda: vector(1000) * 2.0**-130,
    "great": lambda: torch.linspace(-3.4e38, 3.4e38, 1000),
    "one NaN": lambda: vector(1000).index_fill(0, torch.tensor([501]), torch.nan),
    "one Inf": lambda: vector(1000).index_fill(0, torch.tensor([999]), -torch.inf),
}
GRIDS = {
    8: OffsetFloat.balanced(),
    10: OffsetFloat.balanced(bits=10, mantissa=5),
    4: OffsetFloat(bits=4, mantissa=1, eps=0.2),
}
inputs = pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
widths = pytest.mark.parametrize("width", [1, 7, 512, None])
dtypes = pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])


def _width(x: Tensor, width: int | None) -> int:
    return max(1, x.numel()) if width is None or (width < 7 and x.numel() > 10_000) else width


def _groups(x: Tensor, width: int) -> kernels.Groups:
    return kernels.Groups((x.numel(),), width)


def _scales(x: Tensor, width: int, order: float) -> Tensor:
    norms = kernels.group_norms.reference(x, _groups(x, width), order).to(torch.float32)
    return torch.where(norms.isfinite(), torch.where(norms == 0, 1.0, norms), torch.nan)


def _powers(x: Tensor, width: int, factor: float) -> Tensor:
    return torch.exp2((_scales(x, width, math.inf) * factor).log2().ceil().clamp(-126, 127))


def _codes(kernel: Callable[..., None], dtype: torch.dtype, x: Tensor, *rest: object) -> Tensor:
    """Return the codes written over two different poisons."""
    first, second = (torch.full((x.numel(),), poison, dtype=dtype) for poison in (0xA5, 0x5A))
    kernel(first, x, *rest)
    kernel(second, x, *rest)
    assert torch.equal(first, second), "not every code was written"
    return first


def _same_codes(dtype: torch.dtype, x: Tensor, scales: Tensor, group: int, how: How) -> Tensor:
    args = (dtype, x, scales, _groups(x, group), how, [2**63 + 5])
    found = _codes(kernels.codes_encode.cpu, *args)
    assert torch.equal(found, _codes(kernels.codes_encode.reference, *args))
    return found


@pytest.mark.grid
@inputs
@widths
@dtypes
@pytest.mark.parametrize("rounding", get_args(Rounding))
def test_offset_encode(make: Callable[[], Tensor], width: int | None, dtype: torch.dtype, rounding: Rounding) -> None:
    x = make()
    group = _width(x, width)
    for form, factor in product((GRIDS[4], GRIDS[8 if dtype == torch.uint8 else 10]), (1.0, 0.25)):
        grid = form.grid._replace(rounding=rounding)
        found = _same_codes(dtype, x, _powers(x, group, factor), group, grid)
        assert not found.numel() or int(found.max()) <= form.grid.positives + form.grid.negatives


@pytest.mark.grid
@inputs
@widths
@pytest.mark.parametrize(("levels", "dtype"), [(1, torch.uint8), (7, torch.uint8), (2**14 - 1, torch.int16)])
def test_levels_encode(make: Callable[[], Tensor], width: int | None, levels: int, dtype: torch.dtype) -> None:
    x = make()
    group = _width(x, width)
    for order in (2.0, math.inf):
        for nearest in (False, True):
            found = _same_codes(dtype, x, _scales(x, group, order), group, UniformGrid(levels, nearest))
            assert not found.numel() or int(found.max()) <= 2 * levels


@pytest.mark.grid
@inputs
@widths
@dtypes
def test_ternary_and_sign_encode(make: Callable[[], Tensor], width: int | None, dtype: torch.dtype) -> None:
    x = make()
    group = _width(x, width)
    _same_codes(dtype, x, _scales(x, group, math.inf), group, "ternary")
    assert torch.equal(_same_codes(dtype, x, _scales(x, group, 1.0), group, "sign").bool(), x < 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_codes_of_a_group_whose_scale_is_nan_are_zero(backend: Backend) -> None:
    x, scales = torch.ones(9), torch.tensor([1.0, math.nan, 1.0])
    grids = [OffsetGrid(20, 0x3E0, 33, 33, rounding) for rounding in get_args(Rounding)]
    for how in ("ternary", UniformGrid(7), *grids):
        codes = _codes(kernels.codes_encode.on(backend), torch.uint8, x, scales, _groups(x, 3), how, [0])
        assert (codes == 0).tolist() == [False] * 3 + [True] * 3 + [False] * 3, how


@pytest.mark.grid
@widths
@pytest.mark.parametrize("numel", [0, 1, 63, 1000, SEVERAL_RANGES])
@pytest.mark.parametrize("bits", [1, 2, 8, 10, 15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_table_decode(numel: int, width: int | None, bits: int, dtype: torch.dtype) -> None:
    codes = torch.randint(0, 2**bits, (numel,), generator=torch.Generator().manual_seed(bits))
    codes = codes.to(torch.uint8 if bits <= 8 else torch.int16)
    group, table = _width(codes, width), vector(2**bits).index_fill(0, torch.tensor([1]), math.nan)
    scales = vector(-(-numel // group), seed=1).index_fill(0, torch.arange(min(1, numel // group)), math.nan)
    found, expected = torch.full((numel,), math.nan, dtype=dtype), torch.full((numel,), 5.0, dtype=dtype)
    kernels.table_decode.cpu(found, codes, table, scales, _groups(codes, group))
    kernels.table_decode.reference(expected, codes, table, scales, _groups(codes, group))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_code_reads_beyond_the_table(backend: Backend) -> None:
    for codes in (torch.tensor([255, 4, 0], dtype=torch.uint8), torch.tensor([-1, 4, 32764], dtype=torch.int16)):
        out = torch.full((3,), math.nan)
        table = torch.tensor([1.0, 2.0, 3.0, 4.0])
        kernels.table_decode.on(backend)(out, codes, table, torch.ones(1), _groups(codes, 3))
        assert out.tolist() == [4.0, 1.0, 1.0]


@pytest.mark.grid
@inputs
@pytest.mark.parametrize("width", [1, 7, 512, 20_000, 300_000, None])
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_group_norms(make: Callable[[], Tensor], width: int | None, order: float) -> None:
    x = make()
    group = _width(x, width)
    found, expected = (kernels.group_norms.on(backend)(x, _groups(x, group), order) for backend in BACKENDS)
    assert found.dtype == torch.float64
    assert torch.equal(found.isfinite(), expected.isfinite())
    finite = expected.isfinite()
    rtol = 0.0 if order == math.inf else 1e-12
    torch.testing.assert_close(found[finite], expected[finite], rtol=rtol, atol=0.0)
    assert torch.equal(x[:1].isnan(), make()[:1].isnan())


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("group", [300_001, SEVERAL_RANGES])
def test_the_number_of_threads_changes_no_bit(group: int) -> None:
    x = vector(SEVERAL_RANGES)
    scales = torch.ones(-(-x.numel() // group))
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        codes = _codes(kernels.codes_encode.cpu, torch.uint8, x, scales, _groups(x, group), UniformGrid(7), [0])
        norms = [kernels.group_norms.cpu(x, _groups(x, group), order) for order in (1.0, 2.0, math.inf)]
        found.append((codes, *norms, kernels.sketch_insert.cpu(x, 3, 1000, 0)))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.grid
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", [Levels(bits=3), Ternary(), OffsetFloat.balanced(rounding="stochastic")])
def test_stochastic_rounding_is_unbiased_over_the_elements(
    backend: Backend, form: Levels | Ternary | OffsetFloat
) -> None:
    """The mean of a value's decodings is within six standard deviations; draws have 24 bits, hence the last term."""
    table = form.table()
    grid, n = table[~table.isnan()].double().sort().values, 1 << 18
    for value, seed in product((0.3, -0.71, 1e-6, 0.999), (0, 1)):
        codes = torch.full((n,), 0xA5, dtype=torch.uint8)
        args = (codes, torch.full((n,), value), torch.ones(1), kernels.Groups((n,)))
        how: How = "ternary"
        if isinstance(form, OffsetFloat):
            how = form.grid._replace(rounding="stochastic")
        elif isinstance(form, Levels):
            how = UniformGrid(3)
        kernels.codes_encode.on(backend)(*args, how, [seed])
        above = int(torch.searchsorted(grid, value))
        low, high = float(grid[above - 1]), float(grid[above])
        deviation = math.sqrt((value - low) * (high - value) / n)
        # Where a step is rare the mean is not normal (Bernstein).
        bound = 6 * deviation + 12 * (high - low) / n + 2.0**-24 * (high - low)
        mean = float(table[codes.long()].double().mean())
        assert abs(mean - torch.tensor(value).item()) <= bound


def test_formats_use_one_byte_up_to_8_bits() -> None:
    for form in (Levels(bits=8), Sign(), Ternary(), OffsetFloat.balanced()):
        assert form.encode(vector(10), seed=0)[0].dtype == torch.uint8
    assert Levels(bits=9).encode(vector(10), seed=0)[0].dtype == torch.int16


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 1000, (1 << 22) + 1])
def test_room_for_results(numel: int, dtype: torch.dtype) -> None:
    found = empty(numel, dtype, torch.device("cpu"))
    assert (found.dtype, found.shape) == (dtype, (numel,))
    assert found.is_contiguous()
    assert numel == 0 or found.data_ptr() % 64 == 0
    found.fill_(1)
    assert int(found.sum(dtype=torch.float64)) == numel


@pytest.mark.grid
@inputs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "buckets"), [(1, 7), (2, 100), (3, 5000), (5, 1), (8, 33), (63, 3)])
def test_sketches(make: Callable[[], Tensor], dtype: torch.dtype, rows: int, buckets: int) -> None:
    x = make().to(dtype)[: None if rows < 8 else 1000]
    tables = [kernels.sketch_insert.on(backend)(x, rows, buckets, 9) for backend in BACKENDS]
    torch.testing.assert_close(*tables, rtol=0, atol=0, equal_nan=True)
    estimates = [kernels.sketch_query.on(backend)(tables[1], x.numel(), 9) for backend in BACKENDS]
    torch.testing.assert_close(*estimates, rtol=0, atol=0, equal_nan=True)
