"""SGD's momentum in the memories: settings stay with the optimizer, and every way of training is SGD's own."""

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ddp_models import SEVERAL, Branching, Gaps, Scenario, Training, digest, mlp
from ranks import Ranks, told
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.codecs import SampledThreshold, TopK
from thinwire.exchanges import AllGather
from thinwire.memories import MomentumCorrection
from thinwire.reducer import Compressed, Reducer

WHOLE: dict[str, Callable[[], Reducer]] = {
    "uncompressed": lambda: tw.recipes.dgc(minimum_size=1 << 30),
    "topk all": lambda: Compressed(memory=MomentumCorrection(), codec=TopK(density=1.0), exchange=AllGather()),
    "dgc all": lambda: tw.recipes.dgc(density=1.0, minimum_size=1),
    "threshold all, unmasked": lambda: Compressed(
        memory=MomentumCorrection(masking=False), codec=SampledThreshold(density=1.0), exchange=AllGather()
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {},
    "decay": {"weight_decay": 0.1},
    "decay alone": {"weight_decay": 0.1, "momentum": 0.0},
    "nesterov": {"nesterov": True, "weight_decay": 0.1},
    "maximize": {"maximize": True, "weight_decay": 0.1},
}
whole = pytest.mark.parametrize("recipe", WHOLE)
either = pytest.mark.parametrize("recipe", ["uncompressed", "dgc all"])
"""Where everything goes another way, and where it goes the way of what is chosen."""


def _pair(scenario: str | Scenario, recipe: str, **options: Any) -> tuple[Training, Training]:
    plain, ours = (Training(scenario, dtype=torch.float64, **options) for _ in range(2))
    ours.attach(WHOLE[recipe]())
    return plain, ours


def _apart(plain: Training, ours: Training) -> float:
    """Return how far parameters are from those of plain DDP."""
    pairs = zip(plain.model.parameters(), ours.model.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def _sgd(recipe: str, options: str) -> float:
    plain, ours = _pair("several buckets", recipe, **OPTIONS[options])
    return _apart(plain.run(range(20)), ours.run(range(20)))


@pytest.mark.grid
@pytest.mark.parametrize("options", OPTIONS)
@whole
def test_where_everything_is_sent_it_is_sgd(ranks: Ranks, recipe: str, options: str) -> None:
    assert max(ranks.run(2, _sgd, recipe, options)) < 1e-12


def _accumulated(recipe: str, options: str, synchronised: bool, make: Callable[..., nn.Module]) -> float:
    plain, ours = _pair(Scenario(make=make, microbatches=4, options=SEVERAL), recipe, **OPTIONS[options])
    for training in (plain, ours):
        for step in range(6):
            training.optimizer.zero_grad()
            if synchronised:
                for loss in training.losses(training.model, step):
                    loss().backward()
            else:
                training.backward(step)
            training.optimizer.step()
    return _apart(plain, ours)


@pytest.mark.grid
@pytest.mark.parametrize(("synchronised", "make"), [(False, mlp), (True, mlp), (True, Gaps)])
@pytest.mark.parametrize("options", OPTIONS)
@either
def test_momentum_is_applied_once_a_step(
    ranks: Ranks, recipe: str, options: str, synchronised: bool, make: Callable[..., nn.Module]
) -> None:
    assert max(ranks.run(2, _accumulated, recipe, options, synchronised, make)) < 1e-12


def _own_branch(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return model(x, left=dist.get_rank() == 0, right=dist.get_rank() == 1)


def _in_turn(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return model(x, left=(dist.get_rank() + step) % 2 == 0, right=(dist.get_rank() + step) % 2 == 1)


def _now_and_then(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return model(x, left=step % 3 == 0, right=step % 2 == dist.get_rank())


def _experts(recipe: str, options: str, call: Callable[..., Tensor], in_place: bool) -> float:
    scenario = Scenario(make=Branching, options=SEVERAL | {"find_unused_parameters": True}, call=call)
    plain, ours = _pair(scenario, recipe, **OPTIONS[options])
    for training in (plain, ours):
        for step in range(12):
            training.optimizer.zero_grad(set_to_none=not in_place)
            training.backward(step)
            training.optimizer.step()
    return _apart(plain, ours)


@pytest.mark.grid
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("call", [_own_branch, _in_turn, _now_and_then])
@pytest.mark.parametrize("options", ["momentum", "decay"])
@either
def test_what_only_some_ranks_use_is_trained_as_by_sgd(
    ranks: Ranks, recipe: str, options: str, call: Callable[..., Tensor], in_place: bool
) -> None:
    assert max(ranks.run(2, _experts, recipe, options, call, in_place)) < 1e-12


def _joined(recipe: str, options: str, initial: bool) -> float:
    plain, ours = _pair("several buckets", recipe, **OPTIONS[options])
    for training in (plain, ours):
        with Join([training.model], divide_by_initial_world_size=initial):
            for step in range(3 + 4 * dist.get_rank()):
                training.step(step)
    return _apart(plain, ours)


@pytest.mark.grid
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("options", ["momentum", "decay", "nesterov"])
@either
def test_uneven_inputs_are_trained_as_by_sgd(ranks: Ranks, recipe: str, options: str, initial: bool) -> None:
    assert max(ranks.run(2, _joined, recipe, options, initial)) < 1e-12


def _scheduled(recipe: str) -> float:
    plain, ours = _pair("several buckets", recipe, weight_decay=0.01)
    for training in (plain, ours):
        cycle = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, max_lr=0.1, total_steps=20)
        for step in range(12):
            training.optimizer.param_groups[0]["weight_decay"] = 0.01 * step
            training.step(step)
            cycle.step()
    assert training.optimizer.param_groups[0]["momentum"] not in (0.0, 0.9)
    return _apart(plain, ours)


@either
def test_schedules_of_rate_momentum_and_decay_are_followed(ranks: Ranks, recipe: str) -> None:
    assert max(ranks.run(2, _scheduled, recipe)) < 1e-12


def _post_cycle(optimizer: torch.optim.SGD) -> None:
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
    optimizer.register_step_post_hook(lambda *_: cycle.step())


def _post_decay(optimizer: torch.optim.SGD) -> None:
    def more(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] *= 1.5

    optimizer.register_step_post_hook(more)


def _pre_settings(optimizer: torch.optim.SGD) -> None:
    def change(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        group = optimizer.param_groups[0]
        group.update(lr=group["lr"] * 0.9, weight_decay=group["weight_decay"] * 1.5, momentum=0.9)

    optimizer.register_step_pre_hook(change)


def _pre_raises(optimizer: torch.optim.SGD) -> None:
    raising = iter([False, True, False, True])

    def refuse(*_: Any) -> None:
        if next(raising, False):
            raise ArithmeticError("broken")

    optimizer.register_step_pre_hook(refuse)


def _hooked(recipe: str, hook: Callable[[torch.optim.SGD], None], late: bool) -> float:
    plain, ours = (Training("several buckets", dtype=torch.float64, weight_decay=0.01) for _ in range(2))
    for training in (plain, ours):
        if not late:
            hook(training.optimizer)
        if training is ours:
            ours.attach(WHOLE[recipe]())
        if late:
            training.run(range(1))
            hook(training.optimizer)
        for step in range(1, 10):
            with contextlib.suppress(ArithmeticError):
                training.step(step)
    assert ours.optimizer.param_groups[0] | {"params": []} == plain.optimizer.param_groups[0] | {
        "params": [],
        "momentum_in_memory": ours.optimizer.param_groups[0]["momentum_in_memory"],
    }
    return _apart(plain, ours)


@pytest.mark.grid
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("hook", [_post_cycle, _post_decay, _pre_settings, _pre_raises])
@either
def test_hooks_of_your_own_see_and_set_the_optimizers_settings(
    ranks: Ranks, recipe: str, hook: Callable[[torch.optim.SGD], None], late: bool
) -> None:
    assert max(ranks.run(2, _hooked, recipe, hook, late)) < 1e-12


def _momentum_set_late(by_hook: bool) -> tuple[float, list[str]]:
    """Set momentum between backward and step: the result is as if it had been set after the step."""
    late, after = (Training("several buckets", "dgc", momentum=0.9, weight_decay=0.1) for _ in range(2))
    listener, said = logging.Handler(), list[str]()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # a listener
    logging.getLogger("thinwire").addHandler(listener)
    schedule = iter([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    if by_hook:
        late.optimizer.register_step_pre_hook(lambda *_: late.optimizer.param_groups[0].update(momentum=next(schedule)))
    for step in range(6):
        for training in (late, after):
            training.optimizer.zero_grad()
            training.backward(step)
            if training is late and not by_hook:
                late.optimizer.param_groups[0]["momentum"] = next(schedule)
            training.optimizer.step()
        after.optimizer.param_groups[0]["momentum"] = late.optimizer.param_groups[0]["momentum"]
    logging.getLogger("thinwire").removeHandler(listener)
    return _apart(late, after), said


@pytest.mark.parametrize("by_hook", [False, True])
def test_momentum_that_is_set_after_backward_waits_for_the_next_and_that_is_said(ranks: Ranks, by_hook: bool) -> None:
    ((apart, said),) = ranks.run(1, _momentum_set_late, by_hook)
    assert apart == 0
    assert len([each for each in said if "between backward and step" in each]) == 1


def _regularised(recipe: str, first: bool, closure: bool) -> float:
    """Call the backward of a regulariser of its own, before the model's or after it."""
    plain, ours = _pair("several buckets", recipe, weight_decay=0.1)
    for training in (plain, ours):

        def backward(step: int, training: Training = training) -> float:
            training.optimizer.zero_grad()
            for ours_now in (True, False):
                if ours_now == first:
                    sum(p.abs().sum() for p in training.model.parameters()).backward()  # type: ignore[union-attr]
                else:
                    training.backward(step)
            return 0.0

        for step in range(6):
            if closure:
                training.optimizer.step(partial(backward, step))
            else:
                backward(step)
                training.optimizer.step()
    return _apart(plain, ours)


@pytest.mark.parametrize("closure", [False, True])
@either
def test_what_is_added_after_the_reduction_has_no_momentum(ranks: Ranks, recipe: str, closure: bool) -> None:
    assert max(ranks.run(2, _regularised, recipe, True, closure)) < 1e-12
    for said in ranks.run(2, told, _regularised, recipe, False, closure):
        assert said.startswith("MomentumError: a second backward pass has added to the gradient of '0.weight'")


class _SGDW(torch.optim.SGD):
    """Decays by itself, and leaves the rest to SGD."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 1 - group["lr"] * group["weight_decay"])
            decay, group["weight_decay"] = group["weight_decay"], 0.0
            super().step()
            group["weight_decay"] = decay


class _Sign(torch.optim.SGD):
    """Has SGD's settings, and a step of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                p.sub_(buffer.mul_(group["momentum"]).add_(p.grad).sign(), alpha=group["lr"])


def _with_own_step(recipe: str, kind: type[torch.optim.SGD]) -> float:
    results = []
    for attaches in (False, True):
        training = Training("several buckets", dtype=torch.float64)
        training.optimizer = kind(training.model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        if attaches:
            training.attach(WHOLE[recipe]())
        results.append(training.run(range(8)))
    return _apart(*results)


@either
def test_only_a_step_that_is_sgds_counts_as_sgds(ranks: Ranks, recipe: str) -> None:
    assert max(ranks.run(2, _with_own_step, recipe, _SGDW)) < 1e-12
    for said in ranks.run(2, told, _with_own_step, recipe, _Sign):
        assert said.startswith("MomentumError: ")
        assert "_Sign has a different step" in said
        assert "whose step calls super().step()" in said


def _taken_over(recipe: str, gone: bool) -> None:
    training = Training("several buckets", dtype=torch.float64)
    training.attach(WHOLE[recipe]())
    training.run(range(2))
    kept = [] if gone else [training.optimizer]
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.05)
    training.run(range(2, 4))
    del kept


@pytest.mark.parametrize("gone", [False, True])
@either
def test_another_optimizer_cannot_take_over_without_a_word(ranks: Ranks, recipe: str, gone: bool) -> None:
    for said in ranks.run(2, told, _taken_over, recipe, gone):
        assert said.startswith(
            "MomentumError: SGD steps parameters whose momentum the recipe took from another optimizer"
        )


def _loaded_late(recipe: str) -> float:
    """Load a plain run's optimizer after attaching; its settings and buffers are taken on."""
    plain, ours = _pair("several buckets", recipe, weight_decay=0.1)
    plain.run(range(3))
    ours.model.load_state_dict(copy.deepcopy(plain.model.state_dict()))
    ours.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    return _apart(plain.run(range(3, 9)), ours.run(range(3, 9)))


@either
def test_a_plain_optimizers_state_can_be_loaded_after_attaching(ranks: Ranks, recipe: str) -> None:
    assert max(ranks.run(2, _loaded_late, recipe)) < 1e-12


def _several(recipe: str) -> float:
    plain, ours = (Training("several buckets", dtype=torch.float64) for _ in range(2))
    results = []
    for training in (plain, ours):
        named = training.parameters()
        parts = [[p for name, p in named.items() if name.startswith("0") == first] for first in (True, False)]
        optimizers = [torch.optim.SGD(part, lr=0.05, momentum=0.9, weight_decay=0.1) for part in parts]
        if training is ours:
            tw.attach(training.model, WHOLE[recipe](), optimizer=optimizers)
        for step in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
            training.backward(step)
            for optimizer in optimizers:
                optimizer.step()
        results.append(training)
    return _apart(*results)


@either
def test_several_optimizers_may_hold_the_model(ranks: Ranks, recipe: str) -> None:
    assert max(ranks.run(2, _several, recipe)) < 1e-12


class _Clipping(torch.optim.SGD):
    """Clips within its step."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1e9)
        return super().step(closure)


def _subclassed(recipe: str) -> float:
    plain, ours = _pair("several buckets", recipe, weight_decay=0.1)
    for training in (plain, ours):
        training.optimizer.__class__ = _Clipping  # its groups are as they were, and torch.optim.SGD has been made
    _Clipping([nn.Parameter(torch.zeros(1))])
    return _apart(plain.run(range(10)), ours.run(range(10)))


@either
def test_a_subclass_may_step_by_its_base_class(ranks: Ranks, recipe: str) -> None:
    assert max(ranks.run(2, _subclassed, recipe)) < 1e-12


def _sharded(recipe: str) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, at import
        from torch.distributed.optim import ZeroRedundancyOptimizer
    plain, ours = (Training("several buckets", dtype=torch.float64) for _ in range(2))
    for training in (plain, ours):
        training.optimizer = ZeroRedundancyOptimizer(  # type: ignore[assignment]
            training.model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01
        )
    ours.attach(WHOLE[recipe]())
    return _apart(plain.run(range(6)), ours.run(range(6)))


@either
def test_an_optimizer_with_sharded_state_is_served(ranks: Ranks, recipe: str) -> None:
    assert max(ranks.run(2, _sharded, recipe)) < 1e-12


def _removed(recipe: str, options: str) -> float:
    plain, ours = _pair("several buckets", recipe, **OPTIONS[options])
    ours.run(range(4)).attachment.remove()
    return _apart(plain.run(range(10)), ours.run(range(4, 10)))


@pytest.mark.grid
@pytest.mark.parametrize("options", OPTIONS)
@either
def test_the_optimizer_gets_its_momentum_back(ranks: Ranks, recipe: str, options: str) -> None:
    assert max(ranks.run(2, _removed, recipe, options)) < 1e-12


def _saved_after_removal(recipe: str, resumes: bool) -> float:
    """Remove, and load what is saved then into the same handle, or into that of a new process."""
    plain, ours = _pair("several buckets", recipe)
    ours.run(range(4)).attachment.remove()
    saved = ours.attachment.state_dict(), ours.model.state_dict(), ours.optimizer.state_dict()
    if resumes:
        ours = _pair("several buckets", recipe)[1]
        ours.model.load_state_dict(saved[1])
        ours.optimizer.load_state_dict(saved[2])
    ours.attachment.load_state_dict(saved[0])
    return _apart(plain.run(range(8)), ours.run(range(4, 8)))


@pytest.mark.parametrize("resumes", [False, True])
@either
def test_what_is_saved_after_removal_can_be_loaded(ranks: Ranks, recipe: str, resumes: bool) -> None:
    assert max(ranks.run(2, _saved_after_removal, recipe, resumes)) < 1e-12


def _removed_while_waiting() -> tuple[bool, bool]:
    """What waits beside momentum is applied at once: as if the next step had sent it."""
    training = Training("several buckets", tw.recipes.dgc(density=0.05, minimum_size=1), dtype=torch.float64)
    training.run(range(4))
    state, before = training.attachment.state_dict(), {n: p.detach().clone() for n, p in training.parameters().items()}
    training.attachment.remove()
    right = []
    for name, p in training.parameters().items():
        waited = state["memories"][0][name]["residual"].clone()
        dist.all_reduce(waited)
        right.append(torch.allclose(p.detach(), before[name] - 0.05 * waited.view_as(p), rtol=0, atol=1e-12))
    training.run(range(4, 6))
    return all(right), len({digest(training.model)}) == 1


def test_what_waits_beside_momentum_is_applied_when_it_is_removed(ranks: Ranks) -> None:
    assert ranks.run(2, _removed_while_waiting) == [(True, True)] * 2


def _numpy_momentum() -> bool:
    """numpy.float64 is a float, and torch.load refuses it unless it is told to trust the file."""
    recipe = tw.recipes.dgc(density=0.05, momentum=np.float64(0.9), minimum_size=64)
    state = Training("several buckets", recipe, momentum=0.0).attachment.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)["momentum"] == [[0.9, False]]


def test_a_momentum_from_numpy_is_saved_as_a_number(ranks: Ranks) -> None:
    assert ranks.run(1, _numpy_momentum) == [True]


# --- resuming from the optimizer alone ---


def _optimizer_alone(forget: bool, late: bool = False) -> str:
    old = Training("several buckets", tw.recipes.dgc(density=0.05, minimum_size=64)).run(range(3))
    file = io.BytesIO()
    torch.save(old.optimizer.state_dict(), file)
    file.seek(0)
    new = Training("several buckets")
    new.model.load_state_dict(old.model.state_dict())
    if late:
        attachment = new.attach(tw.recipes.dgc(density=0.05, minimum_size=64))
        new.optimizer.load_state_dict(torch.load(file))
    else:
        new.optimizer.load_state_dict(torch.load(file))
        attachment = new.attach(tw.recipes.dgc(density=0.05, minimum_size=64))
    if forget:
        attachment.forget()
        new.run(range(3, 5))
        assert attachment.verify_replicas()
    new.run(range(3, 5))
    return "trained"


def test_an_optimizer_whose_momentum_was_elsewhere_asks_for_it(ranks: Ranks) -> None:
    for late in (False, True):
        assert "load the handle's state too" in ranks.run(1, told, _optimizer_alone, False, late)[0]
    assert ranks.run(2, _optimizer_alone, True) == ["trained"] * 2


def _raising_closure() -> tuple[Any, ...]:
    training = Training("several buckets", "dgc", weight_decay=0.1).run(range(2))

    def closure() -> float:
        raise ArithmeticError("broken")

    with pytest.raises(ArithmeticError):
        training.optimizer.step(closure)
    return tuple(training.optimizer.param_groups[0][key] for key in ("momentum", "weight_decay"))


def test_a_closure_that_raises_leaves_the_settings_as_they_were(ranks: Ranks) -> None:
    assert ranks.run(1, _raising_closure) == [(0.9, 0.1)]


def _twice_attached(options: str) -> tuple[float, bool]:
    """Wrap anew and attach again while the old attachment is still held: it must leave the optimizer alone."""
    plain, ours = _pair("several buckets", "dgc all", **OPTIONS[options])
    held = ours.run(range(3)).attachment
    ours.model = DistributedDataParallel(ours.model.module, **ours.scenario.options)
    ours.attach(WHOLE["dgc all"]())
    return _apart(plain.run(range(8)), ours.run(range(3, 8))), held.ended


@pytest.mark.parametrize("options", OPTIONS)
def test_an_attachment_that_has_ended_leaves_the_optimizer_alone(ranks: Ranks, options: str) -> None:
    for apart, ended in ranks.run(2, _twice_attached, options):
        assert apart < 1e-12
        assert ended


def _own_momentum_removed() -> None:
    training = Training("several buckets", momentum=0.0)
    tw.attach(training.model, tw.recipes.dgc(momentum=0.9, density=0.05, minimum_size=64)).remove()


def test_momentum_that_nobody_can_take_back_is_not_dropped(ranks: Ranks) -> None:
    assert "there is no optimizer to hand it to" in ranks.run(1, told, _own_momentum_removed)[0]


def _step_that_raises() -> tuple[Any, ...]:
    training = Training("several buckets", "dgc", weight_decay=0.1).run(range(2))
    handle = training.optimizer.register_step_pre_hook(_raise)
    training.backward(2)
    with pytest.raises(ArithmeticError):
        training.optimizer.step()
    handle.remove()
    return tuple(training.optimizer.state_dict()["param_groups"][0][key] for key in ("momentum", "weight_decay"))


def _raise(*arguments: object) -> None:
    raise ArithmeticError("broken")


def test_a_step_that_raises_leaves_the_settings_as_they_were(ranks: Ranks) -> None:
    assert ranks.run(1, _step_that_raises) == [(0.9, 0.1)]


# --- ranks that stand differently ---


def _one_file_older(recipe: str) -> None:
    training = Training("several buckets", recipe)
    states = []
    for step in range(4):
        training.run(range(step, step + 1))
        states.append(training.attachment.state_dict())
    training.attachment.load_state_dict(states[-1 - dist.get_rank()])


def _one_loads(recipe: str) -> None:
    training = Training("several buckets", recipe).run(range(3))
    state = training.attachment.state_dict()
    model = DistributedDataParallel(copy.deepcopy(training.model.module))
    again = tw.attach(model, _RECIPES[recipe](), optimizer=None)
    if dist.get_rank() == 0:
        again.load_state_dict(state)
    model(torch.ones(2, 20)).sum().backward()


_RECIPES: dict[str, Callable[[], Reducer]] = {
    "randomk": lambda: tw.recipes.randomk(density=0.05, minimum_size=64),
    "powersgd": lambda: tw.recipes.powersgd(rank=2, start=0),
    "topk": lambda: tw.recipes.topk(density=0.05, minimum_size=64),
}


@pytest.mark.parametrize("recipe", _RECIPES)
def test_states_of_different_steps_are_refused(ranks: Ranks, recipe: str) -> None:
    for message in ranks.run(2, told, _one_file_older, recipe):
        assert message.startswith("StateError: rank 0 resumes from")


@pytest.mark.parametrize("recipe", _RECIPES)
def test_a_state_that_one_rank_alone_loads_is_refused(ranks: Ranks, recipe: str) -> None:
    for message in ranks.run(2, told, _one_loads, recipe):
        assert message.startswith("StateError: rank 0 resumes from")


def _rank_0s_file() -> None:
    training = Training("several buckets", "topk").run(range(2))
    box = [training.attachment.state_dict()]
    dist.broadcast_object_list(box, 0)
    training.attachment.load_state_dict(box[0])


def test_another_ranks_state_is_refused_by_all(ranks: Ranks) -> None:
    for message in ranks.run(2, told, _rank_0s_file):
        assert "attachment state is rank 0's, and this is rank 1" in message


def _stuck() -> str:
    training = Training("several buckets", tw.recipes.topk(density=0.05, minimum_size=64)).run(range(3))
    state = training.attachment.state_dict()
    model = DistributedDataParallel(copy.deepcopy(training.model.module))
    other = tw.attach(model, tw.recipes.topk(density=0.05, minimum_size=10**6))
    with pytest.raises(ValueError, match="minimum_size") as error:
        other.load_state_dict(state)
    return str(error.value)


def test_what_would_wait_for_ever_is_refused(ranks: Ranks) -> None:
    assert "never be sent" in ranks.run(1, _stuck)[0]
