"""Workers that come and go in one process: nothing is lost where nothing is dropped."""

import pytest
import torch
from torch import nn

from thinwire_lab.problems.base import Batch, Problem, cross_entropy
from thinwire_lab.studies import elastic, redistribution
from thinwire_lab.studies.convergence.training import Settings


def _tiny() -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(19, 70), nn.ReLU(), nn.Linear(70, 5))

    def batch(step: int, rank: int, world: int) -> Batch:
        x = torch.randn(6, 19, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + world))
        return x, x[:, :5].argmax(1)

    return Problem(
        name="tiny",
        description="",
        model=model,
        batch=batch,
        loss=cross_entropy,
        held_out=lambda rank, world: [batch(-1, rank, world)],
        learning_rate=0.1,
    )


def _run(recipe: str, steps: int, workers: list[int], way: str = "kept") -> tuple[list[float], float]:
    settings = Settings(
        model="tiny",
        recipe=recipe,
        optimizer="sgd(momentum=0.9)",
        rate=0.02,
        schedule="constant",
        steps=steps,
        workers=0,
        seed=0,
    )
    return elastic.run(settings, _tiny(), workers, way)


RECIPES = ["topk(density=0.1)", "dgc(density=0.1)", "powersgd(rank=2, start=0)"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_phases_of_as_many_workers_are_one_run(recipe: str) -> None:
    assert _run(recipe, 4, [2, 2])[0][-1] == _run(recipe, 8, [2])[0][-1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_pending_mean_survives_other_numbers_of_workers(recipe: str) -> None:
    losses, error = _run(recipe, 4, [4, 2, 3])
    assert len(losses) == 3
    assert error < 1e-6, "memories are float32"


def test_what_is_dropped_makes_a_difference() -> None:
    ends = {way: _run("topk(density=0.1)", 4, [3, 3], way)[0][-1] for way in elastic.WAYS}
    assert len(set(ends.values())) == 3


@pytest.mark.parametrize("recipe", ["topk(density=0.05, minimum_size=0)", "fading(minimum_size=0)"])
def test_dealing_out_keeps_the_pending_mean_in_float64(recipe: str) -> None:
    saved = redistribution.states(recipe, 3)
    for count in (2, 3, 5):
        before, after, apart = redistribution.cell(saved, count)
        assert before > 0
        assert after == pytest.approx(before, rel=1e-12)
        assert apart <= 1e-12
