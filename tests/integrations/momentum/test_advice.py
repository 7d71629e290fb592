"""Which optimizers are recognised, and the warnings where a recipe meets one that it does not suit."""

import copy
import logging
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.integrations.momentum.first_moments import ErrorFeedbackAdvice, family
from thinwire.integrations.replicas import asked
from thinwire.memories import ErrorFeedback, NoMemory
from thinwire.planner.candidates import INSTEAD, OptimizerName


def _made(name: str) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    return optimizer


class Lion(torch.optim.Optimizer):
    def __init__(self) -> None:
        super().__init__([nn.Parameter(torch.ones(2, 2))], {"lr": 0.1, "betas": (0.9, 0.99)})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("SGD", "sgd"),
        *((name, "adamw") for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta")),
        *((name, "adamw") for name in ("RMSprop", "Adafactor", "SparseAdam")),
        *((name, None) for name in ("LBFGS", "Rprop", "ASGD")),
        ("Muon", "muon"),
        ("Muon AdamW", "muon"),
        ("SGD AdamW", "adamw"),
        ("AdamW LBFGS", None),
        ("", None),
    ],
)
def test_an_optimizer_is_known_by_its_settings(names: str, expected: str | None) -> None:
    if any(not hasattr(torch.optim, name) for name in names.split()):
        pytest.skip("this torch lacks it")
    assert family([_made(name) for name in names.split()]) == expected


def test_what_divides_by_nothing_is_not_known() -> None:
    assert family([Lion()]) is None


def test_auto_plans_for_the_optimizer_it_is_given() -> None:
    assert asked.asked_for("auto", "adamw") == tw.Budget.under("adamw")
    assert asked.asked_for("auto", None) == tw.Budget()
    own = tw.Budget(densities=(0.1,))
    assert asked.asked_for(own, "adamw") == tw.Budget(densities=(0.1,), optimizer="adamw")
    assert asked.asked_for(tw.Budget.under("sgd"), "adamw") == tw.Budget.under("sgd"), "as the user has it"


# --- the warning ---


