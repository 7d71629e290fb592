"""Momentum under "auto": it moves into the memory and back as the plan changes, and nothing is lost or doubled."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ddp_models import Training, flat
from plans import cost, linear, profile
from ranks import Ranks, told
from torch import Tensor, nn

import thinwire as tw
from thinwire.exchanges import Link
from thinwire.integrations.training.gradients import shaped_like
from thinwire.planner import Budget, candidate, decide
from thinwire.planner.live.step_log import Decided, Policy, steps
from thinwire.planner.plan import reducer

BETAS, RATE, DECAY = (0.9, 0.95), 0.01, 0.95
FADING, ORTHOGONAL, TOPK = "fading:0.0234375", "orthogonal:0.0234375", "topk:0.1"
A, B = "0.weight", "2.weight"
BUDGET = Budget(names=("fading", TOPK, "bf16"), optimizer="adamw")
CHOICES: tuple[dict[str, str], ...] = (
    {},
    {},
    {},
    {A: FADING},
    {A: FADING, B: FADING},
    {A: FADING, B: FADING},
    {B: FADING},
    {A: TOPK, B: FADING},
    {A: TOPK},
    {A: FADING},
    {A: FADING},
    {},
    {},
    {A: FADING, B: FADING},
    {B: TOPK},
    {},
)


def _scripted(choices: Sequence[Mapping[str, str]]) -> Policy[Any]:
    for choice in choices:
        yield from steps(Decided(choice, "as the script has it"), 1)
    while True:
        yield Decided(choices[-1])


def _adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=0.1, **options)


class Run:
    """A model that AdamW trains, by a script of choices."""

    def __init__(self, scenario: str = "several buckets", **options: Any) -> None:
        self.training = Training(scenario, dtype=torch.float64)
        self.adamw = _adamw(self.training.model, **options)

    def attach(self, choices: Sequence[Mapping[str, str]], scaler: torch.amp.GradScaler | None = None) -> "Run":
        with patch("thinwire.planner.live.adaptive.policy", lambda *_: _scripted(choices)):
            self.attachment = tw.attach(self.training.model, BUDGET, optimizer=self.adamw, scaler=scaler)
        return self

    def step(self, step: int) -> None:
        self.adamw.zero_grad()
        self.training.backward(step)
        self.adamw.step()

    def step_with_closure(self, step: int) -> None:
        def closure() -> float:
            self.adamw.zero_grad()
            self.training.backward(step)
            return 0.0

        self.adamw.step(closure)


class ByHand:
    """AdamW in float64, with what fades (S = Σ M_i) and what waits (R) as sums over ranks; it is told what arrives."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.p = {name: flat(p, p).clone() for name, p in parameters.items()}
        zeros = {name: torch.zeros_like(p) for name, p in self.p.items()}
        self.m, self.v, self.fades, self.waits = ({n: z.clone() for n, z in zeros.items()} for _ in range(4))
        self.choice: Mapping[str, str] = {}
        self.steps = 0

    def step(self, choice: Mapping[str, str], means: Mapping[str, Tensor], arrived: Mapping[str, Tensor]) -> float:
        """Take a step; return by how much what arrived differs from what should have, where that is known."""
        self.steps += 1
        wrong = 0.0
        for name, mean in means.items():
            self._move(name, self.choice.get(name), choice.get(name))
            wrong = max(wrong, self._arrive(name, choice.get(name), mean, arrived[name]))
            self._update(name, fades=choice.get(name) == FADING, d=arrived[name])
        self.choice = choice
        return wrong

    def _move(self, name: str, before: str | None, now: str | None) -> None:
        if now == FADING != before:
            self.fades[name] = self.m[name] / (1 - BETAS[0])
        elif before == FADING != now:
            self.m[name] = self.fades[name] * (1 - BETAS[0])

    def _arrive(self, name: str, now: str | None, mean: Tensor, arrived: Tensor) -> float:
        if now == TOPK:
            self.waits[name] += mean - arrived
            return 0.0
        mean = mean + self.waits[name]
        self.waits[name] = torch.zeros_like(mean)
        if now == FADING:
            self.fades[name] = DECAY * self.fades[name] + mean - arrived
            return 0.0
        return float((mean - arrived).abs().max())

    def _update(self, name: str, *, fades: bool, d: Tensor) -> None:
        beta, beta2 = (0.0 if fades else BETAS[0]), BETAS[1]
        self.m[name] = beta * self.m[name] + (1 - beta) * d
        self.v[name] = beta2 * self.v[name] + (1 - beta2) * d**2
        root = (self.v[name] / (1 - beta2**self.steps)).sqrt() + 1e-8
        self.p[name] *= 1 - RATE * 0.1
        self.p[name] -= RATE * self.m[name] / (1 - beta**self.steps) / root


