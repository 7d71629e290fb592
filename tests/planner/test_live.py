""" "auto": what it decides, and that nothing is lost while it changes its mind."""

import copy
import logging
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ddp_models import mlp
from plans import cost, linear, profile
from ranks import RankError, Ranks, told
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.exchanges import Link
from thinwire.planner import Budget, Plan, decide, step_seconds
from thinwire.planner.decide import TOLERANCE, winner
from thinwire.planner.live import Adaptive
from thinwire.planner.live.policy import Alarm, _spans, _with_rest, _with_slower_links, decision, proposals
from thinwire.planner.live.step_log import Decided, Policy, in_words, steps
from thinwire.planner.probe.links import fit
from thinwire.reducer import Bucket, Round, Segment

SEGMENTS = (
    Segment(name="a", offset=0, length=600, shape=(600,)),
    Segment(name="b", offset=600, length=300, shape=(300,)),
    Segment(name="c", offset=900, length=100, shape=(100,)),
)
CHOICES: tuple[dict[str, str], ...] = (
    {},
    {"a": "topk:0.1", "b": "topk:0.1"},
    {"a": "doubling:0.1", "b": "topk:0.1"},
    {"b": "gtopk:0.1"},
    {"a": "fp16"},
    {"a": "topk:0.1", "c": "topk:0.1"},
    {},
    {},
)


# --- pure parts ---


def test_the_alarm_trips_on_what_lasts() -> None:
    alarm = Alarm(factor=2.0)
    assert [alarm.trips(x) for x in (1.0, 1.5, 2.5, 1.0, 2.5, 2.5)] == [False] * 5 + [True]
    falling = Alarm(factor=2.0)
    assert [falling.trips(x) for x in (1.0, 0.4, 0.4)] == [False, False, True]


def test_an_unusual_look_is_followed_by_another_at_once() -> None:
    alarm = Alarm()
    assert [(alarm.trips(x), alarm.suspicious) for x in (1.0, 5.0, 1.0)] == [
        (False, False),
        (False, True),
        (False, False),
    ]


def test_the_kinder_wins_unless_it_is_clearly_slower() -> None:
    assert winner([1.02, 1.0, 1.5], TOLERANCE) == 0
    assert winner([1.05, 1.0, 1.5], TOLERANCE) == 1
    assert winner([2.0], TOLERANCE) == 0


def test_what_races_is_the_plan_what_is_in_use_plain_ddp_and_what_comes_close() -> None:
    costs = {name: cost(nbytes=linear(share)) for name, share in (("fp16", 2.0), ("topk:0.01", 0.08))}
    slow = Link(latency=0.0, bandwidth=1e7)
    found = profile({0.1: [("w", 1_000_000), ("v", 10)]}, link=slow, costs=costs)
    budget = Budget(names=("fp16", "topk"))
    arms = proposals(found, budget, {"w": "fp16"})
    assert arms[0] == {}
    assert {"w": "fp16"} in arms
    assert any("topk:0.01" in arm.values() for arm in arms)
    assert arms == sorted(arms, key=lambda arm: "topk:0.01" in arm.values())


def test_no_more_than_four_choices_race_with_uncompressed_steps_and_the_plan_among_them() -> None:
    names = ("bf16", "qsgd", "topk:0.01", "doubling:0.01", "gtopk:0.01")
    slow = Link(latency=0.0, bandwidth=1e6)
    costs = {name: cost(nbytes=linear(0.08)) for name in names}
    found, budget = profile({0.1: [("w", 1_000_000)]}, link=slow, costs=costs, world_size=2), Budget(names=names)
    arms = proposals(found, budget, {})
    assert len(arms) == 4
    assert {} in arms
    assert decide(found, budget, tolerance=TOLERANCE).choice in arms


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_link_is_fitted_to_what_it_took(world_size: int) -> None:
    from thinwire.exchanges import AllGather, AllReduce

    link = Link(latency=1e-3, bandwidth=1e7)
    for exchange in (AllReduce(), AllGather(), None):
        points = [
            (n, link.seconds(n) if exchange is None else exchange.seconds(n, world_size, link))
            for n in (256, 4096, 65536, 1 << 20)
        ]
        found = fit(points, exchange, world_size)
        assert found.latency == pytest.approx(1e-3)
        assert found.bandwidth == pytest.approx(1e7)


