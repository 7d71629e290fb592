"""A step is what an optimizer takes: what is kept, what is dropped, and what is all one step."""

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import RECIPES
from ddp_models import SEVERAL, WIDTH, Branching, Scenario, Training, batch, digest, flat, same, sgd
from ranks import Ranks, told
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire import waits
from thinwire.integrations.attachments import attachment as attached
from thinwire.integrations.training.outcomes import Reduced
from thinwire.integrations.training.steps import Steps
from thinwire.kernels import dispatch

RATE = 0.05
LINEAR = [name for name, case in RECIPES.items() if not case.momentum and case.conserving]
STATEFUL = [name for name, case in RECIPES.items() if any(memory.stateful for memory in case.make().memories())]


class Books:
    """Keeps account, in float64, of what was offered, what was applied by SGD without momentum, and what waits."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.start = {name: flat(p, p).clone() for name, p in training.parameters().items()}
        self.offered = {name: torch.zeros_like(x) for name, x in self.start.items()}

    def offer(self, step: int, only: str = "") -> None:
        """Count this rank's gradients, for parameters whose name begins so."""
        parameters = self.training.parameters()
        for name, gradient in self.training.local_gradients(step).items():
            if name.startswith(only):
                self.offered[name] += flat(gradient, parameters[name]) / dist.get_world_size()

    def missing(self) -> float:
        """Return by how much, relative to what was offered, the sums are off. A collective."""
        state, worst = self.training.attachment.state_dict(), 0.0
        for name, p in self.training.parameters().items():
            waiting = torch.zeros_like(self.start[name])
            for memory in state["memories"]:
                if "residual" in memory.get(name, {}):
                    waiting += memory[name]["residual"] / state["loss_scale"]
            dist.all_reduce(waiting)
            dist.all_reduce(self.offered[name])
            applied = (self.start[name] - flat(p, p)) / RATE
            missing = float((self.offered[name] - applied - waiting).norm())
            worst = max(worst, missing / max(1e-3, float(self.offered[name].norm())))
        return worst


def _training(recipe: str, scenario: str | Scenario = "several buckets", **options: object) -> Training:
    return Training(scenario, recipe, dtype=torch.float64, momentum=0.0, **options)  # type: ignore[arg-type]


# --- several reductions, one step ---


def _accumulating(recipe: str, micro: int, synchronised: bool, in_place: bool) -> tuple[float, int, bool]:
    training = _training(recipe, Scenario(microbatches=micro, options=SEVERAL))
    books = Books(training)
    for step in range(4):
        books.offer(step)
        training.optimizer.zero_grad(set_to_none=not in_place)
        for place, loss in enumerate(training.losses(training.model, step)):
            with nullcontext() if synchronised or place == micro - 1 else training.model.no_sync():
                loss().backward()
        training.optimizer.step()
    return books.missing(), training.attachment.step, training.attachment.verify_replicas()


@pytest.mark.grid
@pytest.mark.parametrize(
    ("micro", "synchronised", "in_place"),
    [(1, True, True), (2, True, False), (4, True, False), (4, True, True), (3, False, False), (3, False, True)],
)
@pytest.mark.parametrize("recipe", LINEAR)
def test_nothing_is_lost_however_many_backwards_make_up_a_step(
    ranks: Ranks, recipe: str, micro: int, synchronised: bool, in_place: bool
) -> None:
    for missing, steps, alike in ranks.run(2, _accumulating, recipe, micro, synchronised, in_place):
        assert missing < 1e-12
        assert steps == 4
        assert alike


def _mixed_accumulation(recipe: str) -> float:
    """Reduce, add without reducing, reduce again; then step, and leave the gradients in place once."""
    training = _training(recipe, Scenario(microbatches=3, options=SEVERAL))
    books = Books(training)
    for step in range(3):
        books.offer(step)
        training.optimizer.zero_grad()
        for place, loss in enumerate(training.losses(training.model, step)):
            with training.model.no_sync() if place == 1 else nullcontext():
                loss().backward()
        training.optimizer.step()
    return books.missing()


@pytest.mark.parametrize("recipe", LINEAR)
def test_local_and_reduced_gradients_may_mix(ranks: Ranks, recipe: str) -> None:
    assert max(ranks.run(2, _mixed_accumulation, recipe)) < 1e-12


