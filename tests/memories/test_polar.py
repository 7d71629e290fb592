"""The orthogonal factor: where singular values go, that no better polynomial is used, and that both ways agree."""

import pytest
import torch
from cases import vector
from torch import Tensor

from thinwire.memories import polar

SHAPES = [(1, 40), (40, 1), (8, 8), (16, 23), (16, 24), (90, 20)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def _matrix(shape: tuple[int, int]) -> Tensor:
    return vector(shape[0] * shape[1], dtype=torch.float64).view(shape)


def _image(s: Tensor, stages: tuple[polar.Stage, ...] = polar.STAGES) -> Tensor:
    for largest, weights in stages:
        h = 2 * s**2 / largest**2 - 1
        s = s * sum(weight * h**power for power, weight in enumerate(weights))
    return s


def test_singular_values_come_close_to_one_and_small_ones_are_raised_as_the_docstring_says() -> None:
    within = torch.linspace(polar.SMALLEST, 1, 100_001, dtype=torch.float64)
    assert float((_image(within) - 1).abs().max()) <= 0.25
    below = torch.linspace(0, polar.SMALLEST, 10_001, dtype=torch.float64)
    assert bool((_image(below) <= 58 * below).all())
    assert bool((_image(below)[1:] > 0).all())


def test_no_polynomial_of_this_degree_leaves_less_distance() -> None:
    """One that is as far from 1 at six values, on either side in turn, is the best of five weights (Chebyshev)."""
    least, most = polar.SMALLEST, 1.0
    for stage in polar.STAGES:
        values = torch.linspace(least, most, 200_001, dtype=torch.float64)
        off = _image(values, (stage,)) - 1
        bound = float(off.abs().max())
        signs = off[off.abs() > (1 - 1e-4) * bound].sign()
        assert int((signs.diff() != 0).sum()) == 5
        assert stage.largest == pytest.approx(most, rel=1e-6)
        least, most = 1 - bound, 1 + bound


@shapes
def test_singular_vectors_are_kept(shape: tuple[int, int]) -> None:
    x = _matrix(shape)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    expected = (u * _image(s / (s**4).sum() ** 0.25)) @ v
    torch.testing.assert_close(polar.orthogonal(x), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(polar.orthogonal(x.float()).double(), expected, rtol=0, atol=1e-4)


@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_both_ways_to_multiply_agree_even_where_singular_values_are_small(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    u, s, v = torch.linalg.svd(_matrix(shape), full_matrices=False)
    x = ((u * torch.logspace(0, -6, len(s), dtype=torch.float64)) @ v).to(dtype)
    found = []
    for wide in (0.0, torch.inf):
        monkeypatch.setattr(polar, "_WIDE", wide)
        found.append(polar.orthogonal(x))
    torch.testing.assert_close(*found, rtol=0, atol=1e4 * torch.finfo(dtype).eps)


def test_where_torch_may_round_products_matrices_are_not_multiplied_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 the Gram matrix lacks what is small, and then a polynomial of it may blow up."""
    monkeypatch.setattr(polar, "_by_gram", None)
    with pytest.raises(TypeError):
        polar.orthogonal(_matrix((8, 40)))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    assert bool(polar.orthogonal(_matrix((8, 40))).isfinite().all())


def test_zeros_stay_and_what_is_not_finite_is_not_hidden() -> None:
    assert not polar.orthogonal(torch.zeros(4, 9)).any()
    for poison in (torch.nan, torch.inf):
        x = _matrix((4, 9))
        x[1, 2] = poison
        assert not bool(polar.orthogonal(x).isfinite().all())