def test_long_steps_are_observed_few_times() -> None:
    assert _spans(0.1) == (3, 6)
    assert _spans(2.0) == (2, 3)
    assert _spans(60.0) == (2, 2)


class _Alone:
    def mean(self, figures: list[float]) -> list[float]:
        return figures


@pytest.mark.parametrize(("compressed", "wins"), [(0.2, True), (1.0, False)])
def test_steps_far_longer_than_predicted_are_raced_against_the_plan_of_slower_links(
    compressed: float, wins: bool
) -> None:
    costs = {"topk:0.01": cost(encode=linear(1e-9), nbytes=linear(0.08))}
    fast = profile({0.1: [("w", 1_000_000)]}, link=Link(latency=0.0, bandwidth=1e12), costs=costs)
    suspected, found = _with_slower_links(fast, 1.0), _with_rest(fast, 1.0)
    assert step_seconds(suspected) == pytest.approx(1.0, rel=0.1)
    assert step_seconds(found) == pytest.approx(1.0)
    budget, ranks = Budget(names=("topk",)), cast(Any, _Alone())
    assert proposals(found, budget, {}) == [{}]
    racing = decision(found, budget, {}, "first plan", ranks, dense_seconds=1.0, suspected=suspected)
    choices, decided = [next(racing).choice], None
    while decided is None:
        try:
            log = SimpleNamespace(period=compressed if choices[-1] else 1.0)
            choices.append(racing.send(cast(Any, log)).choice)
        except StopIteration as end:
            decided = end.value
    assert {"w": "topk:0.01"} in choices
    assert bool(decided.choice) == wins
    assert decided.profile == (suspected if wins else found)


# --- nothing is lost ---


def _scripted(*choices: dict[str, str]) -> Policy[Any]:
    for choice in choices:
        yield from steps(Decided(choice, "as the script has it"), 1)
    while True:
        yield Decided({})


def _adaptive(choices: tuple[dict[str, str], ...]) -> Adaptive:
    adaptive = Adaptive(Budget(densities=(0.1,), names=("fp16", "topk", "doubling", "gtopk")), sizes=[600])
    group = dist.group.WORLD
    assert group is not None
    for candidate in adaptive.budget.candidates():
        candidate.reducer(adaptive.memories()[0]).prepare(group)
    adaptive._policy = _scripted(*choices)
    next(adaptive._policy)
    return adaptive


def _reduced(adaptive: Adaptive, flat: Tensor, step: int, dropped: frozenset[str] = frozenset()) -> bool:
    """Take a step in two buckets, as DDP would, in which no optimizer takes the gradients of those `dropped`."""
    group = dist.group.WORLD
    assert group is not None
    at = Round(step=step, group=group, scale=1 / group.size())
    futures = [adaptive.reduce(Bucket(flat=flat, segments=part), at) for part in (SEGMENTS[:2], SEGMENTS[2:])]
    finite = all(mean.finite for mean in torch.futures.wait_all(futures))
    for memory in adaptive.memories():
        memory.rollback(dropped)
        (memory.commit if finite else memory.rollback)()
    return finite