def _means(training: Training, step: int) -> dict[str, Tensor]:
    local = training.local_gradients(step)
    means = {name: flat(local[name], p) / dist.get_world_size() for name, p in training.parameters().items()}
    for mean in means.values():
        dist.all_reduce(mean)
    return means


def _apart(run: Run, by_hand: ByHand) -> float:
    """Return by how much parameters and, where AdamW has it, momentum differ."""
    found = 0.0
    for name, p in run.training.parameters().items():
        found = max(found, float((p - shaped_like(p, by_hand.p[name])).detach().abs().max()))
        if by_hand.choice.get(name) != FADING:
            held = run.adamw.state[p]["exp_avg"]
            found = max(found, float((held - shaped_like(p, by_hand.m[name])).abs().max()))
    return found


def _follows(take: Callable[[Run, int], None], choices: Sequence[Mapping[str, str]], fused: bool) -> float:
    run = Run(fused=fused).attach(choices)
    by_hand = ByHand(run.training.parameters())
    worst = 0.0
    for step, choice in enumerate(choices):
        means = _means(run.training, step)
        take(run, step)
        arrived = {name: flat(p.grad, p) for name, p in run.training.parameters().items() if p.grad is not None}
        worst = max(worst, by_hand.step(choice, means, arrived), _apart(run, by_hand))
        assert run.adamw.param_groups[0]["betas"] == BETAS
        assert len(run.adamw.param_groups) == 1
    assert run.attachment.verify_replicas()
    return worst


@pytest.mark.parametrize("take", [Run.step, Run.step_with_closure])
@pytest.mark.parametrize("fused", [False, True])
def test_momentum_moves_with_the_plan(ranks: Ranks, take: Callable[[Run, int], None], fused: bool) -> None:
    assert max(ranks.run(2, _follows, take, CHOICES, fused)) < 1e-7


def _resumed(steps_before: int) -> tuple[float, bool]:
    """Resume where a tensor fades: a new plan begins uncompressed, and AdamW has its momentum again."""
    choices = CHOICES[:steps_before]
    run = Run().attach(choices)
    by_hand = ByHand(run.training.parameters())
    for step, choice in enumerate(choices):
        means = _means(run.training, step)
        run.step(step)
        by_hand.step(choice, means, {n: flat(p.grad, p) for n, p in run.training.parameters().items()})  # type: ignore[arg-type]  # it has one
    saved = run.training.model.state_dict(), run.adamw.state_dict(), run.attachment.state_dict()
    again = Run().attach(({},))
    again.training.model.load_state_dict(saved[0])
    again.adamw.load_state_dict(saved[1])
    again.attachment.load_state_dict(saved[2])
    worst = 0.0
    for step in range(steps_before, steps_before + 2):
        means = _means(again.training, step)
        again.step(step)
        arrived = {n: flat(p.grad, p) for n, p in again.training.parameters().items() if p.grad is not None}
        worst = max(worst, by_hand.step({}, means, arrived), _apart(again, by_hand))
    return worst, not again.attachment.waits


@pytest.mark.parametrize("steps_before", [4, 6, 8])
def test_what_faded_before_a_checkpoint_goes_back_to_the_optimizer(ranks: Ranks, steps_before: int) -> None:
    for wrong, empty in ranks.run(2, _resumed, steps_before):
        assert wrong < 1e-7
        assert empty