class _Rows(nn.Module):
    """Has gradients of few rows: what a recipe draws at random may be all zeros, although something waits."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(2000, 2, dtype=torch.float64))
        self.rest = nn.Parameter(torch.zeros(30, dtype=torch.float64))

    def forward(self, chosen: Tensor) -> Tensor:
        return self.rows[chosen].sum() * 3 + self.rest.sum()


def _means_of_zeros(views: bool, in_place: bool, skips: bool, passes: int) -> float:
    model = DistributedDataParallel(_Rows(), gradient_as_bucket_view=views)
    attachment = tw.attach(model, tw.recipes.randomk(density=0.01, minimum_size=64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    offered = torch.zeros(2000, 2, dtype=torch.float64)
    for step in range(6):
        optimizer.zero_grad(set_to_none=not in_place)
        for place in range(passes):
            generator = torch.Generator().manual_seed(1000 * dist.get_rank() + 10 * step + place)
            chosen = torch.randint(2000, (4,), generator=generator)
            model(chosen).backward()
            if not (skips and step % 3 == 2):
                offered.index_add_(0, chosen, torch.full((4, 2), 3.0 / dist.get_world_size(), dtype=torch.float64))
        if not (skips and step % 3 == 2):
            optimizer.step()
    optimizer.zero_grad(set_to_none=not in_place)
    attachment.drop_step()
    waiting = attachment.recipe.memories()[-1].state()["rows"]["residual"].clone().view(2000, 2)
    dist.all_reduce(waiting)
    dist.all_reduce(offered)
    return float((offered + model.module.rows.detach() - waiting).abs().max())  # lr = 1


@pytest.mark.grid
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("views", [False, True])
def test_a_mean_of_zeros_is_not_a_gradient_that_was_zeroed(
    ranks: Ranks, views: bool, in_place: bool, skips: bool, passes: int
) -> None:
    assert max(ranks.run(2, _means_of_zeros, views, in_place, skips, passes)) < 1e-12


def _nothing_arrives(recipe: str) -> list[str]:
    training = Training("several buckets", recipe)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(8):
            training.optimizer.zero_grad()
            (training.losses(training.model, step)[0]() * 0.0).backward()
            training.optimizer.step()
    return [str(each.message) for each in found]


@pytest.mark.parametrize("recipe", ["dense", "topk", "dgc", "powersgd"])
def test_zeros_and_nothing_else_are_said_once(ranks: Ranks, recipe: str) -> None:
    for said in ranks.run(2, _nothing_arrives, recipe):
        (message,) = said
        assert "the last 5 reductions returned only zeros" in message


def _unused_while_accumulating(recipe: str, in_place: bool) -> float:
    """Use a branch in the first of two backwards only, and on one rank only; reduce both."""

    def call(model: nn.Module, x: Tensor, step: int) -> Tensor:
        first = bool(x[0, 0] == training_first[0])
        return model(x, left=first and dist.get_rank() == 0, right=step % 2 == 0 and first)

    training_first: list[Tensor] = [torch.zeros(())]
    scenario = Scenario(make=Branching, options=SEVERAL | {"find_unused_parameters": True}, call=call, microbatches=2)
    training = _training(recipe, scenario)
    books = Books(training)
    for step in range(4):
        training_first[0] = batch(step, 0, torch.float64)[0, 0]
        books.offer(step)
        training.optimizer.zero_grad(set_to_none=not in_place)
        for loss in training.losses(training.model, step):
            loss().backward()
        training.optimizer.step()
    return books.missing()


@pytest.mark.grid
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("recipe", LINEAR)
def test_a_branch_may_be_used_in_one_part_of_a_step_only(ranks: Ranks, recipe: str, in_place: bool) -> None:
    assert max(ranks.run(2, _unused_while_accumulating, recipe, in_place)) < 1e-12


# --- gradients that are thrown away ---


def _thrown_away(recipe: str, in_place: bool) -> tuple[bool, bool]:
    training = Training("several buckets", recipe).run(range(3))
    before = training.attachment.state_dict()
    for step in range(10, 12):
        training.optimizer.zero_grad(set_to_none=not in_place)
        training.backward(step)
    training.optimizer.zero_grad(set_to_none=not in_place)
    with training.model.no_sync():  # looks at what has become of them
        training.losses(training.model, 12)[0]().backward()
    after = training.attachment.state_dict()
    kept = same(after, before | {"step": after["step"], "draw": after["draw"]})
    training.run(range(3, 5))
    return kept, training.attachment.verify_replicas()


@pytest.mark.grid
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("recipe", STATEFUL)
def test_gradients_that_are_thrown_away_leave_every_memory_as_it_was(ranks: Ranks, recipe: str, in_place: bool) -> None:
    assert ranks.run(2, _thrown_away, recipe, in_place) == [(True, True)] * 2


def _skipped_by_hand(recipe: str, scenario: str, in_place: bool, half: bool) -> float:
    """Skip some steps, or with `half` only one of two optimizers' part of them."""
    training = _training(recipe, scenario)
    *first, rest = _halves(training) if half else [training.optimizer]
    books = Books(training)
    for step in range(6):
        training.optimizer.zero_grad(set_to_none=not in_place)
        skipped = step in (0, 4)
        if half or not skipped:
            books.offer(step, only="0" if skipped else "")
        training.backward(step)
        for optimizer in first if skipped else [*first, rest]:
            optimizer.step()
    return books.missing()


@pytest.mark.parametrize(
    ("scenario", "in_place", "half"),
    [
        ("several buckets", False, False),
        ("several buckets", False, True),
        ("bucket views", True, False),
        ("bucket views", True, True),
        ("unused", True, False),
    ],
)
@pytest.mark.parametrize("recipe", LINEAR)
def test_a_step_skipped_by_hand_is_called_off(
    ranks: Ranks, recipe: str, scenario: str, in_place: bool, half: bool
) -> None:
    assert max(ranks.run(2, _skipped_by_hand, recipe, scenario, in_place, half)) < 1e-12


