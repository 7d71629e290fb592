"""Boundaries hung on modules of every kind, without a pipeline around them."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from thinwire.codecs.row_topk import largest_in_rows
from thinwire.pipeline import Boundary, LaplaceBoundary, TopKBoundary, sparsify

BOUNDARIES: dict[str, Callable[[], Boundary]] = {
    "topk": lambda: TopKBoundary(0.25),
    "laplace": lambda: LaplaceBoundary(0.25),
}


class Children(nn.Module):
    """Runs whatever modules it has."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Twice(nn.Module):
    """Returns two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x * 2


class Sum(nn.Module):
    """Takes two."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def _stages(kind: Callable[..., nn.Module]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind(nn.Linear(16, 64), nn.ReLU()), kind(nn.Linear(64, 32), nn.ReLU()), nn.Linear(32, 4)]


def _run(stages: Sequence[nn.Module], *args: Tensor) -> Tensor:
    for stage in stages:
        found = stage(*args)
        args = found if isinstance(found, tuple) else (found,)
    return args[0]


@pytest.mark.parametrize("kind", [nn.Sequential, Children])
@pytest.mark.parametrize("make", BOUNDARIES.values(), ids=BOUNDARIES)
def test_stages_of_containers_cross_once(kind: Callable[..., nn.Module], make: Callable[[], Boundary]) -> None:
    """An nn.Sequential runs all that is registered with it, so a boundary must not be."""
    stages, between = _stages(kind), [make(), make()]
    plain = copy.deepcopy(stages)
    unsplit = nn.Sequential(plain[0], between[0], plain[1], between[1], plain[2])
    sparsified = sparsify(stages, boundary=make)
    for seed in range(3):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
        results = _run(stages, x), unsplit(x)
        assert torch.equal(*results)
        for result in results:
            result.square().sum().backward()
    for stage, other in zip(stages, plain, strict=True):
        for p, q in zip(stage.parameters(), other.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(p.grad, q.grad)
    for module in (*stages, unsplit):
        module.eval()
    assert torch.equal(_run(stages, x), unsplit(x)), "evaluation uses what training has stored"
    assert sparsified.reports()[0] == between[0].report(), "once for each batch"
    assert torch.equal(_run(copy.deepcopy(stages), x), unsplit(x))
    assert len(list(stages[0].modules())) == len(list(plain[0].modules()))


def test_thresholds_go_with_the_stage() -> None:
    stages = _stages(nn.Sequential)
    names = set(stages[0].state_dict())
    sparsified = sparsify(stages, boundary=lambda: LaplaceBoundary(0.25))
    _run(stages, torch.randn(8, 16))
    saved = stages[0].state_dict()
    assert set(saved) == {*names, "boundary_recent"}
    others = _stages(nn.Sequential)
    again = sparsify(others, boundary=lambda: LaplaceBoundary(0.25))
    others[0].load_state_dict(saved)
    boundary = again.boundaries[0]
    assert isinstance(boundary, LaplaceBoundary)
    torch.testing.assert_close(boundary.recent, saved["boundary_recent"], rtol=0, atol=0, equal_nan=True)
    for stage in stages:
        stage.double()
    assert _run(stages, torch.randn(8, 16, dtype=torch.float64)).dtype == torch.float64
    moved = sparsified.boundaries[0]
    assert isinstance(moved, LaplaceBoundary)
    assert moved.recent is stages[0].get_buffer("boundary_recent"), "follows the stage wherever it moves"
    sparsified.remove()
    sparsified.remove()
    assert set(stages[0].state_dict()) == names


def test_a_container_may_return_two_tensors() -> None:
    stages = [nn.Sequential(nn.Linear(4, 8), Twice()), Sum()]
    x = torch.randn(3, 4)
    plain = _run(stages, x)
    sparsify(stages, 1.0)
    assert torch.equal(_run(stages, x), plain)


def test_a_stage_that_was_compiled() -> None:
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), backend="eager")
    assert isinstance(compiled, nn.Module)
    stages = [compiled, nn.Linear(8, 2)]
    x = torch.randn(3, 4)
    plain = _run(stages, x)
    sparsify(stages, 1.0).remove()
    sparsified = sparsify(stages, boundary=lambda: LaplaceBoundary(1.0))
    assert torch.equal(_run(stages, x), plain)
    sparsified.remove()
    assert torch.equal(_run(stages, x), plain)
    assert not any("boundary" in name for name in stages[0].state_dict())