class Listener(logging.Handler):
    """Collects what is logged while it listens."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.said.append(record.getMessage())

    def __enter__(self) -> "Listener":
        logging.getLogger("thinwire").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("thinwire").removeHandler(self)


@pytest.mark.parametrize(
    ("optimizer", "kind", "cost", "instead"),
    [("AdamW", "adamw", 1.24, "recipes.orthogonal"), ("Muon", "muon", 1.31, "METHODS['bf16']")],
)
def test_it_says_what_it_costs_and_what_to_take_once(
    optimizer: str, kind: OptimizerName, cost: float, instead: str
) -> None:
    with Listener() as listener:
        advice = ErrorFeedbackAdvice([NoMemory(), ErrorFeedback()], 0)
        for _ in range(2):
            advice.attached(_made(optimizer))
    (text,) = listener.said
    assert text.startswith(f"{optimizer} rescales each update, so with error feedback")
    assert f"topk:0.01 ended at {cost:.2f} times" in text
    assert INSTEAD[kind] in text
    assert instead in text
    assert "; others differ" in text, "the figure is topk's, whatever was attached"


@pytest.mark.parametrize("make", [Lion, lambda: _made("Rprop")])
def test_of_what_takes_signs_nothing_is_known_and_that_is_said_once(make: Any) -> None:
    with Listener() as listener:
        advice = ErrorFeedbackAdvice([ErrorFeedback()], 0)
        for _ in range(2):
            advice.attached(make())
    (text,) = listener.said
    assert text.startswith(type(make()).__name__)
    assert "It has not been measured" in text


@pytest.mark.parametrize(
    ("memory", "optimizer", "rank"),
    [
        (NoMemory(), "AdamW", 0),
        (ErrorFeedback(), "SGD", 0),
        (ErrorFeedback(), "LBFGS", 0),
        (ErrorFeedback(), "Adam", 1),
    ],
)
def test_it_is_silent_where_nothing_starves_and_on_other_ranks(memory: Any, optimizer: str, rank: int) -> None:
    with Listener() as listener:
        ErrorFeedbackAdvice([memory], rank).attached(_made(optimizer))
    assert listener.said == []


def _trained(recipe: str, optimizer: str, given: bool) -> tuple[list[str], list[str]]:
    """Return what was said when the recipe was attached, and in three steps."""
    model = DistributedDataParallel(nn.Linear(20, 60, bias=False))  # Muon takes matrices alone
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    with Listener() as listener:
        tw.attach(model, tw.recipes.METHODS[recipe].make(), optimizer=made if given else None)
        attached, listener.said = listener.said, []
        for _ in range(3):
            made.zero_grad()
            model(torch.randn(8, 20)).square().mean().backward()
            made.step()
    return attached, listener.said


@pytest.mark.parametrize(
    ("recipe", "optimizer", "given", "expected"),
    [
        ("topk", "AdamW", True, (1, 0)),
        ("topk", "AdamW", False, (0, 1)),
        ("s2_reducer", "RMSprop", False, (0, 1)),
        ("dct_dp", "Adagrad", True, (1, 0)),
        ("topk", "SGD", False, (0, 0)),
        ("terngrad", "AdamW", True, (0, 0)),
        ("topk", "Muon", True, (1, 0)),
        ("topk", "Muon", False, (0, 1)),
    ],
)
def test_training_is_warned_once_on_the_first_rank(
    ranks: Ranks, recipe: str, optimizer: str, given: bool, expected: tuple[int, int]
) -> None:
    first, other = ranks.run(2, _trained, recipe, optimizer, given)
    assert tuple(map(len, first)) == expected
    assert other == ([], [])


# --- what arrives has lost the gradient's length ---


def _orthogonalised(optimizer: str, given: bool) -> tuple[list[str], list[str]]:
    """Return what was said when `orthogonal` was attached to a matrix, and in three steps; small tensors have AdamW."""
    model = DistributedDataParallel(nn.Linear(20, 60))
    weight, bias = model.parameters()
    made = [
        getattr(torch.optim, optimizer)([weight], lr=1e-3, **({} if given or optimizer == "SGD" else NO_MOMENTUM)),
        torch.optim.SGD([bias], lr=1e-3, momentum=0.9),
    ]
    with Listener() as listener:
        recipe = tw.recipes.orthogonal(momentum=0.9, minimum_size=100)
        tw.attach(model, recipe, optimizer=made if given else None)
        attached, listener.said = listener.said, []
        for _ in range(3):
            model(torch.randn(8, 20)).square().mean().backward()
            for each in made:
                each.step()
                each.zero_grad()
    return attached, listener.said


NO_MOMENTUM: dict[str, Any] = {"betas": (0.0, 0.9)}


@pytest.mark.parametrize(
    ("optimizer", "given", "expected"),
    [
        ("SGD", True, (1, 0)),
        ("SGD", False, (0, 1)),
        ("Muon", True, (1, 0)),
        ("AdamW", True, (0, 0)),
        ("AdamW", False, (0, 0)),
        ("Adamax", True, (0, 0)),
    ],
)
def test_orthogonal_warns_once_of_what_does_not_normalise(
    ranks: Ranks, optimizer: str, given: bool, expected: tuple[int, int]
) -> None:
    first, other = ranks.run(2, _orthogonalised, optimizer, given)
    assert tuple(map(len, first)) == expected
    assert other == ([], [])
    for text in (*first[0], *first[1]):
        assert text.startswith(f"{optimizer} ")
        assert "use AdamW" in text


def _in_mid_run(dense_steps: int, cleared: bool, given: bool) -> tuple[list[str], list[str], list[str]]:
    """Return what was said up to the first steps with `orthogonal`, on resuming them, and by `remove`."""
    betas = (0.9 if given else 0.0, 0.999)
    layer = nn.Linear(20, 60)
    made = torch.optim.AdamW(layer.parameters(), lr=1e-3, betas=betas)
    _steps(DistributedDataParallel(layer), made, dense_steps)
    made.state.clear() if cleared else None
    with Listener() as listener:
        model = DistributedDataParallel(layer)
        attachment = tw.attach(model, _mid_run_recipe(), optimizer=made if given else None)
        _steps(model, made, 3)
        begun, listener.said = listener.said, []
        other, layer = copy.deepcopy(layer), copy.deepcopy(layer)
        again = torch.optim.AdamW(other.parameters(), lr=1e-3, betas=betas)
        again.load_state_dict(made.state_dict())
        model = DistributedDataParallel(other)
        resumed = tw.attach(model, _mid_run_recipe(), optimizer=again if given else None)
        resumed.load_state_dict(attachment.state_dict())
        _steps(model, again, 2)
        gone_on, listener.said = listener.said, []
        resumed.remove()
    return begun, gone_on, listener.said


def _mid_run_recipe() -> Any:
    return tw.recipes.orthogonal(momentum=0.9, minimum_size=100)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("dense_steps", "cleared", "warned"), [(2, False, 1), (2, True, 0), (0, False, 0)])
def test_orthogonal_in_mid_run_says_what_the_second_moment_does(
    ranks: Ranks, dense_steps: int, cleared: bool, warned: int, given: bool
) -> None:
    first, other = ranks.run(2, _in_mid_run, dense_steps, cleared, given)
    assert [("too large" in text, "state.clear() before attach" in text) for text in first[0]] == [
        (True, True)
    ] * warned
    assert first[1] == [], "a run with it that goes on"
    assert sum("too small" in text and "state.clear()" in text for text in first[2]) == 1
    assert other[:2] == ([], [])


def _unasked(given: bool) -> tuple[list[str], tuple[str, ...]]:
    model = DistributedDataParallel(nn.Linear(3, 3))
    asked._say_that_none_is_known.cache_clear()
    with Listener() as listener:
        attachment = tw.attach(model, "auto", optimizer=torch.optim.AdamW(model.parameters()) if given else None)
        tw.attach(DistributedDataParallel(nn.Linear(3, 3)), "auto", optimizer=[])
    return listener.said, tuple(attachment.recipe.budget.names)  # type: ignore[attr-defined]  # it is adaptive


def test_auto_says_once_that_it_does_not_know_the_optimizer(ranks: Ranks) -> None:
    ((said, names),) = ranks.run(1, _unasked, False)
    assert len(said) == 1
    assert "attach(..., optimizer=optimizer)" in said[0]
    assert names == tw.Budget().names
    ((_, names),) = ranks.run(1, _unasked, True)
    assert names == tw.Budget.under("adamw").switchable().names
