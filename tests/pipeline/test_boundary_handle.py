"""What `sparsify` returns, as a handle."""

import math

import pytest
import torch
from torch import Tensor, nn

from thinwire import trace
from thinwire.pipeline import LaplaceBoundary, Sparsified, TopKBoundary, sparsify

DENSITY = 0.25


def _stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)]


def _trained(sparsified: Sparsified, stages: list[nn.Module], steps: int) -> list[tuple[float, float, float]]:
    found = []
    for seed in range(steps):
        words: tuple[Tensor, ...] = (torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)),)
        for stage in stages:
            output = stage(*words)
            words = output if isinstance(output, tuple) else (output,)
        words[0].square().sum().backward()
        figures = sparsified.stats().step
        found.append((figures.sent_bytes, figures.dense_bytes, figures.density))
    return found


def test_stats_count_both_directions() -> None:
    stages = _stages()
    sparsified = sparsify(stages, DENSITY)
    assert sparsified.stats().total.steps == 0
    with trace.listen(trace.Recorder()) as recorder:
        steps = _trained(sparsified, stages, 3)
    crossing = sum(boundary.nbytes(torch.Size((8, 32))) for boundary in sparsified.boundaries.values())
    assert steps == [(2 * crossing, 2 * 2 * 8 * 32 * 4, DENSITY)] * 3  # two boundaries, two directions, float32
    total = sparsified.stats().total
    assert total.sent_bytes == recorder.totals["sent_bytes"]
    assert total.ratio == pytest.approx(crossing / (2 * 8 * 32 * 4))
    assert total.encode_ms > 0
    assert total.decode_ms > 0
    assert total.steps == 3
    assert math.isnan(total.exchange_ms), "whoever runs the stages sends"
    assert math.isnan(total.residual_ratio)


def test_remove_gives_the_stages_back() -> None:
    stages = _stages()
    x = torch.randn(4, 16)
    plain = nn.Sequential(*stages)(x)
    sparsified = sparsify(stages, DENSITY)
    sparsified.remove()
    assert torch.equal(nn.Sequential(*stages)(x), plain)


def test_state_goes_round() -> None:
    ours, theirs = _stages(), _stages()
    first = sparsify(ours, boundary=lambda: LaplaceBoundary(DENSITY))
    second = sparsify(theirs, boundary=lambda: LaplaceBoundary(DENSITY))
    _trained(first, ours, 2)
    assert first.memory_bytes == second.memory_bytes == 2 * 15 * 4
    second.load_state_dict(first.state_dict())
    for stage, other in zip(ours[:2], theirs[:2], strict=True):
        thresholds = other.get_buffer("boundary_recent")
        assert int(thresholds.isfinite().sum()) == 2
        torch.testing.assert_close(thresholds, stage.get_buffer("boundary_recent"), rtol=0, atol=0, equal_nan=True)
    fewer = first.state_dict()
    del fewer["1"]
    for wrong in (fewer, {"step": 3}, {}, None, {str(i): {"boundary_recent": 0.5} for i in range(2)}):
        with pytest.raises(ValueError, match=r"got the state of boundaries .* expected"):
            second.load_state_dict(wrong)  # type: ignore[arg-type]


def test_a_boundary_is_no_function_that_makes_one() -> None:
    with pytest.raises(TypeError, match="boundary is a TopKBoundary; expected a function that makes one"):
        sparsify(_stages(), boundary=TopKBoundary(DENSITY))


def test_stages_share_no_boundary() -> None:
    stages, one = _stages(), LaplaceBoundary(DENSITY)
    with pytest.raises(ValueError, match="made the same boundary twice; expected a function that makes a new one"):
        sparsify(stages, boundary=lambda: one)
    sparsify(stages, DENSITY)