def _gone_back() -> float:
    """While a tensor fades, load a checkpoint from before it did: its momentum is in AdamW's state, and moves again."""
    choices: list[dict[str, str]] = [{}, {}, {B: FADING}] + [{A: FADING, B: FADING}] * 6
    run = Run().attach(choices)
    for step in range(3):
        run.step(step)
    saved = copy.deepcopy((run.training.model.state_dict(), run.adamw.state_dict(), run.attachment.state_dict()))
    momentum = {name: run.adamw.state[p]["exp_avg"].clone() for name, p in run.training.parameters().items()}
    for step in range(3, 6):
        run.step(step)
    run.training.model.load_state_dict(saved[0])
    run.adamw.load_state_dict(saved[1])
    run.attachment.load_state_dict(saved[2])
    means = _means(run.training, 6)
    run.step(6)
    p = run.training.parameters()[A]
    assert p.grad is not None
    waits = run.attachment.state_dict()["memories"][1][A]["momentum"]
    dist.all_reduce(waits)
    wanted = DECAY * flat(momentum[A], p) / (1 - BETAS[0]) + means[A] - flat(p.grad, p)
    return float((waits - wanted).abs().max())


def test_a_checkpoint_from_before_it_faded_brings_its_momentum(ranks: Ranks) -> None:
    assert max(ranks.run(2, _gone_back)) < 1e-7


def _held_alike() -> list[list[list[str]]]:
    """Load on rank 1 a state in which nothing waits, as one that has joined is given."""
    run, found = Run().attach(CHOICES[:8]), []
    for step in range(8):
        run.step(step)
    state = run.attachment.state_dict()
    if dist.get_rank():
        state["memories"] = [{} for _ in state["memories"]]
    run.attachment.load_state_dict(state)
    found.append([sorted(memory.state()) for memory in run.attachment.recipe.memories()])
    run.step(8)
    assert run.attachment.verify_replicas()
    return found


def test_ranks_decide_alike_where_one_has_nothing_waiting(ranks: Ranks) -> None:
    one, other = ranks.run(2, _held_alike)
    assert one == other
    assert any(one[0])


def _from_before() -> list[int]:
    """Load a state of version 0.1, whose "auto" had error feedback alone."""
    run = Run().attach(({},))
    state = run.attachment.state_dict()
    run.attachment.load_state_dict(state | {"fields": state["fields"][:1], "memories": state["memories"][:1]})
    with pytest.raises(ValueError, match="a different kind of memory"):
        run.attachment.load_state_dict(state | {"fields": state["fields"][1:], "memories": state["memories"][1:]})
    return [len(each["memories"]) for each in (state, run.attachment.state_dict())]


def test_a_state_from_before_it_could_fade_loads(ranks: Ranks) -> None:
    assert ranks.run(2, _from_before) == [[2, 2]] * 2


def _removed() -> float:
    run = Run().attach(CHOICES[:6])
    by_hand = ByHand(run.training.parameters())
    for step in range(8):
        means = _means(run.training, step)
        if step == 6:
            run.attachment.remove()
        run.step(step)
        arrived = {n: flat(p.grad, p) for n, p in run.training.parameters().items() if p.grad is not None}
        by_hand.step(CHOICES[step] if step < 6 else {}, means, arrived)
    return _apart(run, by_hand)


def test_remove_gives_momentum_back(ranks: Ranks) -> None:
    assert max(ranks.run(2, _removed)) < 1e-7


def _state_of_its_own(marked: bool) -> str:
    """An optimizer's state from a run in which a tensor faded asks for the attachment's; any other does not."""
    run = Run().attach(CHOICES[: 6 if marked else 3])
    for step in range(6 if marked else 3):
        run.step(step)
    again = Run().attach(({},))
    again.adamw.load_state_dict(run.adamw.state_dict())
    try:
        again.step(0)
    except tw.errors.MomentumError as error:
        return str(error)
    return ""