def _gradient(step: int) -> Tensor:
    return torch.randn(1000, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def _waiting(adaptive: Adaptive) -> Tensor:
    waiting = torch.zeros(1000, dtype=torch.float64)
    for name, fields in adaptive.memories()[0].state().items():
        (segment,) = (segment for segment in SEGMENTS if segment.name == name)
        waiting[segment.offset : segment.offset + segment.length] += fields["residual"].double()
    return waiting


def _through_changes() -> tuple[Tensor, Tensor, Tensor, list[set[str]]]:
    adaptive = _adaptive(CHOICES)
    means, mine = torch.zeros(2, 1000, dtype=torch.float64)
    held = []
    for step in range(len(CHOICES)):
        flat = _gradient(step)
        mine += flat.double()
        assert _reduced(adaptive, flat, step)
        means += flat.double()
        held.append(set(adaptive.memories()[0].state()))
    return means, mine, _waiting(adaptive), held


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_waits_survives_every_change_of_mind(ranks: Ranks, world_size: int) -> None:
    found = ranks.run(world_size, _through_changes)
    means = found[0][0]
    assert all(torch.equal(means, theirs) for theirs, *_ in found)
    delivered = means + sum(waiting for _, _, waiting, _ in found)
    wanted = sum(mine for _, mine, _, _ in found) / world_size
    torch.testing.assert_close(delivered, wanted, rtol=0, atol=2e-3)  # fp16 rounds
    for _, _, waiting, held in found:
        assert held == [set(), {"a", "b"}, {"a", "b"}, {"b"}, set(), {"a", "c"}, set(), set()]
        assert not waiting.any()


def _called_off() -> tuple[Tensor, Tensor, bool, Tensor]:
    adaptive = _adaptive(({}, {"a": "topk:0.1"}, {}, {}))
    for step in range(2):
        _reduced(adaptive, _gradient(step), step)
    before = _waiting(adaptive)
    spoilt = _gradient(2)
    if dist.get_rank() == 0:
        spoilt[5] = torch.nan
    finite = _reduced(adaptive, spoilt, 2)
    after = _waiting(adaptive)
    flat = _gradient(3)
    _reduced(adaptive, flat, 2)
    return before, after, finite, flat.double()


def test_a_step_called_off_releases_nothing(ranks: Ranks) -> None:
    found = ranks.run(2, _called_off)
    for before, after, finite, _ in found:
        assert not finite
        assert before.any()
        assert torch.equal(before, after)
    waited = torch.stack([before for before, *_ in found]).sum(dim=0)
    draws = [torch.randn(1000, generator=torch.Generator().manual_seed(300 + rank)) for rank in range(2)]
    mean = torch.stack(draws).mean(dim=0)
    for *_, result in found:
        torch.testing.assert_close(result, mean.double() + waited, rtol=0, atol=1e-6)


def _resting() -> tuple[set[str], set[str]]:
    adaptive = _adaptive(({}, {"a": "topk:0.1"}, {}, {}))
    _reduced(adaptive, _gradient(0), 0)
    _reduced(adaptive, _gradient(1), 1)
    _reduced(adaptive, _gradient(2), 2, dropped=frozenset({"a"}))
    kept = set(adaptive.memories()[0].state())
    _reduced(adaptive, _gradient(3), 3)
    return kept, set(adaptive.memories()[0].state())


def test_what_waits_is_released_only_by_a_gradient_that_is_taken(ranks: Ranks) -> None:
    assert ranks.run(2, _resting) == [({"a"}, set())] * 2


# --- with DDP ---


def _model() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(mlp(torch.float32), bucket_cap_mb=0.001)


def _train(model: DistributedDataParallel, count: int) -> Iterator[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(count):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


def _by_itself() -> tuple[list[str], bool, bool, int, dict[str, Any]]:
    model = _model()
    attachment = tw.attach(model, "auto")
    losses = list(_train(model, 60))
    assert isinstance(attachment.recipe, Adaptive)
    assert attachment.recipe._profile is not None
    assert attachment.recipe._profile.made["backend"] == "gloo", "which has two exchanges under way at once"
    reasons = [decision.reason for decision in attachment.recipe.history]
    return reasons, attachment.verify_replicas(), losses[-1] < losses[0], attachment.step, attachment.state_dict()


def test_without_a_recipe_it_measures_decides_and_says_why(ranks: Ranks) -> None:
    found = ranks.run(2, _by_itself)
    reasons = [reasons for reasons, *_ in found]
    assert reasons[0] == reasons[1]
    assert reasons[0]
    assert reasons[0][0].startswith("first plan: ")
    assert " ms a step, predicted " in reasons[0][0]
    assert [rest for _, *rest, _ in found] == [[True, True, 60]] * 2


def _script(*choices: dict[str, str]) -> AbstractContextManager[object]:
    """Within, whoever attaches a budget goes through these choices."""
    return patch("thinwire.planner.live.adaptive.policy", lambda *_: _scripted(*choices))


def _until_something_pays() -> tuple[list[bool], bool, int, list[float], list[float]]:
    model, plain = _model(), _model()
    with _script({}, {}, {}, {"0.weight": "topk:0.1"}, {"0.weight": "topk:0.1"}, {}, {}):
        attachment = tw.attach(model, "auto")
    hooked, losses = [], []
    for loss in _train(model, 8):
        losses.append(loss)
        hooked.append(bool(model._get_ddp_logging_data().get("comm_hook")))
    return hooked, attachment.verify_replicas(), attachment.step, losses, list(_train(plain, 8))


def test_ddp_stays_plain_until_something_pays(ranks: Ranks) -> None:
    for hooked, same, count, losses, usual in ranks.run(2, _until_something_pays):
        assert hooked == [False] * 3 + [True] * 5
        assert same
        assert count == 8
        assert losses[:4] == usual[:4]
        assert losses[5:] != usual[5:]


def _exchanging(*choices: dict[str, str]) -> Policy[Any]:
    """Go through these choices, and have ranks exchange after each step, as a policy may."""
    for decided in _scripted(*choices):
        yield decided
        dist.barrier()


def _elsewhere() -> tuple[int, bool]:
    """The first rank alone runs the model in between, with and without gradients."""
    model = _model()
    with patch("thinwire.planner.live.adaptive.policy", lambda *_: _exchanging({}, {}, {}, {"0.weight": "topk:0.1"})):
        attachment = tw.attach(model, "auto")
    x = torch.ones(3, 20)
    for step, _ in enumerate(_train(model, 6)):
        if dist.get_rank() == 0 and step > 0:  # DDP itself exchanges in the second forward pass
            model.module(x).sum().backward()
            model(x)  # without a backward
            with torch.no_grad():
                model(x)
        told = torch.ones(())
        dist.all_reduce(told)
        assert told == 2
    return attachment.step, attachment.verify_replicas()


def test_ranks_may_run_the_model_on_their_own(ranks: Ranks) -> None:
    assert ranks.run(2, _elsewhere) == [(6, True)] * 2


def _accumulated() -> int:
    model = _model()
    with _script({}, {}, {}):
        attachment = tw.attach(model, "auto")
    for _ in range(3):
        with model.no_sync():
            model(torch.ones(8, 20)).sum().backward()
        list(_train(model, 1))
    return attachment.step


def test_batches_that_ddp_does_not_reduce_are_no_steps(ranks: Ranks) -> None:
    assert ranks.run(2, _accumulated) == [3, 3]


def _updated() -> tuple[bool, bool]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(dist.get_rank()))
    before = torch.cat([p.detach().view(-1).clone() for p in model.parameters()])
    tw.plan(model, lambda: model(x).square().mean(), update=optimizer.step, budget=Budget(names=()))
    moved = not torch.equal(before, torch.cat([p.detach().view(-1) for p in model.parameters()]))
    return moved, tw.attach(model, tw.recipes.dense()).verify_replicas()


def _planned_for_adamw() -> tuple[str | None, list[str]]:
    model = _model()
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(8, 20)
    plan = tw.plan(model, lambda: model(x).square().mean(), optimizer=optimizer)
    assert not optimizer.state, "it is not stepped"
    return plan.optimizer, sorted(plan.profile.costs)


@pytest.mark.slow
def test_a_plan_that_is_given_the_optimizer_considers_what_that_bears(ranks: Ranks) -> None:
    expected = ("adamw", ["bf16", "orthogonal:0.0234375", "qsgd"])
    assert ranks.run(2, _planned_for_adamw) == [expected] * 2


def test_an_update_that_is_timed_leaves_replicas_alike(ranks: Ranks) -> None:
    assert ranks.run(2, _updated) == [(True, True)] * 2


def _copied() -> tuple[bool, bool]:
    model = _model()
    with _script({}):
        tw.attach(model, "auto")
    list(_train(model, 2))
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model.module))
    x = torch.ones(3, 20)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    return torch.equal(copies[0](x), averaged(x)), torch.equal(copies[1](x), model.module(x))