def _all_overflow() -> list[tuple[int, int]]:
    """Have a GradScaler skip steps in which no gradient is finite; return what is saved as the step, and the step."""
    training = Training("several buckets", "topk", momentum=0.0).run(range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    found = []
    for step in (2, 3):
        training.optimizer.zero_grad()
        scaler.scale(training.losses(training.model, step)[0]() * torch.inf).backward()
        scaler.step(training.optimizer)
        scaler.update(1.0)
        found.append((training.attachment.state_dict()["step"], training.attachment.step))
    return found


def test_a_step_of_which_nothing_is_finite_is_counted_once_it_is_over(ranks: Ranks) -> None:
    assert ranks.run(2, _all_overflow) == [[(3, 3), (4, 4)]] * 2


def _said(recipe: str, keep: bool) -> bool:
    training = Training("several buckets", recipe).run(range(2))
    before = training.attachment.state_dict()
    training.optimizer.zero_grad()
    training.backward(2)
    (training.attachment.keep_step if keep else training.attachment.drop_step)()
    return same(training.attachment.state_dict()["memories"], before["memories"])


@pytest.mark.parametrize("recipe", STATEFUL)
def test_a_step_can_be_kept_or_dropped_by_word(ranks: Ranks, recipe: str) -> None:
    assert ranks.run(2, _said, recipe, True) == [False] * 2
    assert ranks.run(2, _said, recipe, False) == [True] * 2


def _kept_by_word(recipe: str) -> float:
    """Let something else apply gradients, of a branch only in every other step."""
    training = _training(recipe, "unused")
    books = Books(training)
    for step in range(6):
        books.offer(step)
        training.model.zero_grad()
        training.backward(step)
        gradients = training.gradients()
        for name, p in training.parameters().items():
            p.data.sub_(gradients.get(name, torch.zeros_like(p)), alpha=RATE)
        training.attachment.keep_step()
    return books.missing()


@pytest.mark.parametrize("recipe", LINEAR)
def test_what_is_kept_by_word_is_what_had_a_gradient(ranks: Ranks, recipe: str) -> None:
    assert max(ranks.run(2, _kept_by_word, recipe)) < 1e-12


# --- parts of a step ---


def _halves(training: Training) -> tuple[torch.optim.SGD, torch.optim.SGD]:
    first = [p for name, p in training.parameters().items() if name.startswith("0")]
    rest = [p for name, p in training.parameters().items() if not name.startswith("0")]
    return torch.optim.SGD(first, lr=RATE), torch.optim.SGD(rest, lr=RATE)


def _one_of_two_skipped(recipe: str) -> float:
    training = Training("several buckets", dtype=torch.float64, momentum=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    training.scaler = scaler
    training.attach(recipe)
    first, rest = _halves(training)
    books = Books(training)
    for step in range(6):
        first.zero_grad()
        rest.zero_grad()
        bad = step in (2, 3)
        books.offer(step, only="0" if bad else "")
        p = training.parameters()["4.weight"]
        handle = p.register_hook(lambda g: g * torch.inf) if bad and dist.get_rank() == 1 else None
        training.backward(step)
        if handle is not None:
            handle.remove()
        scaler.step(first)
        scaler.step(rest)
        scaler.update()
    return books.missing()


@pytest.mark.parametrize("recipe", LINEAR)
def test_an_optimizer_that_is_skipped_calls_off_its_own_parameters_only(ranks: Ranks, recipe: str) -> None:
    assert max(ranks.run(2, _one_of_two_skipped, recipe)) < 1e-12


def _one_steps_less_often(recipe: str) -> float:
    """Let one optimizer step every other time, its gradients adding up in between."""
    training = _training(recipe)
    first, rest = _halves(training)
    books = Books(training)
    for step in range(6):
        first.zero_grad()
        books.offer(step)
        training.backward(step)
        first.step()
        if step % 2:
            rest.step()
            rest.zero_grad()
    return books.missing()


@pytest.mark.parametrize("recipe", LINEAR)
def test_optimizers_may_step_at_different_times(ranks: Ranks, recipe: str) -> None:
    assert max(ranks.run(2, _one_steps_less_often, recipe)) < 1e-12


def _blocks(recipe: str, in_place: bool) -> float:
    """Train one block at a time: the optimizer's parameters are exchanged for as many others."""
    training = _training(recipe)
    named = training.parameters()
    blocks = {name: [named[f"{name}.weight"], named[f"{name}.bias"]] for name in ("0", "2", "4")}
    optimizer = torch.optim.SGD(blocks["0"], lr=RATE)
    books = Books(training)
    for step in range(9):
        only = str(step // 2 % 3 * 2)
        if in_place:
            optimizer.param_groups[0]["params"][:] = blocks[only]
        else:
            optimizer.param_groups.clear()
            optimizer.add_param_group({"params": blocks[only]})
        training.optimizer.zero_grad()
        books.offer(step, only)
        training.backward(step)
        optimizer.step()
    training.attachment.drop_step()
    return books.missing()


@pytest.mark.grid
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("recipe", LINEAR)
def test_the_parameters_of_an_optimizer_may_change(ranks: Ranks, recipe: str, in_place: bool) -> None:
    assert max(ranks.run(2, _blocks, recipe, in_place)) < 1e-12


def _mended(recipe: str) -> float:
    """Step with gradients of which those that were not finite are set to zero: what else there was is applied."""
    training = _training(recipe)
    books = Books(training)
    for step in range(6):
        bad = step in (2, 3)
        training.optimizer.zero_grad()
        for only in ("0", "2") if bad else ("",):
            books.offer(step, only)
        p = training.parameters()["4.weight"]
        handles = [q.register_hook(lambda g: g * torch.nan) for q in (p, training.parameters()["4.bias"])]
        if not bad:
            for handle in handles:
                handle.remove()
        training.backward(step)
        for handle in handles:
            handle.remove()
        for q in training.parameters().values():
            assert q.grad is not None
            q.grad.nan_to_num_(0, 0, 0)
        training.optimizer.step()
    return books.missing()


@pytest.mark.parametrize("recipe", LINEAR)
def test_what_is_not_finite_calls_off_its_own_parameters_only(ranks: Ranks, recipe: str) -> None:
    assert max(ranks.run(2, _mended, recipe)) < 1e-12


# --- gradients that nobody exchanged ---


def _around(training: Training, step: int) -> None:
    """Go around DDP's forward."""
    training.losses(training.model.module, step)[0]().backward()


def _for_ever_local(training: Training, step: int) -> None:
    with training.model.no_sync():
        training.backward(step)


def _within_backward(training: Training, step: int) -> None:
    """Step each parameter as soon as its gradient is there, and before DDP has it."""
    for p in training.parameters().values():
        p.register_post_accumulate_grad_hook(lambda p: training.optimizer.step())
    training.backward(step)


def _step(training: Training, backward: Callable[[Training, int], None], step: int) -> None:
    backward(training, step)
    training.optimizer.step()


def _unreduced(recipe: str, backward: Callable[[Training, int], None]) -> list[str]:
    training, said = Training("several buckets", recipe), []
    for step in range(3):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            training.optimizer.zero_grad()
            said.append(told(_step, training, backward, step))
        said += [str(each.message) for each in found if "never reduced" in str(each.message)]
        if backward is _within_backward:
            break
    return said


@pytest.mark.grid
@pytest.mark.parametrize("backward", [_around, _for_ever_local, _within_backward])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_that_no_reduction_made_are_said(
    ranks: Ranks, recipe: str, backward: Callable[[Training, int], None]
) -> None:
    for said in ranks.run(2, _unreduced, recipe, backward):
        if RECIPES[recipe].momentum:
            assert all(each.startswith("MomentumError: an optimizer applies gradients of") for each in said)
        else:
            (warned,) = (each for each in said if each != "nothing")
            assert "leave no_sync()" in warned


def _unused(recipe: str) -> str:
    """Step on a model of which layers are not used, as far as attach is to blame: DDP's own error comes later."""
    model = DistributedDataParallel(Branching(torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    tw.attach(model, RECIPES[recipe].make(), optimizer=optimizer if RECIPES[recipe].momentum else None)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(batch(0, 0, torch.float64), left=True).sum().backward()
        return "".join([told(optimizer.step), *(str(each.message) for each in found)])


@pytest.mark.parametrize("recipe", ["topk", "dgc"])
def test_layers_without_gradients_that_ddp_waits_for_are_named(ranks: Ranks, recipe: str) -> None:
    for said in ranks.run(2, _unused, recipe):
        assert "if DDP waits for 'right.weight', 'right.bias', 'never.weight' and 1 more" in said
        assert "wrap the module in DDP with find_unused_parameters=True" in said


def _late(recipe: str) -> str:
    """Thaw a layer, or add one, once ranks are at work."""
    training = Training("several buckets", dtype=torch.float64, momentum=0.0)
    frozen = training.parameters()["0.weight"].requires_grad_(False)
    training.model = DistributedDataParallel(training.model.module)
    training.attach(recipe)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        training.step(0)
        assert not found
        frozen.requires_grad_(True)
        training.step(1)
        training.step(2)
    (message,) = found
    return str(message.message)


@pytest.mark.parametrize("recipe", ["dense", "topk", "powersgd"])
def test_parameters_that_thaw_too_late_are_said_once(ranks: Ranks, recipe: str) -> None:
    assert "'0.weight', which were unfrozen or added" in ranks.run(2, _late, recipe)[0]


def _taken_twice(unread: bool) -> list[str]:
    """With `unread` main memory counts as a GPU's: a step is read when the next one begins."""
    with warnings.catch_warnings(record=True) as found, pytest.MonkeyPatch.context() as patch:
        if unread:
            patch.setattr(waits, "HOST", frozenset())
            patch.setattr(dispatch, "_ONLY_REFERENCE", True)
        training = Training("several buckets", "dgc", scaler=torch.amp.GradScaler("cpu"))
        warnings.simplefilter("always")
        training.run(range(2))
        assert not found
        training.optimizer.step()
        training.optimizer.step()
    return [str(each.message) for each in found]


@pytest.mark.parametrize("unread", [False, True])
def test_a_step_by_a_gradient_that_is_taken_is_said_where_momentum_has_moved(ranks: Ranks, unread: bool) -> None:
    (message,) = ranks.run(1, _taken_twice, unread)[0]
    assert "SGD steps twice on one gradient" in message


def _follows_then_scales() -> list[str]:
    """Return what is done, in order, where the loss scale has grown after a step that was called off."""
    model, done, scaler = DistributedDataParallel(nn.Linear(WIDTH, 60)), list[str](), torch.amp.GradScaler("cpu")
    handle = tw.attach(model, tw.recipes.topk(), scaler=scaler)
    handle._gpus = {torch.device("cpu")}
    with (
        patch.object(attached, "follow_all", lambda gpu: done.append("follows")),
        patch.object(handle.membership, "follow_loss_scale", lambda scale: done.append("scales")),
    ):
        for step in range(2):
            model.zero_grad()
            scaler.scale(model(batch(step, 0, torch.float32)).square().mean()).backward()
            scaler.update(2.0 * scaler.get_scale())
    return done


def test_residuals_are_scaled_once_a_gpu_has_ended_what_was_called_off(ranks: Ranks) -> None:
    assert ranks.run(1, _follows_then_scales) == [["follows", "scales"] * 2]


def _scaled(limit: float | None, knows: bool, scales: bool, clips: bool, views: bool) -> list[str]:
    """Return what is said of 20 steps by `dgc`, with limit 0 without momentum, or by `topk` with limit -1."""
    model = DistributedDataParallel(nn.Linear(WIDTH, 60), gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.0 if limit == 0 else 0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=scales)
    recipe = tw.recipes.topk() if limit == -1 else tw.recipes.dgc(clip_norm=limit or None)
    tw.attach(model, recipe, optimizer=None if limit == -1 else optimizer, scaler=scaler if knows else None)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(20):
            optimizer.zero_grad()
            scaler.scale(model(batch(step, 0, torch.float32)).square().mean()).backward()
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return [str(each.message) for each in found]


@pytest.mark.parametrize("views", [False, True])
def test_a_scaler_that_is_not_known_and_late_clipping_are_said_once(ranks: Ranks, views: bool) -> None:
    def said(limit: float | None, *, knows: bool, scales: bool, clips: bool) -> list[str]:
        return ranks.run(1, _scaled, limit, knows, scales, clips, views)[0]

    for limit in (None, -1):
        assert not said(limit, knows=True, scales=True, clips=False)
        assert not said(limit, knows=False, scales=False, clips=False)
        (unknown,) = said(limit, knows=False, scales=True, clips=False)
        assert "a GradScaler has SGD step, and thinwire was not given it" in unknown
    for scales in (False, True):
        (late,) = said(None, knows=True, scales=scales, clips=True)
        assert late.startswith("the gradients of 'weight', 'bias' were written to between backward and the optimizer's")
        assert not said(0.1, knows=True, scales=scales, clips=True)
        assert not said(-1, knows=True, scales=scales, clips=True)
        assert not said(0, knows=True, scales=scales, clips=True)


# --- states that are loaded while something waits ---


def _saved(training: Training) -> dict[str, Any]:
    model, optimizer, handle = training.model.state_dict(), training.optimizer.state_dict(), training.attachment
    return copy.deepcopy({"model": model, "optimizer": optimizer, "handle": handle.state_dict()})


def _load(training: Training, saved: dict[str, Any], *parts: str) -> None:
    held: dict[str, Any] = {"handle": training.attachment, "model": training.model, "optimizer": training.optimizer}
    for part in parts:
        held[part].load_state_dict(saved[part])


def _rolled_back(recipe: str) -> dict[str, str]:
    training = Training("several buckets", recipe)
    if RECIPES[recipe].method.name == "powersgd":
        training.run(range(2))  # nothing waits before it starts
    saved = _saved(training.run(range(2, 4)))
    training.run(range(4, 6))

    def go_on() -> str:
        return told(lambda: training.run(range(6, 8)))

    said = {}
    _load(training, saved, "model")
    said["model"], said["model, again"] = go_on(), go_on()
    training.model.eval()  # as with frozen dropout: refused before DDP's backward, which does not survive an error
    said["model, again"] += go_on()
    training.model.train()
    _load(training, saved, "handle")
    said["and then the handle"] = go_on()
    _load(training, saved, "optimizer")
    said["optimizer"] = go_on()
    training.attachment.forget()
    said["and then forget"] = go_on()
    _load(training, saved, "handle", "model", "optimizer")
    said["the handle first"] = go_on()
    _load(training, saved, "model", "optimizer", "handle")
    said["the handle last"] = go_on()
    here = _saved(training)
    _load(training, saved, "model")
    _load(training, here, "model", "optimizer")
    said["put back"] = go_on()
    _load(training, saved, "model")
    _load(training, {"handle": training.attachment.state_dict()}, "handle")
    said["what waits kept"] = go_on()
    twin = Training("several buckets", recipe)
    _load(twin, saved, "handle", "model", "optimizer")
    said["resumed"] = told(lambda: twin.run(range(6, 8)))
    return said


@pytest.mark.parametrize("recipe", STATEFUL)
def test_a_state_that_is_loaded_while_something_waits_is_refused(ranks: Ranks, recipe: str) -> None:
    for said in ranks.run(2, _rolled_back, recipe):
        refused = {order for order, words in said.items() if words != "nothing"}
        assert refused - {"optimizer"} == {"model", "model, again"}
        assert RECIPES[recipe].momentum or "optimizer" in refused  # it has nothing to load where all momentum has moved
        assert all("with load_state_dict, or drop the residuals with forget()" in said[order] for order in refused)


# --- no optimizer, or an unusual one ---


def _in_place(p: Tensor, gradient: Tensor) -> None:
    p.sub_(gradient, alpha=RATE)


def _in_place_of_data(p: Tensor, gradient: Tensor) -> None:
    p.data.sub_(gradient, alpha=RATE)


def _by_new_data(p: Tensor, gradient: Tensor) -> None:
    p.data = p.data - RATE * gradient


def _by_hand(recipe: str, update: Callable[[Tensor, Tensor], None]) -> float:
    training = Training("several buckets", dtype=torch.float64)
    training.attachment = tw.attach(training.model, RECIPES[recipe].make())
    books = Books(training)
    for step in range(5):
        books.offer(step)
        training.backward(step)
        with torch.no_grad():
            for p in training.parameters().values():
                assert p.grad is not None
                update(p, p.grad)
                p.grad = None
    with training.model.no_sync():
        training.losses(training.model, 9)[0]().backward()
    return books.missing()


@pytest.mark.grid
@pytest.mark.parametrize("update", [_in_place, _in_place_of_data, _by_new_data])
@pytest.mark.parametrize("recipe", LINEAR)
def test_parameters_may_be_updated_by_hand(ranks: Ranks, recipe: str, update: Callable[[Tensor, Tensor], None]) -> None:
    assert max(ranks.run(2, _by_hand, recipe, update)) < 1e-12


def _unclaimed() -> str:
    training = Training("several buckets", "topk")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(6):
            training.optimizer.zero_grad()
            training.backward(step)
    (message,) = found
    return str(message.message)


def test_gradients_that_nobody_takes_are_said_once(ranks: Ranks) -> None:
    assert "keep_step()" in ranks.run(1, _unclaimed)[0]


def _perturbed(recipe: str) -> float:
    """Go uphill by the first gradient, take a second one there, come back, and step by that: SAM."""
    training = _training(recipe)
    books, parameters = Books(training), list(training.parameters().values())
    for step in range(4):
        training.optimizer.zero_grad()
        training.backward(step)
        uphill = [0.05 * p.grad for p in parameters if p.grad is not None]
        with torch.no_grad():
            for p, way in zip(parameters, uphill, strict=True):
                p.add_(way)
        training.optimizer.zero_grad()
        books.offer(step)
        training.backward(step)
        with torch.no_grad():
            for p, way in zip(parameters, uphill, strict=True):
                p.sub_(way)
        training.optimizer.step()
    return books.missing()


@pytest.mark.parametrize("recipe", LINEAR)
def test_what_moves_the_parameters_of_an_optimizer_before_it_steps_takes_nothing(ranks: Ranks, recipe: str) -> None:
    assert max(ranks.run(2, _perturbed, recipe)) < 1e-12


class _Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, as many do: without calling its base class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = optimizer, optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def _wrapped_optimizer() -> str:
    training = Training("several buckets")
    wrapped = _Lookahead(training.optimizer)
    return told(lambda: tw.attach(training.model, RECIPES["topk"].make(), optimizer=wrapped))


def test_an_optimizer_that_wraps_another_is_refused_with_the_inner_one(ranks: Ranks) -> None:
    assert "give the inner one, .inner" in ranks.run(1, _wrapped_optimizer)[0]


def _with_closure(recipe: str) -> float:
    training = _training(recipe)
    books = Books(training)
    for step in range(4):
        books.offer(step)

        def closure(step: int = step) -> Tensor:
            training.optimizer.zero_grad()
            loss = training.losses(training.model, step)[0]()
            loss.backward()
            return loss

        training.optimizer.step(closure)
    return books.missing()


@pytest.mark.parametrize("recipe", LINEAR)
def test_an_optimizer_may_evaluate_a_closure(ranks: Ranks, recipe: str) -> None:
    assert max(ranks.run(2, _with_closure, recipe)) < 1e-12


class _Tidy(torch.optim.SGD):
    """Zeroes gradients within its step, also if it leaves the rest out; with a `hook`, that does."""

    left_out = hook = False

    def step(self, closure: Any = None) -> Any:
        loss = None if self.left_out else super().step(closure)
        if not self.hook:
            self.zero_grad()
        return loss


def _fails(*_: object) -> None:
    raise OverflowError


def _tidied(recipe: str, how: str) -> tuple[bool, bool]:
    """Zero gradients within steps, and after them: return whether parameters and memories are the same."""
    fused = how == "fused"
    plain, tidy = Training("several buckets", recipe, fused=fused), Training("several buckets")
    optimizer = _Tidy(tidy.model.parameters(), lr=RATE, momentum=0.9, fused=fused)
    optimizer.hook = "hook" in how
    if optimizer.hook:
        optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    if how == "hook that raises":
        optimizer.register_step_post_hook(_fails)
    tidy.optimizer = optimizer
    tidy.attach(recipe)
    for step in range(6):
        optimizer.left_out = not optimizer.hook and step == 3
        plain.backward(step)
        if not optimizer.left_out:
            plain.optimizer.step()
        plain.optimizer.zero_grad()
        tidy.backward(step)
        with suppress(OverflowError):
            optimizer.step()
    states = [each.attachment.state_dict()["memories"] for each in (plain, tidy)]
    return digest(plain.model) == digest(tidy.model), same(*states)


@pytest.mark.grid
@pytest.mark.parametrize("how", ["class", "fused", "hook", "hook that raises"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_may_be_zeroed_before_a_step_is_over(ranks: Ranks, recipe: str, how: str) -> None:
    assert ranks.run(2, _tidied, recipe, how) == [(True, True)] * 2


def _lbfgs(recipe: str) -> tuple[bool, bool]:
    training = Training("several buckets")
    training.optimizer = torch.optim.LBFGS(training.model.parameters(), max_iter=3)  # type: ignore[assignment]
    training.attachment = tw.attach(training.model, RECIPES[recipe].make())

    def closure() -> Tensor:
        training.optimizer.zero_grad()
        loss = training.losses(training.model, 0)[0]()
        loss.backward()
        return loss

    try:
        training.optimizer.step(closure)
    except RuntimeError as error:
        return "recipes.dense()" in str(error), training.attachment.waits
    return False, training.attachment.waits


@pytest.mark.parametrize("recipe", RECIPES)
def test_lbfgs_is_refused_where_something_waits(ranks: Ranks, recipe: str) -> None:
    if RECIPES[recipe].momentum:
        return
    refused = any(memory.stateful for memory in RECIPES[recipe].make().memories())
    assert ranks.run(2, _lbfgs, recipe) == [(refused, False)] * 2


# --- wrapping anew ---


def _wrapped_anew(recipe: str) -> tuple[str, str]:
    training, twin = (Training("several buckets", recipe, weight_decay=0.01).run(range(3)) for _ in range(2))
    old = training.model
    training.model = DistributedDataParallel(old.module, **training.scenario.options)
    training.attach(recipe)
    del old
    return digest(training.run(range(3, 6)).model), digest(twin.run(range(3, 6)).model)


@pytest.mark.parametrize("recipe", RECIPES)
def test_wrapping_anew_and_attaching_again_changes_nothing(ranks: Ranks, recipe: str) -> None:
    for again, straight in ranks.run(2, _wrapped_anew, recipe):
        assert again == straight


def _wrapped_anew_after_a_skip(recipe: str) -> bool:
    """Skip a step in which one rank alone has used a branch, and zero its gradients in place."""

    def call(model: nn.Module, x: Tensor, step: int) -> Tensor:
        return model(x, left=step < 2 or dist.get_rank() == 0, right=False)

    options = SEVERAL | {"find_unused_parameters": True}
    training = Training(Scenario(make=Branching, options=options, call=call), recipe).run(range(2))
    before = training.attachment.state_dict()["memories"]
    training.optimizer.zero_grad()
    training.backward(2)
    training.optimizer.zero_grad(set_to_none=False)
    training.model = DistributedDataParallel(training.model.module, **training.scenario.options)
    training.attach(recipe)
    return same(training.attachment.state_dict()["memories"], before)


@pytest.mark.parametrize("recipe", STATEFUL)
def test_wrapping_anew_after_a_skipped_step_takes_nothing_of_it_over(ranks: Ranks, recipe: str) -> None:
    assert ranks.run(2, _wrapped_anew_after_a_skip, recipe) == [True, True]


def _forgotten_handle(recipe: str) -> float:
    """Drop the attachment and the wrapper: what waits lives on with the optimizer."""
    training = _training(recipe)
    books = Books(training)
    for step in range(6):
        if step == 3:
            module = training.model.module
            del training.attachment, training.model
            training.model = DistributedDataParallel(module, **training.scenario.options)
            training.attach(recipe)
        books.offer(step)
        training.step(step)
    return books.missing()


@pytest.mark.parametrize("recipe", LINEAR)
def test_what_waits_outlives_the_wrapper(ranks: Ranks, recipe: str) -> None:
    assert max(ranks.run(2, _forgotten_handle, recipe)) < 1e-12


def _other_kind() -> str:
    training = Training("several buckets", "topk").run(range(3))
    model = DistributedDataParallel(training.model.module)
    with pytest.raises(RuntimeError, match="remove") as error:
        tw.attach(model, tw.recipes.dgc(), optimizer=training.optimizer)
    return str(error.value)


def test_what_waits_is_not_dropped_for_another_kind_of_recipe(ranks: Ranks) -> None:
    assert "has residuals" in ranks.run(1, _other_kind)[0]


def _removed(recipe: str) -> tuple[float, bool]:
    training = _training(recipe)
    books = Books(training)
    for step in range(6):
        if step == 3:
            training.attachment.remove()
        books.offer(step)
        training.step(step)
    residuals = [
        x for memory in training.attachment.state_dict()["memories"] for f in memory.values() for x in f.items()
    ]
    return books.missing(), not any(bool(x.any()) for field, x in residuals if field == "residual")


@pytest.mark.parametrize("recipe", LINEAR)
def test_what_waits_is_sent_after_the_recipe_is_removed(ranks: Ranks, recipe: str) -> None:
    for missing, empty in ranks.run(2, _removed, recipe):
        assert missing < 1e-12
        assert empty


def _assigned(recipe: str) -> tuple[float, bool]:
    """Put a gradient of this rank's own into .grad before backward adds to it, as one from torch.autograd.grad."""
    training = _training(recipe)
    books = Books(training)
    for step in range(4):
        own = training.local_gradients(100 + step)
        books.offer(step)
        books.offer(100 + step)
        for name, p in training.parameters().items():
            p.grad = own[name].clone()
        training.backward(step)
        training.optimizer.step()
    return books.missing(), training.attachment.verify_replicas()


@pytest.mark.parametrize("recipe", LINEAR)
def test_a_gradient_may_be_put_in_place_by_hand(ranks: Ranks, recipe: str) -> None:
    for missing, alike in ranks.run(2, _assigned, recipe):
        assert missing < 1e-12
        assert alike


def test_an_optimizer_of_another_model_leaves_a_reduction_alone() -> None:
    """It may step in another thread, as virtual workers do, and a reduction must be counted once."""
    mine, other = (torch.optim.SGD([nn.Parameter(torch.ones(3))]) for _ in range(2))
    steps = Steps({"w": mine.param_groups[0]["params"][0]}, [])
    assert steps.enter(["w"], joined=False)
    _, note = steps.started(["w"])
    note(Reduced())
    assert not steps.stepped(other)
    assert (steps.draw, steps.pending) == (0, set())
    assert steps.stepped(mine)
    assert steps.draw == 1


def _shared_module(recipe: str) -> tuple[float, bool]:
    """Train two wrapped models that share a module, both of whose gradients are thrown away now and then."""
    shared = Training("one bucket", dtype=torch.float64).model.module
    models = [DistributedDataParallel(nn.Sequential(shared, nn.Linear(4, 4, dtype=torch.float64))) for _ in range(2)]
    attachments = [tw.attach(model, RECIPES[recipe].make()) for model in models]
    optimizer = torch.optim.SGD([*shared.parameters(), *(p for m in models for p in m.module[1].parameters())], lr=RATE)
    weight = shared.get_parameter("2.weight")
    start, offered = flat(weight, weight).clone(), torch.zeros(weight.numel(), dtype=torch.float64)
    for step in range(6):
        optimizer.zero_grad()
        x = batch(step, 0, torch.float64)
        losses = [model.module(x).square().mean() for model in models]
        mine = flat(torch.autograd.grad(losses[0] + losses[1], [weight])[0], weight)
        for model in models:
            model(x).square().mean().backward()
        if step % 3 != 1:
            offered += mine / dist.get_world_size()
            optimizer.step()
    waiting = torch.zeros_like(start)
    for memory in (memory for attachment in attachments for memory in attachment.state_dict()["memories"]):
        if "residual" in memory.get("0.2.weight", {}):
            waiting += memory["0.2.weight"]["residual"]
    dist.all_reduce(waiting)
    dist.all_reduce(offered)
    missing = float((offered - (start - flat(weight, weight)) / RATE - waiting).norm() / offered.norm())
    return missing, all(attachment.verify_replicas() for attachment in attachments)


@pytest.mark.parametrize("recipe", LINEAR)
def test_two_models_may_share_a_module(ranks: Ranks, recipe: str) -> None:
    for missing, alike in ranks.run(2, _shared_module, recipe):
        assert missing < 1e-12
        assert alike


def _summed_losses(recipe: str, door: str) -> str:
    """Let two models that share a module see one backward of both losses."""
    shared = nn.Linear(WIDTH, 40)
    whole = [nn.Sequential(shared, nn.Linear(40, 4)) for _ in range(2)]
    if door == "attach":
        models: list[nn.Module] = [DistributedDataParallel(each) for each in whole]
        handles: list[Any] = [tw.attach(each, RECIPES[recipe].make()) for each in models]  # type: ignore[arg-type]
        return told(lambda: _sum(models).backward())
    handles = [tw.replicate(each, RECIPES[recipe].make()) for each in whole]
    _sum(whole).backward()
    return told(lambda: [each.reduce() for each in handles])


def _shared_momentum(recipe: str) -> tuple[str, str]:
    shared = nn.Linear(WIDTH, 40)
    models = [DistributedDataParallel(nn.Sequential(shared, nn.Linear(40, 4))) for _ in range(2)]
    optimizers = [sgd(model, momentum=0.9) for model in models]
    first = tw.attach(models[0], RECIPES[recipe].make(), optimizer=optimizers[0])

    def second() -> None:
        tw.attach(models[1], RECIPES[recipe].make(), optimizer=optimizers[1])

    said = told(second)
    first.remove()
    return said, told(second)


@pytest.mark.parametrize("recipe", [name for name in STATEFUL if RECIPES[name].momentum])
def test_momentum_cannot_move_into_the_memories_of_two_models(ranks: Ranks, recipe: str) -> None:
    for while_shared, once_removed in ranks.run(2, _shared_momentum, recipe):
        assert "in another attached model too" in while_shared
        assert once_removed == "nothing"


def _shared_on_one_rank(recipe: str) -> str:
    shared, alone = nn.Linear(WIDTH, 40), dist.new_group([0])
    model = DistributedDataParallel(nn.Sequential(shared, nn.Linear(40, 4)))
    if dist.get_rank() == 0:
        other = DistributedDataParallel(nn.Sequential(shared, nn.Linear(40, 4)), process_group=alone)
        tw.attach(other, RECIPES[recipe].make(), optimizer=sgd(other, momentum=0.9))
    return told(lambda: tw.attach(model, RECIPES[recipe].make(), optimizer=sgd(model, momentum=0.9)))


def test_all_ranks_hear_of_a_model_that_one_of_them_has_attached_already(ranks: Ranks) -> None:
    """The others are not left comparing recipes with a rank that has raised."""
    for said in ranks.run(2, _shared_on_one_rank, "dgc"):
        assert "in another attached model too" in said


def _sum(models: Sequence[nn.Module]) -> Tensor:
    x = batch(0, 0, torch.float32)
    return models[0](x).square().mean() + models[1](x).square().mean()


@pytest.mark.parametrize("door", ["attach", "replicate"])
@pytest.mark.parametrize("recipe", ["dense", "topk", "powersgd"])
def test_a_gradient_of_two_attachments_in_one_backward_is_refused(ranks: Ranks, recipe: str, door: str) -> None:
    for message in ranks.run(2, _summed_losses, recipe, door):
        assert ("goes through both of their recipes" in message) == (recipe != "dense"), message


# --- backward that breaks off on one rank ---


def _broken_on_one(recipe: str | None) -> tuple[float, str, bool]:
    """Rank 1 fails before its first bucket is ready, and goes on with its next batch while rank 0 waits for it."""
    training = Training("several buckets", recipe, dtype=torch.float64, momentum=0.0)
    books = Books(training) if recipe else None
    steps: Iterator[int] = iter(range(20))
    done = 0
    while done < 5:
        step = next(steps)
        training.optimizer.zero_grad()
        fails = dist.get_rank() == 1 and step == 2
        loss = training.losses(training.model, step)[0]()
        if fails:
            loss.register_hook(partial(_fail))
            with pytest.raises(ArithmeticError):
                loss.backward()
            continue
        if books:
            books.offer(step)
        loss.backward()
        training.optimizer.step()
        done += 1
    alike = training.attachment.verify_replicas() if recipe else True
    return books.missing() if books else 0.0, digest(training.model), alike


def _fail(gradient: Tensor) -> Tensor:
    raise ArithmeticError("broken")


@pytest.mark.parametrize("recipe", LINEAR)
def test_a_backward_that_breaks_off_on_one_rank_loses_nothing(ranks: Ranks, recipe: str) -> None:
    for missing, _, alike in ranks.run(2, _broken_on_one, recipe):
        assert missing < 1e-12
        assert alike


def test_a_broken_backward_is_as_in_plain_ddp(ranks: Ranks) -> None:
    plain, dense = ranks.run(2, _broken_on_one, None), ranks.run(2, _broken_on_one, "dense")
    assert [theirs for _, theirs, _ in plain] == [ours for _, ours, _ in dense]


# --- copies, and the end ---


def _copied(recipe: str) -> bool:
    training = Training("several buckets")
    attachment = tw.attach(training.model, RECIPES[recipe].make(), optimizer=training.optimizer)
    training.run(range(2))
    twins = [copy.deepcopy(training.model), torch.optim.swa_utils.AveragedModel(training.model).module]
    file = io.BytesIO()
    torch.save(training.model, file)
    file.seek(0)
    twins.append(torch.load(file, weights_only=False))
    for twin in twins:  # plain DDP, as a copy leaves its hook behind
        twin(torch.ones(2, WIDTH)).sum().backward()
    training.attachment = attachment
    training.run(range(2, 4))
    return attachment.verify_replicas() and all(digest(twin) == digest(twins[0]) for twin in twins)


@pytest.mark.parametrize("recipe", ["topk", "gtopk", "dgc"])
def test_a_model_can_be_copied_and_saved(ranks: Ranks, recipe: str) -> None:
    assert ranks.run(2, _copied, recipe) == [True] * 2


def _freed(make: Callable[[DistributedDataParallel], object]) -> int:
    torch.manual_seed(0)
    module = Training("one bucket").model.module
    alive: list[weakref.ref[Any]] = []
    for _ in range(3):
        model = DistributedDataParallel(module)
        attachment = make(model)
        for step in range(2):
            model(torch.ones(2, WIDTH) * step).sum().backward()
        alive += [weakref.ref(model), weakref.ref(attachment)]
    del model, attachment
    gc.collect()
    return sum(each() is not None for each in alive)


def _auto(model: DistributedDataParallel) -> object:
    return tw.attach(model, "auto")


def _topk(model: DistributedDataParallel) -> object:
    return tw.attach(model, tw.recipes.topk())


@pytest.mark.parametrize("make", [pytest.param(_auto, marks=pytest.mark.slow), _topk])
def test_a_model_that_is_wrapped_anew_is_freed(ranks: Ranks, make: Callable[[DistributedDataParallel], object]) -> None:
    assert ranks.run(2, _freed, make) == [0, 0]


def _uneven(how: str, zero_first: bool) -> tuple[float, int, bool]:
    """Train with less data on rank 0. Return how much is lost or new, and where the rank is."""
    rank, kept = dist.get_rank(), 0
    skipped = {"skipped, then joined": 2, "skipped without the other": 3}.get(how)
    model = DistributedDataParallel(nn.Linear(4, 4, bias=False, dtype=torch.float64))
    attachment = tw.attach(model, tw.recipes.topk(density=0.5, minimum_size=0))
    optimizer, weight = torch.optim.SGD(model.parameters(), lr=RATE), model.module.weight
    start, passes = weight.detach().clone(), 1 + (how == "accumulated")
    with model.join(divide_by_initial_world_size=False):
        for step in range(3 + 2 * rank):
            model.zero_grad() if zero_first else None
            for _ in range(passes):
                model(torch.full((1, 4), 50.0, dtype=torch.float64)).sum().backward()
            if how == "by hand":
                weight.data.sub_(weight.grad, alpha=RATE)
            elif step != skipped:
                optimizer.step()
            model.zero_grad() if not zero_first else None
            kept += step != skipped
    state = attachment.state_dict()
    books = torch.zeros(2, 16, dtype=torch.float64)
    books[0] += state["memories"][-1]["weight"]["residual"]
    books[1] += 50 * passes * kept if rank else 0  # rank 1 takes part in every step
    dist.all_reduce(books)
    missing = books[1] - books[0] - (start - weight.detach()).flatten() / RATE
    return float(missing.abs().max()), state["step"], attachment.verify_replicas()


@pytest.mark.parametrize("zero_first", [False, True])
@pytest.mark.parametrize(
    "how", ["stepped", "by hand", "skipped, then joined", "skipped without the other", "accumulated"]
)
def test_ranks_without_data_follow_the_others(ranks: Ranks, how: str, zero_first: bool) -> None:
    for missing, step, alike in ranks.run(2, _uneven, how, zero_first):
        assert missing < 1e-9
        assert (step, alike) == (5, True)
