"""Laws of every boundary: what crosses it there and back is the activation and the gradient times one mask."""

import copy
import io
import math
from collections.abc import Callable

import pytest
import torch
from cases import BOUNDARIES, OFFSET_8, vector
from torch import Tensor, nn

from thinwire.codecs.laplace_threshold import laplace_quantile
from thinwire.errors import PayloadError
from thinwire.formats import Sign
from thinwire.payloads import narrowed
from thinwire.payloads.words import shortened, widened
from thinwire.pipeline import Boundary, LaplaceBoundary, TopKBoundary, sparsify

Make = Callable[[], Boundary]
SHAPES = [(7, 50), (3, 5, 40), (1, 1), (6, 1), (2, 3, 8, 8)]
boundaries = pytest.mark.parametrize("make", BOUNDARIES.values(), ids=BOUNDARIES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)


def activation(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return vector(math.prod(shape), seed).view(shape).to(dtype)


def ranked(x: list[float]) -> list[int]:
    """Return the places of the largest magnitudes first, NaN before all, and of equal ones the first first."""
    return sorted(range(len(x)), key=lambda i: (x[i] == x[i], -abs(x[i]) if x[i] == x[i] else 0.0, i))


def topk_mask(boundary: Boundary, x: Tensor) -> Tensor:
    rows = x.flatten(boundary.start_dim).reshape(-1, math.prod(x.shape[boundary.start_dim :]))
    width = rows.shape[1]
    mask, k = torch.zeros_like(rows, dtype=torch.bool), max(1, round(boundary.density * width))
    for row in range(rows.shape[0]):
        mask[row, ranked(rows[row].tolist())[:k]] = True
    return mask.view(x.shape)


def laplace_mask(boundary: LaplaceBoundary, x: Tensor) -> Tensor:
    if boundary.density == 1:
        return torch.ones_like(x, dtype=torch.bool)
    threshold = float(boundary.recent[-1].to(x.dtype))
    flat = x.reshape(-1).tolist()
    room = min(len(flat), math.ceil(boundary.bound * boundary.density * len(flat)))
    chosen = [
        i
        for i in ranked(flat)[:room]
        if flat[i] != flat[i] or abs(flat[i]) == math.inf or 0 < abs(flat[i]) >= threshold
    ]
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[chosen] = True
    return mask.view(x.shape)


def mask_of(boundary: Boundary, x: Tensor) -> Tensor:
    """Return what should have been kept of `x`, of all that just crossed."""
    return laplace_mask(boundary, x) if isinstance(boundary, LaplaceBoundary) else topk_mask(boundary, x)


def crossed(boundary: Boundary, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return what arrives of an activation, and of its gradient."""
    leaf = x.detach().requires_grad_()
    out = boundary(leaf)
    out.backward(gradient)
    assert leaf.grad is not None
    return out.detach(), leaf.grad


def returned(boundary: Boundary, gradient: Tensor) -> Tensor:
    """Return gradients in the bits that there is room for, by the bytes declared."""
    count = boundary.count(
        gradient.numel() // math.prod(gradient.shape[boundary.start_dim :]),
        math.prod(gradient.shape[boundary.start_dim :]),
    )
    count = gradient.numel() if count is None else count
    bits = 8 * boundary.nbytes(gradient.shape, gradient.dtype) // count
    if bits >= 8 * gradient.dtype.itemsize:
        return gradient
    bits = min(32, bits)
    return widened(shortened(gradient.reshape(-1), bits), gradient.numel(), bits).view_as(gradient).to(gradient.dtype)


@pytest.mark.grid
@boundaries
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_there_and_back_is_multiplying_by_the_mask(make: Make, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    boundary = make()
    for x in (activation(shape, 1, dtype), activation(shape, 2, dtype).round(), activation(shape, 3, dtype).relu()):
        gradient = activation(shape, 4, dtype)
        found, back = crossed(boundary, x, gradient)
        assert found.shape == back.shape == x.shape
        assert found.dtype == back.dtype == dtype
        mask = mask_of(boundary, x)
        expected = torch.zeros_like(x)
        expected[mask] = narrowed(x[mask], boundary.values, dtype, 1)[0].to(dtype)
        if boundary.values is OFFSET_8:  # which scales by the largest of what travels, padding included
            torch.testing.assert_close(found, expected)
        else:
            assert torch.equal(found, expected)
        assert torch.equal(back, returned(boundary, gradient) * mask)


EXACT = {name: make for name, make in BOUNDARIES.items() if make().values is None}


@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT)
def test_without_narrowing_it_is_autograds_own_to_the_bit(make: Make) -> None:
    boundary = make()
    x, gradient = activation((9, 30)), activation((9, 30), 1)
    found, back = crossed(boundary, x, gradient)
    leaf = x.clone().requires_grad_()
    plain = leaf * mask_of(boundary, x)
    plain.backward(gradient)
    assert torch.equal(found, plain)
    assert torch.equal(back, leaf.grad)  # type: ignore[arg-type]


@boundaries
def test_gradients_of_narrowed_values_are_near(make: Make) -> None:
    boundary = make()
    x, gradient = activation((9, 30)), activation((9, 30), 1)
    _, back = crossed(boundary, x, gradient)
    torch.testing.assert_close(back, gradient * mask_of(boundary, x), rtol=2.0**-4, atol=0)


@boundaries
def test_bytes_declared_are_those_of_the_words_whatever_the_data(make: Make) -> None:
    for shape in ((7, 50), (1, 3), (0, 50)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            boundary = make()
            for x in (activation(shape, 1), torch.zeros(shape), torch.ones(shape), torch.full(shape, torch.nan)):
                words, frame = boundary.send(x.to(dtype))
                assert words.dtype == torch.float32
                assert words.dim() == 1
                assert words.nbytes == boundary.nbytes(x.shape, dtype)
                assert frame.shape == (*shape, 0)
                assert frame.dtype == dtype


@boundaries
def test_the_other_side_needs_the_words_and_the_frame_only(make: Make) -> None:
    x = activation((7, 50)).requires_grad_()
    words, frame = make().send(x)
    there, empty = words.detach().requires_grad_(), torch.empty(frame.shape).requires_grad_()
    found = make().receive(there, empty)
    assert torch.equal(found, make()(x))
    found.backward(activation((7, 50), 1))
    assert there.grad is not None
    assert empty.grad is not None
    torch.autograd.backward([words, frame], [there.grad, empty.grad])
    again = x.detach().requires_grad_()
    make()(again).backward(activation((7, 50), 1))
    assert torch.equal(x.grad, again.grad)  # type: ignore[arg-type]


@boundaries
def test_padding_gets_no_gradient(make: Make) -> None:
    x = torch.full((4, 32), 1e-3)
    x[::2, 3] = 5.0
    boundary = make()
    found, back = crossed(boundary, x, torch.ones_like(x))
    mask = mask_of(boundary, x)
    assert torch.equal(back, mask.float())
    assert torch.equal(found != 0, mask)


def test_the_last_element_gets_its_gradient_once() -> None:
    x = torch.full((4, 32), 1e-3)
    x[0, 3] = x[-1, -1] = 5.0
    for density in (0.05, 0.25, 0.45):
        boundary = LaplaceBoundary(density)
        found, back = crossed(boundary, x, torch.ones_like(x))
        assert back.sum() == 2 == int(boundary.report().kept * 128 + 0.5)
        assert [found[-1, -1], back[-1, -1]] == [5, 1]


@boundaries
@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_hidden(make: Make, what: float) -> None:
    for place in (0, 77, 349):
        x = activation((7, 50))
        x.view(-1)[place] = what
        boundary = make()
        assert not bool(boundary(x).isfinite().all())
        x = activation((7, 50), 1)
        boundary(x)
        kept = mask_of(boundary, x)
        gradient = torch.where(kept, what, 1.0)
        assert not bool(crossed(boundary, x, gradient)[1][kept].isfinite().any())


@boundaries
def test_evaluation_hides_nothing_either(make: Make) -> None:
    boundary = make()
    boundary(activation((7, 50)))
    boundary.eval()
    for what in (math.nan, math.inf):
        x = activation((7, 50), 1)
        x[3, 3] = what
        assert not bool(boundary(x)[3, 3].isfinite())


@boundaries
def test_zeros_stay_zeros(make: Make) -> None:
    x = torch.zeros(7, 50)
    found, back = crossed(make(), x, torch.ones_like(x))
    assert torch.equal(found, x)
    assert bool(((back == 0) | (back == 1)).all())


@boundaries
@pytest.mark.parametrize("shape", [(0, 50), (3, 0), (0, 3, 8)])
def test_without_elements(make: Make, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    for boundary in (make(), make()):
        found, back = crossed(boundary, x, x.clone())
        assert found.shape == back.shape == shape
        crossed(boundary, activation((7, 50)), activation((7, 50), 1))
        assert not any(map(math.isnan, boundary.report()))


@boundaries
def test_any_memory_will_do(make: Make) -> None:
    x, gradient = activation((7, 50)), activation((7, 50), 1)
    expected = crossed(make(), x, gradient)
    spaced = torch.full((14, 100), torch.nan)
    spaced[::2, ::2] = x
    for same in (x.t().contiguous().t(), spaced[::2, ::2]):
        assert not same.is_contiguous()
        found = crossed(make(), same, gradient.t().contiguous().t())
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    wide = x[:1].expand(7, 50)
    assert torch.equal(make()(wide), make()(wide.contiguous()))


@boundaries
def test_crossing_changes_neither_inputs_nor_the_global_random_state(make: Make) -> None:
    x, gradient = activation((7, 50)), activation((7, 50), 1)
    copies, state = (x.clone(), gradient.clone()), torch.random.get_rng_state()
    crossed(make(), x, gradient)
    assert torch.equal(x, copies[0])
    assert torch.equal(gradient, copies[1])
    assert torch.equal(torch.random.get_rng_state(), state)


@boundaries
def test_without_gradients_and_under_autocast(make: Make) -> None:
    x = activation((7, 50)).requires_grad_()
    expected = make()(x).detach()
    with torch.no_grad():
        found = make()(x)
    assert not found.requires_grad
    assert torch.equal(found, expected)
    with torch.inference_mode():
        assert torch.equal(make()(x), expected)
    model = nn.Sequential(nn.Linear(50, 40), make(), nn.Linear(40, 3))
    with torch.autocast("cpu", torch.bfloat16):
        narrow = model[0](x)
        assert narrow.dtype == torch.bfloat16
        assert model[1](narrow).dtype == torch.bfloat16
        model(x).sum().backward()
    assert bool(model[0].weight.grad.isfinite().all())  # type: ignore[union-attr, operator]


@boundaries
def test_a_model_with_boundaries_is_copied_and_saved(make: Make) -> None:
    model = nn.Sequential(nn.Linear(50, 40), make(), nn.Linear(40, 3))
    x = activation((7, 50))
    for _ in range(2):
        model(x).sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    expected = model(x)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), expected)
        boundary = other[1]
        assert isinstance(boundary, Boundary)
        assert 0 <= boundary.report().kept <= 1


def test_a_report_tells_the_means_since_the_last() -> None:
    topk = TopKBoundary(0.1)
    assert [math.isnan(value) for value in topk.report()] == [False, True, True, True, True]
    topk(torch.tensor([[4.0, -3, 2, 1, 0.5, 0.1, 0, 0, 0, 0], [0.0, 0, 0, 0, 0, 0, 0, 0, 0, 0]]))
    topk(torch.tensor([[4.0, -8, 2, 1, 0.5, 0.1, 0, 0, 0, 0]]))
    assert topk.report() == (0.1, 3 / 30, 3 / 30, 2 / 30, (4 + 0) / 2 / 2 + 8 / 2)
    assert math.isnan(topk.report().kept)
    everything = TopKBoundary(1.0)
    everything(torch.tensor([[4.0, -3.0, 0.0, 1.0]]))
    assert everything.report() == (1.0, 1.0, 1.0, 0.75, 0.0)
    laplace = LaplaceBoundary(0.2)
    x = torch.tensor([[3.0, -3, 1, -1, 1, -1, 1, -1, 1, -1]])
    laplace(x)
    threshold = math.sqrt((2 * 9 + 8) / 10 / 2) * -math.log(0.2)
    assert laplace.report() == pytest.approx((0.2, 0.4, 0.2, 0.2, threshold))


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 1.0), (torch.float16, 1000.0)])
def test_a_report_adds_up_thresholds_of_16_bits_without_losing_any(dtype: torch.dtype, size: float) -> None:
    boundary, x = TopKBoundary(0.5), torch.full((2, 4), size, dtype=dtype)
    for _ in range(600):
        boundary(x)
    assert boundary.report().threshold == size


@boundaries
def test_what_a_state_dict_holds(make: Make) -> None:
    boundary = make()
    boundary(activation((7, 50)))
    if isinstance(boundary, TopKBoundary):
        assert boundary.state_dict() == {}
    else:
        assert set(boundary.state_dict()) == {"recent"}
        other = make()
        other.load_state_dict(boundary.state_dict())
        assert torch.equal(other.eval()(activation((7, 50), 2)), boundary.eval()(activation((7, 50), 2)))
    assert not list(boundary.parameters())


def test_evaluation_uses_the_median_of_training() -> None:
    boundary = LaplaceBoundary(0.3)
    assert bool(boundary.threshold.isnan())
    with pytest.raises(RuntimeError, match="train first, or load"):
        boundary.eval()(activation((7, 50)))
    boundary.train()
    thresholds = []
    for scale in (5, 1, 4, 2, 3):
        boundary(activation((7, 50)) * scale)
        thresholds.append(float(boundary.recent[-1]))
    assert float(boundary.threshold) == sorted(thresholds)[2]
    x, recent = activation((7, 50), 9) * 7, boundary.recent.clone()
    found = boundary.eval()(x)
    assert torch.equal(found, torch.where(x.abs() >= sorted(thresholds)[2], x, 0))
    torch.testing.assert_close(boundary.recent, recent, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("garbage", [1e30, 0.0, math.nan, math.inf])
def test_one_batch_of_garbage_does_not_shift_the_median(garbage: float) -> None:
    boundary = LaplaceBoundary(0.3)
    boundary(torch.full((7, 50), garbage) * activation((7, 50)))
    thresholds = []
    for seed in range(40):
        boundary(activation((7, 50), seed))
        if seed == 20:
            boundary(torch.full((7, 50), garbage) * activation((7, 50)))
        thresholds.append(float(boundary.recent[-1]))
        if seed > 1:
            assert min(thresholds) <= float(boundary.threshold) <= max(t for t in thresholds if t < 1e3)


def _exceeding(mean: float, scale: float, threshold: float) -> float:
    """P(|R| ≥ τ) of a Laplace law by summing up its density."""
    edges = torch.linspace(-threshold, threshold, 200_001, dtype=torch.float64)
    middle = (edges[1:] + edges[:-1]) / 2
    inside = torch.exp(-(middle - mean).abs() / scale).sum() / (2 * scale) * (edges[1] - edges[0])
    return 1 - float(inside)


@pytest.mark.grid
@pytest.mark.parametrize("share", [0.001, 0.02, 0.2, 0.5, 0.51, 0.8, 0.99, 1.0])
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("mean", [0.0, 0.05, -0.3, 2.0, -50.0])
def test_the_quantile_of_a_laplace_law(mean: float, scale: float, share: float) -> None:
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-4)):
        threshold = laplace_quantile(torch.tensor(mean, dtype=dtype), torch.tensor(scale, dtype=dtype), share)
        assert float(threshold) >= -1e-6 * abs(scale)
        assert _exceeding(mean, scale, float(threshold)) == pytest.approx(share, abs=tolerance)


@pytest.mark.parametrize("mean", [0.0, 2.0, -3.0])
def test_a_law_without_width_keeps_its_mean(mean: float) -> None:
    for share in (0.02, 0.5, 0.8, 1.0):
        threshold = float(laplace_quantile(torch.tensor(mean), torch.tensor(0.0), share))
        assert threshold == abs(mean)


@pytest.mark.parametrize("density", [0.02, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("mean", [0.0, 0.7])
def test_a_laplace_batch_is_kept_at_the_density_wanted(density: float, mean: float) -> None:
    uniform = torch.rand(200, 500, generator=torch.Generator().manual_seed(1)) - 0.5
    x = mean - uniform.sign() * torch.log1p(-2 * uniform.abs())
    boundary = LaplaceBoundary(density)
    boundary(x)
    assert boundary.report().kept == pytest.approx(density, rel=0.05)


@pytest.mark.parametrize("bound", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("density", [0.01, 0.2, 0.7])
def test_the_bound_holds(bound: float, density: float) -> None:
    most = min(1000, math.ceil(bound * density * 1000))
    two = torch.ones(10, 100) * torch.tensor([1.0, -1.0]).repeat(50)
    for x in (activation((10, 100)) ** 3, two, 100 + activation((10, 100)), torch.full((10, 100), torch.nan)):
        boundary = LaplaceBoundary(density, bound=bound)
        found = boundary(x)
        assert int((found != 0).sum()) <= most
        assert round(boundary.report().sent * 1000) == most
    boundary = LaplaceBoundary(density, bound=bound)
    boundary(1e-3 * activation((10, 100)))
    x = activation((10, 100), 1) + 10
    assert int((boundary.eval()(x) != 0).sum()) == most, "the largest"
    assert torch.equal(boundary(x) != 0, laplace_mask(boundary, x))


@pytest.mark.parametrize("density", [0.0, -1.0, 1.1, math.nan])
def test_densities_that_are_none_are_refused(density: float) -> None:
    for make in (TopKBoundary, LaplaceBoundary):
        with pytest.raises(ValueError, match="density is"):
            make(density)


def test_bad_arguments_are_told() -> None:
    with pytest.raises(TypeError, match=r"values is 'bf16'; expected None, torch\.float32, "):
        TopKBoundary(0.1, values="bf16")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"values is torch\.int8; expected None"):
        TopKBoundary(0.1, values=torch.int8)
    with pytest.raises(ValueError, match="cannot represent zero"):
        LaplaceBoundary(0.1, values=Sign())
    with pytest.raises(ValueError, match=r"bound is 0\.5"):
        LaplaceBoundary(0.1, bound=0.5)
    for start_dim, shape in ((-3, (7, 50)), (2, (7, 50)), (1, (50,))):
        with pytest.raises(ValueError, match="has no such dimension"):
            TopKBoundary(0.1, start_dim=start_dim)(torch.zeros(shape))
        with pytest.raises(ValueError, match="has no such dimension"):
            LaplaceBoundary(0.1, start_dim=start_dim).nbytes(torch.Size(shape))


def test_two_ends_that_do_not_agree_are_told() -> None:
    words, frame = TopKBoundary(0.1).send(activation((7, 50)))
    for other in (TopKBoundary(0.2), TopKBoundary(0.1, values=torch.bfloat16), TopKBoundary(1.0), LaplaceBoundary(0.1)):
        with pytest.raises(PayloadError, match="the same density and values"):
            other.receive(words, frame)


@boundaries
def test_words_that_nobody_wrote_are_read(make: Make) -> None:
    boundary, shape = make(), (7, 50)
    length = boundary.nbytes(torch.Size(shape)) // 4
    for pattern in (0, -1, 0x7F800001, 0x12345678):
        words = torch.full((length,), pattern, dtype=torch.int32).view(torch.float32).requires_grad_()
        found = boundary.receive(words, torch.empty(*shape, 0))
        assert found.shape == shape
        found.backward(torch.full(shape, torch.nan))


@boundaries
def test_a_whole_models_stages_do_what_modules_between_them_do(make: Make) -> None:
    torch.manual_seed(1)
    stages = [nn.Linear(50, 40), nn.Linear(40, 40), nn.Linear(40, 3)]
    again = copy.deepcopy(stages)
    plain = nn.Sequential(again[0], make(), again[1], make(), again[2])
    names = [list(stage.state_dict()) for stage in stages]
    sparsified = sparsify(stages, boundary=make)
    assert set(sparsified.boundaries) == {0, 1}
    x = activation((7, 50))
    for _ in range(2):
        found: tuple[Tensor, ...] | Tensor = (x,)
        for stage in stages:
            found = stage(*found)
        assert isinstance(found, Tensor)
        expected = plain(x)
        assert torch.equal(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
    for stage, other in zip(stages, again, strict=True):
        assert torch.equal(stage.weight.grad, other.weight.grad)  # type: ignore[arg-type]
    assert [r.kept for r in sparsified.reports().values()] == [plain[i].report().kept for i in (1, 3)]  # type: ignore[operator]
    if make().state_dict():
        assert set(stages[1].state_dict()) == {*names[1], "boundary_recent"}
    else:
        assert [list(stage.state_dict()) for stage in stages] == names
    sparsified.remove()
    assert [list(stage.state_dict()) for stage in stages] == names
    assert torch.equal(stages[0](x), again[0](x))
    sparsify(stages, 0.5)


def test_several_tensors_and_whole_numbers_pass() -> None:
    class Several(nn.Module):
        def forward(self, x: Tensor, y: Tensor, n: Tensor) -> tuple[Tensor, ...]:
            return x + 1, n, y * 2

    class Last(nn.Module):
        def forward(self, x: Tensor, n: Tensor, y: Tensor) -> list[Tensor]:
            return [x, n, y]

    stages = [Several(), Last()]
    sparsify(stages, 0.5)
    x, y, n = activation((4, 10)), activation((4, 6), dtype=torch.float64), torch.arange(4)
    sent = stages[0](x, y, n)
    assert [part.dtype for part in sent] == [torch.float32, torch.float32, torch.int64, torch.float32, torch.float64]
    a, m, b = stages[1](*sent)
    assert torch.equal(m, n)
    assert torch.equal(a, TopKBoundary(0.5)(x + 1))
    assert torch.equal(b, TopKBoundary(0.5)(y * 2))


def test_a_sparsified_model_is_copied_and_saved() -> None:
    stages = nn.ModuleList([nn.Linear(50, 40), nn.Linear(40, 3)])
    sparsify(list(stages), boundary=laplace)
    x = activation((7, 50))
    expected = stages[1](*stages[0](x))
    file = io.BytesIO()
    torch.save(stages, file)
    file.seek(0)
    for other in (copy.deepcopy(stages), torch.load(file, weights_only=False)):
        assert torch.equal(other[1](*other[0](x)), expected)


def laplace() -> Boundary:
    return LaplaceBoundary(0.3)


def test_what_cannot_be_sparsified_is_told() -> None:
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    for density, boundary in ((None, None), (0.5, laplace)):
        with pytest.raises(ValueError, match="either a density or boundary="):
            sparsify(stages, density, boundary=boundary)
    for values, start_dim in ((torch.bfloat16, -1), (None, 1)):
        with pytest.raises(ValueError, match="belong to the boundary"):
            sparsify(stages, boundary=laplace, values=values, start_dim=start_dim)
    with pytest.raises(ValueError, match="Linear, str"):
        sparsify([stages[0], "stage"], 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="density is 2"):
        sparsify(stages, 2.0)
    sparsify(stages, 0.5)
    with pytest.raises(ValueError, match=r"Linear is sparsified already; remove\(\) that first"):
        sparsify(stages, 0.5)
    plain, sparse = nn.Linear(4, 4), stages[0]
    with pytest.raises(PayloadError, match="sparsify all stages alike"):
        stages[1](plain(torch.ones(2, 4)))
    assert len(sparse(torch.ones(2, 4))) == 2


@boundaries
def test_a_compiled_model_crosses_as_it_would_otherwise(make: Make) -> None:
    plain = nn.Sequential(nn.Linear(16, 16), make(), nn.Linear(16, 4))
    other = copy.deepcopy(plain)
    torch._dynamo.reset()
    compiled = torch.compile(other, backend="eager")
    for step in range(3):
        for model in (plain, compiled):
            model(activation((8, 16), step)).square().mean().backward()
    for found, wanted in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=0, atol=0)
    torch.testing.assert_close(other.state_dict(), plain.state_dict(), rtol=0, atol=0, equal_nan=True)