def test_a_model_that_is_looked_on_can_be_copied(ranks: Ranks) -> None:
    assert ranks.run(1, _copied) == [(True, True)]


def _uneven() -> tuple[str, bool]:
    model = _model()
    with _script({}, {}, {}):
        attachment = tw.attach(model, "auto")
    with Join([model]):
        list(_train(model, 3 + 2 * dist.get_rank()))
    return str(model._get_ddp_logging_data().get("comm_hook")), attachment.verify_replicas()


def test_uneven_inputs_install_the_hook_at_once(ranks: Ranks) -> None:
    for hook, same in ranks.run(2, _uneven):
        assert hook == "_hook"
        assert same


def _resumed() -> tuple[bool, bool, dict[str, Any]]:
    model = _model()
    with _script({}):
        attachment = tw.attach(model, "auto")
    state = attachment.state_dict()
    waiting = torch.full((800,), 0.5)
    attachment.load_state_dict(state | {"memories": [{"0.weight": {"residual": waiting}}]})
    before = model.module.get_parameter("0.weight").detach().clone()
    list(_train(model, 2))
    moved = model.module.get_parameter("0.weight").detach() - before
    plain = _model()
    list(_train(plain, 2))
    usual = plain.module.get_parameter("0.weight").detach() - before
    steps = torch.stack([moved, usual])
    return bool((steps[0] - steps[1]).mean() < -0.02), not attachment.state_dict()["memories"][0], state


