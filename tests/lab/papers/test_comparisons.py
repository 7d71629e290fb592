"""What the paper found not to work, held against plain float64."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from thinwire_lab.papers.dct.rows import GaussianSketch, TopKGradient


def _gradient(module: nn.Module, x: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """What comes out of the module, and what its input gets of the gradient of its output."""
    leaf = x.clone().requires_grad_()
    out = module(leaf)
    out.backward(upstream)
    assert leaf.grad is not None
    return out.detach(), leaf.grad


def _passed(module: nn.Module, upstream: Tensor) -> Tensor:
    return _gradient(module, torch.zeros_like(upstream), upstream)[1]


def _largest(row: Sequence[float], k: int) -> list[float]:
    best = sorted(range(len(row)), key=lambda place: (-abs(row[place]), place))[:k]
    return [value if place in best else 0.0 for place, value in enumerate(row)]


def test_a_sketch_is_the_same_matrix_to_every_row_and_to_the_gradient() -> None:
    identity = torch.eye(12, dtype=torch.float64)
    matrix = GaussianSketch(0.25, seed=3)(identity)
    x, upstream = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(2, 5, 12, dtype=torch.float64)
    out, gradient = _gradient(GaussianSketch(0.25, seed=3), x, upstream)
    torch.testing.assert_close(out, x @ matrix)
    torch.testing.assert_close(gradient, upstream @ matrix.mT)
    torch.testing.assert_close(matrix, matrix.mT)
    assert torch.linalg.matrix_rank(matrix) == 3


def test_a_sketch_is_right_on_average_and_as_far_off_as_declared() -> None:
    width, m, draws = 16, 8, 4000
    sketch, x = GaussianSketch(m / width), torch.randn(width, dtype=torch.float64)
    found = torch.stack([sketch(x) for _ in range(draws)])
    error = (found - x).square().sum(1).mean() / x.square().sum()
    assert float(error) == pytest.approx((width + 1) / m, rel=0.08)
    assert float((found.mean(0) - x).norm() / x.norm()) < 4 * math.sqrt((width + 1) / m / draws)


def test_a_sketch_is_drawn_anew_at_every_call_by_the_seed_alone() -> None:
    x = torch.randn(3, 8)
    one, same, other = GaussianSketch(0.5, seed=1), GaussianSketch(0.5, seed=1), GaussianSketch(0.5, seed=2)
    state = torch.get_rng_state()
    first, second = one(x), one(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, second)
    assert torch.equal(same(x), first)
    assert torch.equal(same(x), second)
    assert not torch.equal(other(x), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_sketch_keeps_shape_and_dtype_and_hides_no_nan(dtype: torch.dtype) -> None:
    x = torch.ones(2, 3, 10, dtype=dtype)
    x[0, 1, 4] = math.nan
    out = GaussianSketch(0.1)(x)
    assert (out.shape, out.dtype) == (x.shape, dtype)
    assert out[0, 1].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("density", [0.0, 1.5, math.nan])
def test_a_density_that_is_none_is_refused(density: float) -> None:
    for make in (GaussianSketch, TopKGradient):
        with pytest.raises(ValueError, match="density"):
            make(density)
    with pytest.raises(ValueError, match="seed"):
        GaussianSketch(0.5, seed=-1)


@pytest.mark.parametrize("error_feedback", [True, False])
def test_gradients_are_filtered_as_in_plain_python(error_feedback: bool) -> None:
    module, waiting = TopKGradient(0.3, error_feedback), [[0.0] * 10 for _ in range(4)]
    for step in range(6):
        upstream = torch.randn(4, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        whole = [[g + w for g, w in zip(*pair, strict=True)] for pair in zip(upstream.tolist(), waiting, strict=True)]
        expected = [_largest(row, 3) for row in whole]
        if error_feedback:
            waiting = [[w - p for w, p in zip(*pair, strict=True)] for pair in zip(whole, expected, strict=True)]
        assert _passed(module, upstream).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_passed_and_what_waits_is_what_came(dtype: torch.dtype) -> None:
    module = TopKGradient(0.25)
    came = [torch.randn(3, 2, 16).to(dtype) for _ in range(20)]
    passed = [_passed(module, each) for each in came]
    assert all(each.dtype == dtype for each in passed)
    assert module.waiting is not None
    total = torch.stack(passed).double().sum(0) + module.waiting.double()
    torch.testing.assert_close(total, torch.stack(came).double().sum(0), rtol=1e-5, atol=1e-5)


def test_activations_pass_as_they_are_and_do_not_choose() -> None:
    x = torch.randn(4, 20)
    upstream = torch.zeros(4, 20)
    upstream[:, 7] = 1.0
    x[:, 7] = 0.0  # a mask of the activations would leave these out
    out, gradient = _gradient(TopKGradient(0.05), x, upstream)
    assert torch.equal(out, x)
    assert torch.equal(gradient, upstream)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_passes_once(bad: float) -> None:
    module, upstream = TopKGradient(0.2), torch.ones(2, 10)
    upstream[0, 9] = bad
    first = _passed(module, upstream)
    assert not first[0, 9].isfinite()
    assert module.waiting is not None
    assert module.waiting.isfinite().all()


def test_what_waits_moves_with_the_module_and_is_in_no_state_dict() -> None:
    module = TopKGradient(0.5)
    _passed(module, torch.ones(4, 6))
    assert module.state_dict() == {}
    moved = module.to("meta").waiting
    assert moved is not None
    assert moved.is_meta
    assert TopKGradient(0.5, error_feedback=False).waiting is None


def test_nothing_is_filtered_of_nothing() -> None:
    assert _passed(TopKGradient(0.5), torch.ones(3, 0)).shape == (3, 0)
    assert GaussianSketch(0.5)(torch.ones(3, 0)).shape == (3, 0)