def test_an_optimizers_state_asks_for_what_faded(ranks: Ranks) -> None:
    assert all("momentum was in the memory" in text for text in ranks.run(2, _state_of_its_own, True))
    assert ranks.run(2, _state_of_its_own, False) == [""] * 2


def _called_off() -> float:
    """A step whose gradients are thrown away just as the plan changes changes nothing but where momentum is."""
    choices: tuple[dict[str, str], ...] = ({}, {}, {A: FADING}, {A: FADING}, {A: FADING}, {}, {}, {})
    run = Run().attach(choices)
    by_hand = ByHand(run.training.parameters())
    for step, choice in enumerate(choices):
        means = _means(run.training, step)
        if step in (2, 5):
            run.adamw.zero_grad()
            run.training.backward(step)
            run.adamw.zero_grad()
            continue
        run.step(step)
        arrived = {n: flat(p.grad, p) for n, p in run.training.parameters().items() if p.grad is not None}
        by_hand.step(choice, means, arrived)
    return _apart(run, by_hand)


def test_a_step_called_off_as_the_plan_changes(ranks: Ranks) -> None:
    assert max(ranks.run(2, _called_off)) < 1e-7


def _accumulated() -> float:
    """Two reductions a step: the choice changes between steps alone."""
    choices = [choice for choice in CHOICES for _ in range(2)]
    del choices[7]  # with DDP's hook installed, from now on changes come in the middle of a step
    run = Run().attach(choices)
    by_hand = ByHand(run.training.parameters())
    worst = 0.0
    for step in range(len(choices) // 2):
        parts = [_means(run.training, part) for part in (2 * step, 2 * step + 1)]
        run.adamw.zero_grad()
        for part in (2 * step, 2 * step + 1):
            run.training.backward(part)
        run.adamw.step()
        means = {name: parts[0][name] + parts[1][name] for name in parts[0]}
        arrived = {n: flat(p.grad, p) for n, p in run.training.parameters().items() if p.grad is not None}
        by_hand.step(choices[2 * step], means, arrived)
        worst = max(worst, _apart(run, by_hand))
    return worst


def test_a_step_of_several_reductions_goes_by_one_choice(ranks: Ranks) -> None:
    assert max(ranks.run(2, _accumulated)) < 1e-7


def _two_paces() -> tuple[float, float, bool]:
    """B's optimizer steps after two reductions, and the plan changes between them: what waits is released."""
    training = Training("several buckets", dtype=torch.float64)
    (own,) = (p for name, p in training.parameters().items() if name == B)
    fast = torch.optim.AdamW([p for p in training.model.parameters() if p is not own], lr=RATE, betas=BETAS)
    slow = torch.optim.AdamW([own], lr=RATE, betas=BETAS)
    with patch("thinwire.planner.live.adaptive.policy", lambda *_: _scripted(({}, {}, {B: FADING}, {}, {}))):
        attachment = tw.attach(training.model, BUDGET, optimizer=[fast, slow])
    for step in range(2):
        training.model.zero_grad()
        training.backward(step)
        fast.step()
        slow.step()
    momentum = flat(slow.state[own]["exp_avg"], own).clone() / (1 - BETAS[0])
    training.model.zero_grad()
    wanted = DECAY * momentum
    for step in (2, 3):
        wanted = wanted + _means(training, step)[B]
        fast.zero_grad()
        training.backward(step)
        fast.step()
    assert own.grad is not None
    wrong = float((flat(own.grad, own) - wanted).abs().max())
    slow.step()
    held = flat(slow.state[own]["exp_avg"], own)
    return wrong, float((held - (1 - BETAS[0]) * wanted).abs().max()), attachment.waits


def test_what_waits_of_a_step_that_has_begun_is_released(ranks: Ranks) -> None:
    for of_gradient, of_momentum, waits in ranks.run(2, _two_paces):
        assert of_gradient < 1e-7
        assert of_momentum < 1e-7
        assert not waits


# --- who may choose it ---


def _offered_and_said(training: Training, plan: Any, optimizer: Any, method: str) -> tuple[list[str], list[str]]:
    """Return the names of the candidates, and what was said of a method when the plan was attached."""
    said, handler = list[str](), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # a listener
    logger = logging.getLogger("thinwire")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with patch("thinwire.planner.live.adaptive.policy", lambda *_: _scripted(({},))):
            attachment = tw.attach(training.model, plan, optimizer=optimizer)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    names = [each.name for each in attachment.recipe.budget.candidates()]  # type: ignore[attr-defined]  # an Adaptive
    return names, [text for text in said if method in text]


def _offered(case: str) -> tuple[list[str], list[str]]:
    training = Training("several buckets")
    parameters = list(training.model.parameters())
    made: dict[str, Callable[[], Any]] = {
        "adamw": lambda: _adamw(training.model),
        "no momentum": lambda: torch.optim.AdamW(parameters, betas=(0.0, 0.95)),
        "nadam": lambda: torch.optim.NAdam(parameters),
        "a part": lambda: torch.optim.AdamW(parameters[1:], betas=BETAS),
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "none": lambda: None,
        "nothing": lambda: None,
        "auto": lambda: _adamw(training.model),
    }
    plan = "auto" if case in ("auto", "sgd", "nothing") else Budget.under("adamw", loss=1.05)
    return _offered_and_said(training, plan, made[case](), "fading")


@pytest.mark.parametrize(
    ("case", "offered", "said_so"),
    [
        ("adamw", True, False),
        ("no momentum", False, True),
        ("nadam", False, True),
        ("a part", False, True),
        ("sgd", False, False),
        ("none", False, True),
        ("nothing", False, False),
        ("auto", False, False),
    ],
)
def test_fading_is_offered_where_momentum_can_be_moved(ranks: Ranks, case: str, offered: bool, said_so: bool) -> None:
    names, said = ranks.run(2, _offered, case)[0]
    assert (FADING in names) == offered
    assert bool(said) == said_so


def _orthogonal_offered(named: bool) -> tuple[list[str], list[str]]:
    training = Training("several buckets")
    plan = Budget(names=("bf16", "orthogonal")) if named else "auto"
    return _offered_and_said(training, plan, _adamw(training.model), "orthogonal")


@pytest.mark.parametrize("named", [False, True])
def test_what_loses_the_gradients_length_is_not_taken_up_in_training(ranks: Ranks, named: bool) -> None:
    names, said = ranks.run(2, _orthogonal_offered, named)[0]
    assert names == (["dense", "bf16"] if named else ["dense", "bf16", "qsgd"])
    (text,) = said
    assert "a plan made beforehand by thinwire.plan" in text


def _planned_beforehand(given: bool) -> tuple[str, bool]:
    """Train with a plan that takes `orthogonal` for the large tensors; return AdamW's β₁ in a step, and if it holds."""
    training = Training("several buckets")
    tensors = [(name, p.numel()) for name, p in training.parameters().items()]
    budget = Budget.under("adamw")
    costs = {ORTHOGONAL: cost(nbytes=linear(0.08))}
    slow = Link(latency=0.0, bandwidth=1e3)
    plan = decide(profile({0.01: tensors}, link=slow, costs=costs, world_size=2), budget)
    adamw = _adamw(training.model)
    attachment = tw.attach(training.model, plan, optimizer=adamw if given else None)
    for step in range(3):
        adamw.zero_grad()
        training.backward(step)
        adamw.step()
    return ", ".join(dict.fromkeys(plan.choice.values())), attachment.verify_replicas()


def test_a_plan_made_beforehand_may_take_it(ranks: Ranks) -> None:
    assert ranks.run(2, _planned_beforehand, True) == [(ORTHOGONAL, True)] * 2
    assert "so its momentum is unknown" in ranks.run(2, told, _planned_beforehand, False)[0]


def test_candidates_of_a_kind_share_a_memory() -> None:
    both = reducer({"a": FADING, "b": "fading:0.05", "c": TOPK, "d": "topk:0.2"}).memories()
    assert [sorted(memory.fields) for memory in both if memory.stateful] == [["momentum"], ["residual"]]
    assert candidate(FADING).momentum
    assert not candidate(TOPK).momentum