def test_what_a_checkpoint_says_waits_is_sent(ranks: Ranks) -> None:
    for sent, empty, _ in ranks.run(2, _resumed):
        assert sent
        assert empty


def _alone() -> tuple[int, list[Any]]:
    model = _model()
    attachment = tw.attach(model, "auto")
    list(_train(model, 5))
    assert isinstance(attachment.recipe, Adaptive)
    return attachment.step, attachment.recipe.history


def test_one_worker_trains_and_decides_nothing(ranks: Ranks) -> None:
    assert ranks.run(1, _alone) == [(5, [])]


def _told() -> list[str]:
    records: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logger, listener = logging.getLogger("thinwire"), Listener()
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    adaptive = _adaptive(({}, {"a": "topk:0.1"}))
    for step in range(2):
        _reduced(adaptive, _gradient(step), step)
    logger.removeHandler(listener)
    return records


def test_the_first_rank_says_what_was_decided(ranks: Ranks) -> None:
    first, other = ranks.run(2, _told)
    assert first == ["step 1: as the script has it"]
    assert other == []


def test_one_tensor_is_not_called_several() -> None:
    said = in_words({"a": "qsgd", "b": "topk:0.01", "c": "qsgd"})
    assert said == "2 tensors by qsgd and 1 tensor by topk:0.01"


# --- plans that were made before ---