def test_what_arrives_may_be_changed_in_place() -> None:
    for density in (0.5, 1.0):
        model = nn.Sequential(nn.Linear(4, 8), TopKBoundary(density), nn.ReLU(inplace=True))
        model(torch.randn(3, 4)).sum().backward()


@pytest.mark.parametrize(("mean", "scale"), [(1, 1e-3), (10, 1e-2), (0.5, 1e-4), (5000, 1), (0, 1)])
def test_a_law_far_from_zero_is_fitted_as_well(mean: float, scale: float) -> None:
    """One law kept a tenth of a normal one; where the mean is large, only what lies above it can be kept."""
    boundary = LaplaceBoundary(0.1)
    boundary(mean + scale * torch.randn(64, 512, generator=torch.Generator().manual_seed(0)))
    assert 0.08 < boundary.report().kept < 0.15


def test_something_always_passes() -> None:
    for x in (torch.full((4, 50), 3.3), torch.full((4, 50), -1e20), torch.eye(50)[:1].expand(4, 50)):
        for dtype in (torch.float32, torch.float64):
            assert LaplaceBoundary(0.1)((x.double() / 33).to(dtype)).count_nonzero() > 0
    signs = torch.tensor([1.0, -1.0]).repeat(4, 25)  # whose fitted law would have a twentieth beyond 2
    assert LaplaceBoundary(0.05)(signs).count_nonzero() > 0


def test_widened_nans_are_ties() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for numel in (5, 13, 17, 100):
            x = torch.arange(numel).to(dtype)
            x[::3] = torch.nan
            k = len(x[::3])
            picks = largest_in_rows(x, numel, (k - 1) / numel)
            assert picks.tolist() == list(range(0, numel, 3))[: len(picks)]


def test_what_is_no_activation_is_refused() -> None:
    with pytest.raises(TypeError, match="floating-point; got torch"):
        TopKBoundary(0.5)(torch.ones(3, 4, dtype=torch.int64))
    with pytest.raises(TypeError, match="floating-point; got torch"):
        TopKBoundary(0.5)(torch.ones(3, 4, dtype=torch.complex64))
    with pytest.raises(TypeError, match="values is torch"):
        TopKBoundary(0.5, values=torch.float8_e4m3fn)
    assert torch.equal(TopKBoundary(0.5)(torch.tensor(2.0)), torch.tensor(2.0)), "one number is a row"

    class Named(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": x}

    stages = [Named(), nn.Identity()]
    sparsify(stages, 0.5)
    with pytest.raises(TypeError, match="Named returned dict"):
        _run(stages, torch.randn(3, 4))
    stages = [nn.Identity(), nn.Identity()]
    sparsify(stages, 0.5)
    with pytest.raises(TypeError, match=r"Identity got tuple; expected tensors: stage\(\*what"):
        nn.Sequential(*stages)(torch.randn(3, 4))


def test_stages_that_cannot_be_sparsified_are_refused_whole() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    bad: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: sparsify([one, one, other], 0.5), ValueError, "occurs twice"),
        (lambda: sparsify(nn.Sequential(one, other), 0.5), ValueError, "expected a list"),  # type: ignore[arg-type]
        (lambda: sparsify([], 0.5), ValueError, "expected a list"),
        (lambda: sparsify([one, other], boundary=nn.ReLU), TypeError, "made a ReLU"),  # type: ignore[arg-type]
        (lambda: sparsify([one, other], boundary=lambda: TopKBoundary(2.0)), ValueError, "density is 2"),
        (lambda: sparsify([one, other]), ValueError, "either a density or boundary="),
    ]
    for call, error, message in bad:
        with pytest.raises(error, match=message):
            call()
    sparsify([one, other], 0.5)
    with pytest.raises(ValueError, match="sparsified already"):
        sparsify([one, other], 0.5)