def _paying(pays: bool) -> Plan:
    sizes = [("0.weight", 800), ("0.bias", 40), ("2.weight", 1200), ("2.bias", 30), ("4.weight", 120), ("4.bias", 4)]
    link = Link(latency=0.0, bandwidth=1e5 if pays else 1e12)
    costs = {"topk:0.05": cost(encode=linear(1e-9), nbytes=linear(0.4))}
    return decide(
        profile({0.01: sizes}, link=link, costs=costs, world_size=2), Budget(densities=(0.05,), names=("topk",))
    )


def _with_plan(pays: bool) -> tuple[bool, bool, list[float], list[float], bool]:
    plan, model, plain = _paying(pays), _model(), _model()
    attachment = tw.attach(model, plan)
    hooked = bool(model._get_ddp_logging_data().get("comm_hook"))
    losses, usual = list(_train(model, 6)), list(_train(plain, 6))
    return plan.pays, hooked, losses, usual, attachment.verify_replicas()


def test_a_plan_that_pays_is_used(ranks: Ranks) -> None:
    for pays, hooked, losses, usual, same in ranks.run(2, _with_plan, True):
        assert (pays, hooked, same) == (True, True, True)
        assert losses != usual


def test_where_nothing_pays_ddp_stays_plain(ranks: Ranks) -> None:
    for pays, hooked, losses, usual, same in ranks.run(2, _with_plan, False):
        assert not pays
        assert not hooked
        assert same
        assert losses == usual


OTHERS = {
    "stranger": lambda: nn.Linear(3, 3),
    "dense stranger": lambda: nn.Linear(3, 3),
    "larger": lambda: nn.Sequential(*mlp(torch.float32).children(), nn.Linear(4, 4)),
    "wider": lambda: nn.Sequential(nn.Linear(20, 41), nn.Tanh(), nn.Linear(41, 30), nn.Tanh(), nn.Linear(30, 4)),
    "narrower": lambda: mlp(torch.bfloat16),
    "in company": lambda: mlp(torch.float32),
}


def _refused(what: str) -> None:
    model, plan = _model(), _paying(what != "dense stranger")
    if what == "twice":
        tw.attach(model, Budget(names=()))
        tw.attach(model, Budget(names=()))
    elif what == "word":
        tw.attach(model, "always")  # type: ignore[arg-type]
    else:
        tw.attach(DistributedDataParallel(OTHERS[what]()), plan)


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("word", "got 'always'"),
        ("stranger", "another model, where 0.bias has 40 elements in 160 bytes; here it has no gradient: plan anew"),
        ("dense stranger", "another model, where 0.bias has 40"),
        ("larger", "where 5.bias has no gradient; here it has 4 elements in 16 bytes"),
        ("wider", "where 0.bias has 40 elements in 160 bytes; here it has 41 elements in 164 bytes"),
        ("narrower", "where 0.bias has 40 elements in 160 bytes; here it has 40 elements in 80 bytes"),
        ("in company", "the plan is for 2 ranks; here are 1: plan with them, or"),
        ("twice", "already"),
    ],
)
@pytest.mark.first(4)
def test_what_cannot_be_attached_is_refused(ranks: Ranks, what: str, error: str) -> None:
    with pytest.raises(RankError, match=error):
        ranks.run(1, _refused, what)


def _planned() -> tuple[str, bool, bool, bool, bool]:
    torch.manual_seed(3)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(20, 50), nn.BatchNorm1d(50), nn.Dropout(), nn.Linear(50, 2))
    )
    x = torch.randn(8, 20)
    model(x).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    values = [g.clone() for g in gradients if g is not None]
    buffers = [b.clone() for b in model.buffers()]
    random = torch.random.get_rng_state()
    plan = tw.plan(model, lambda: model(x).square().mean(), budget=Budget(names=("fp16", "topk"), densities=(0.1,)))
    return (
        plan.verdict,
        all(
            p.grad is g and torch.equal(g, v)
            for p, g, v in zip(model.parameters(), gradients, values, strict=True)
            if g is not None
        ),
        all(torch.equal(b, v) for b, v in zip(model.buffers(), buffers, strict=True)),
        torch.equal(random, torch.random.get_rng_state()),
        {row.name for row in plan.rows} == {name for name, _ in model.module.named_parameters()}
        and plan.profile.timeline.computed > 0
        and set(plan.profile.costs) == {"fp16", "topk:0.1"},
    )


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.first(1)
def test_planning_leaves_everything_as_it_was(ranks: Ranks, world_size: int) -> None:
    found = ranks.run(world_size, _planned)
    assert len({verdict for verdict, *_ in found}) == 1
    assert all(rest == [True] * 4 for _, *rest in found)


def _at_odds(what: str) -> str:
    model, first = _model(), dist.get_rank() == 0
    x = torch.ones(3, 20)

    def step() -> Tensor:
        if what == "step" and first:
            raise KeyError("mine")
        return model(x).sum()

    def update() -> None:
        if what == "update" and first:
            raise KeyError("mine")

    budget: Any = "none" if what == "type" and first else Budget(names=("bf16",) * (what != "budget" or first))
    optimizer: Any = "adam" if what == "optimizer" and first else None
    said = told(partial(tw.plan, model, step, update=update, budget=budget, optimizer=optimizer))
    untouched = all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())
    return said if untouched and model.require_backward_grad_sync else "something is left behind"


@pytest.mark.parametrize(
    ("what", "here", "there"),
    [
        ("step", "KeyError: 'mine'", "RuntimeError: a step to be measured has failed on rank 0: KeyError: 'mine'"),
        ("update", "KeyError: 'mine'", "RuntimeError: a step to be measured has failed on rank 0: KeyError: 'mine'"),
        ("type", "TypeError: budget is 'none'", "TypeError: rank 0: budget is 'none'"),
        ("optimizer", "TypeError: optimizer is 'adam'", "TypeError: rank 0: optimizer is"),
        ("budget", "FingerprintError: budget differs: rank 0 has", "FingerprintError: budget differs: rank 0 has"),
    ],
)
def test_ranks_at_odds_about_a_plan_hear_of_it_at_once(ranks: Ranks, what: str, here: str, there: str) -> None:
    for said, expected in zip(ranks.run(2, _at_odds, what), (here, there), strict=True):
        assert said.startswith(expected), said


def _sparse_alone() -> tuple[bool, list[Any]]:
    model = DistributedDataParallel(nn.EmbeddingBag(50, 20, sparse=True))
    plan = tw.plan(model, lambda: model(torch.ones(4, 2, dtype=torch.long)).sum())
    return tw.attach(model, plan).exchanges, list(plan.rows)


def test_a_model_of_sparse_gradients_alone_has_an_empty_plan(ranks: Ranks) -> None:
    assert ranks.run(2, _sparse_alone) == [(False, [])] * 2


class _Branches(nn.Module):
    """Ranks use different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(20, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.each[dist.get_rank()](x)


def _updated_by_branches() -> tuple[list[bool], bool]:
    torch.manual_seed(0)
    model = DistributedDataParallel(_Branches(), find_unused_parameters=True)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), copy.deepcopy(model.module)
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(dist.get_rank()))
    tw.plan(model, lambda: model(x).square().mean(), update=optimizer.step, budget=Budget(names=()))
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True)]
    return moved, tw.attach(model, tw.recipes.dense()).verify_replicas()


def test_an_update_is_timed_with_means_where_ranks_use_different_parameters(ranks: Ranks) -> None:
    assert ranks.run(2, _updated_by_branches) == [([True] * 4, True)] * 2


def _step_without_a_loss() -> str:
    nothing: Any = lambda: None  # noqa: E731 - in a line
    return told(tw.plan, _model(), nothing)


def test_a_step_that_returns_no_loss_is_told(ranks: Ranks) -> None:
    assert ranks.run(1, _step_without_a_loss) == [
        "TypeError: step returned NoneType; expected the loss: one number, with a gradient"
    ]
