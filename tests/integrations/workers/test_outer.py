"""Outer steps: what workers exchange every H inner steps, what they then have in common, and what they keep."""

import copy
import math
import re
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from cases import RECIPES
from far import Far, far_bytes, moved_far
from ranks import Ranks, logged, mesh_of, told
from torch import Tensor, futures, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.collectives import all_gather
from thinwire.integrations.training import drift
from thinwire.integrations.workers import meeting
from thinwire.integrations.workers.fragments import cut
from thinwire.integrations.workers.starting import Strangers

dcp: Any = torch.distributed.checkpoint  # torch does not export the names in it, as mypy has it
H = 3
SGD = torch.optim.SGD
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
NESTEROV = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)


def _model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(dist.get_rank())  # outer() sends the first worker's
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 16)).to(dtype)


class Worker:
    """A worker with data of its own, and its outer steps."""

    def __init__(
        self,
        steps: tw.OuterSteps,
        *,
        inner: Callable[..., torch.optim.Optimizer] = ADAMW,
        dtype: torch.dtype = torch.float64,
        make: Callable[[torch.dtype], nn.Module] = _model,
        sharded: bool = False,
        **options: Any,
    ) -> None:
        self.model, self.dtype = make(dtype), dtype
        if sharded:  # an island of one rank
            fully_shard(self.model, mesh=mesh_of(dist.get_world_size(), 1, names=("between", "within"))["within"])
        self.optimizer = inner(self.model.parameters())
        self.handle = tw.outer(self.model, self.optimizer, steps, **options)

    def train(self, steps: range, *, poison: int | None = None) -> "Worker":
        """Take inner steps; before the step `poison`, a parameter becomes NaN."""
        for step in steps:
            if step == poison:
                with torch.no_grad():
                    next(self.model.parameters()).view(-1)[0] = math.nan
            self.optimizer.zero_grad()
            self.loss(self.model, step).backward()
            self.optimizer.step()
        return self

    def loss(self, model: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(8, 24, dtype=self.dtype, generator=generator)
        return (model(x) - x[:, :16]).square().mean()

    def own(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def common(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.handle.parameters.items()}

    def save(self) -> dict[str, Any]:
        """Return copies of all that a worker saves."""
        model, optimizer, handle = self.model.state_dict(), self.optimizer.state_dict(), self.handle.state_dict()
        return copy.deepcopy({"model": model, "optimizer": optimizer, "handle": handle})

    def load(self, saved: dict[str, Any]) -> "Worker":
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.handle.load_state_dict(saved["handle"])
        return self


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _far(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


def _small(recipe: str) -> tw.reducer.Reducer:
    return RECIPES[recipe].make()


class _Counting(torch.optim.Optimizer):
    """An outer optimizer of somebody else's, which keeps numbers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            held = self.state[p]
            if not held:
                held |= {"steps": 0, "rate": 1.0, "sum": torch.zeros_like(p), "mode": "sum", "best": None}
            held["steps"], held["rate"] = held["steps"] + 1, 0.9 * held["rate"]
            p.sub_(held["sum"].add_(p.grad), alpha=held["rate"] / held["steps"])


METHODS: dict[str, Callable[[], tw.OuterSteps]] = {
    "diloco": lambda: tw.outer_steps.diloco(every=H),
    "streaming": lambda: tw.outer_steps.streaming_diloco(every=4, fragments=2, delay=1),
    "streaming, error feedback": lambda: tw.outer_steps.streaming_diloco(
        every=4, fragments=4, delay=3, memory=tw.memories.ErrorFeedback()
    ),
    "muloco": lambda: tw.outer_steps.muloco(every=H, minimum_size=64),
    "sparseloco": lambda: tw.outer_steps.sparseloco(every=H, minimum_size=64),
    "muloco, bf16": lambda: tw.outer_steps.muloco(every=H, minimum_size=64, residual_dtype=torch.bfloat16),
    "sparseloco, bf16": lambda: tw.outer_steps.sparseloco(every=H, minimum_size=64, residual_dtype=torch.bfloat16),
    "dct chunks": lambda: tw.OuterSteps(every=H, recipe=_small("fading"), fragments=2),
    "low rank": lambda: tw.OuterSteps(every=H, recipe=_small("powersgd"), fragments=2, delay=1),
    "numbers": lambda: tw.OuterSteps(every=H, make_optimizer=_Counting),
    "float32": lambda: tw.OuterSteps(every=H, make_optimizer=lambda ps: torch.optim.NAdam(ps, lr=torch.tensor(0.01))),
}


# --- what workers have in common ---


def _common_at_each_step(method: str) -> tuple[list[list[str]], bool, bool]:
    worker = Worker(METHODS[method]())
    before, differing = worker.common(), []
    for step in range(10):
        worker.train(range(step, step + 1))
        differing.append(worker.handle.differing_parameters())
    together = drift.differing(dict(worker.model.named_parameters()), worker.handle.group)
    held = worker.handle.memory
    assert held.total == worker.handle.memory_bytes
    assert held.waiting >= sum(x.nbytes for x in worker.handle.parameters.values())
    return differing, all(not torch.equal(before[name], x) for name, x in worker.common().items()), bool(together)


@pytest.mark.parametrize("method", METHODS)
def test_global_parameters_are_the_same_everywhere_and_own_ones_are_not(ranks: Ranks, method: str) -> None:
    for differing, moved, apart in ranks.run(3, _common_at_each_step, method):
        assert differing == [[]] * 10
        assert moved
        assert apart


class _Clipping(torch.optim.AdamW):
    """Clips within its step."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1e9)
        return super().step(closure)


def _subclassed() -> tuple[int, int]:
    if dist.get_rank() == 0:  # torch wraps the step of classes that have been made
        torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    worker = Worker(METHODS["diloco"](), inner=_Clipping).train(range(2 * H))
    return worker.handle.inner_steps, worker.handle.stats().total.steps


def test_a_step_by_the_base_class_counts_once(ranks: Ranks) -> None:
    assert ranks.run(2, _subclassed) == [(2 * H, 2)] * 2


def _plain(recipe: str) -> tuple[float, int]:
    """Return how far outer steps after every step end from replicas that reduce gradients, and the steps of either."""
    inner = partial(SGD, lr=0.05)
    worker = Worker(tw.OuterSteps(every=1, recipe=_small(recipe), make_optimizer=partial(SGD, lr=1.0)), inner=inner)
    worker.train(range(8))
    model = _model()
    optimizer = inner(model.parameters())
    replicas = tw.replicate(model, _small(recipe), optimizer=optimizer)
    for step in range(8):
        optimizer.zero_grad()
        worker.loss(model, step).backward()
        replicas.reduce()
        optimizer.step()
    assert worker.handle.stats().total.steps == 8
    return _far(worker.common(), {name: p.detach() for name, p in model.named_parameters()}), replicas.attachment.step


@pytest.mark.parametrize("recipe", ["dense", "topk", "gtopk", "dct_dp"])
def test_outer_steps_after_every_step_of_sgd_are_replicas(ranks: Ranks, recipe: str) -> None:
    """Δ is the gradient times the learning rate, but for the rounding of parameters: 8 steps of 2⁻⁵² of at most 2."""
    for far, steps in ranks.run(3, _plain, recipe):
        assert far < 8 * 3 * 2**-51
        assert steps == 8


def _by_hand(fragments: int, delay: int, mixing: float, every: int) -> tuple[float, float]:
    """Return how far this ends from the same computed with plain all-reduces: the global parameters, and the own."""
    steps = tw.OuterSteps(every=every, fragments=fragments, delay=delay, mixing=mixing, make_optimizer=NESTEROV)
    worker = Worker(steps).train(range(11))
    model = _model()
    for p in model.parameters():
        dist.broadcast(p.detach(), 0)
    parts = [[p for _, p in part.items()] for part in cut(dict(model.named_parameters()), fragments)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    common = [[p.detach().clone().requires_grad_() for p in part] for part in parts]
    outer = [NESTEROV(part) for part in common]
    first, arriving = [-(-every * (i + 1) // fragments) for i in range(fragments)], {}
    for step in range(1, 12):
        optimizer.zero_grad()
        worker.loss(model, step - 1).backward()
        optimizer.step()
        for i, part in enumerate(parts):
            if step >= first[i] and (step - first[i]) % every == 0:
                arriving[i, step + delay] = [
                    (q - p).detach() / dist.get_world_size() for p, q in zip(part, common[i], strict=True)
                ]
                for mean in arriving[i, step + delay]:
                    dist.all_reduce(mean)
        for i, part in enumerate(parts):
            if (i, step) in arriving:
                for q, mean in zip(common[i], arriving[i, step], strict=True):
                    q.grad = mean
                outer[i].step()
                with torch.no_grad():
                    for p, q in zip(part, common[i], strict=True):
                        p.copy_(mixing * p + (1 - mixing) * q)
    names = list(worker.own())
    own = dict(zip(names, model.parameters(), strict=True))
    return (
        _far(worker.common(), dict(zip(names, (q for part in common for q in part), strict=True))),
        _far(worker.own(), own),
    )


@pytest.mark.parametrize(
    ("fragments", "delay", "mixing", "every"),
    [(1, 0, 0.0, 3), (2, 0, 0.0, 4), (2, 1, 0.5, 4), (4, 3, 0.25, 5), (3, 0, 0.0, 1)],
)
def test_streaming_is_what_its_paper_says(ranks: Ranks, fragments: int, delay: int, mixing: float, every: int) -> None:
    for common, own in ranks.run(3, _by_hand, fragments, delay, mixing, every):
        assert common < 1e-13
        assert own < 1e-13


def _falling() -> list[float]:
    """Return how far each outer step moves a global parameter, where each worker moves by 1."""
    model = nn.Linear(1, 1, bias=False)
    optimizer, rate = SGD(model.parameters(), lr=1.0), tw.schedules.Stages(values=(1.0, 0.5), steps_each=2, final=0.25)
    steps = tw.outer_steps.sparseloco(every=1, rate=rate)
    handle, found = tw.outer(model, optimizer, steps), list[float]()
    for _ in range(6):
        before = float(handle.parameters["weight"].detach())
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        found.append(before - float(handle.parameters["weight"].detach()))
    return found


def test_the_outer_rate_falls(ranks: Ranks) -> None:
    for found in ranks.run(2, _falling):
        assert found == pytest.approx([1, 1, 0.5, 0.5, 0.25, 0.25])


class _Broken(tw.schedules.Schedule):
    """Gives NaN from the second step on."""

    def __call__(self, step: int) -> float:
        return math.nan if step else 1.0


def _by_a_broken_rate() -> tuple[str, bool]:
    """Return what is said of an outer rate of NaN, and whether the global parameters are as they were."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = SGD(model.parameters(), lr=1.0)
    handle = tw.outer(model, optimizer, tw.outer_steps.sparseloco(every=1, rate=_Broken()))
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    before = handle.parameters["weight"].detach().clone()
    return told(optimizer.step), torch.equal(handle.parameters["weight"], before)


def test_a_rate_that_is_no_number_does_not_reach_the_parameters(ranks: Ranks) -> None:
    for said, same in ranks.run(2, _by_a_broken_rate):
        assert "gives nan at step 1; expected a finite number" in said
        assert same


# --- nothing is lost ---


class Moves:
    """How far a worker's own parameters moved in inner steps: seen by hooks that run before the outer step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._before: list[Tensor] = []
        self.total = [torch.zeros_like(p.detach()) for p in self._parameters]
        self.latest = [torch.zeros_like(p.detach()) for p in self._parameters]
        optimizer.register_step_pre_hook(self._note)
        optimizer.register_step_post_hook(self._add)

    def settle(self) -> None:
        """Add the latest moves to the total, unless they are lost because they are not finite."""
        if all(bool(x.isfinite().all()) for x in self.latest):
            self.total = [total + x for total, x in zip(self.total, self.latest, strict=True)]
        self.latest = [torch.zeros_like(x) for x in self.latest]

    def _note(self, *_: object) -> None:
        self._before = [p.detach().clone() for p in self._parameters]

    def _add(self, *_: object) -> None:
        moves = [before - p.detach() for before, p in zip(self._before, self._parameters, strict=True)]
        self.latest = [x + move for x, move in zip(self.latest, moves, strict=True)]


def _account(make: Callable[[], tw.OuterSteps], poison: int | None) -> tuple[float, float]:
    """Return what is missing between what workers moved and what became of it, and how much waits."""
    moves = list[Moves]()

    def inner(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        moves.append(Moves(optimizer))
        return optimizer

    worker = Worker(make(), inner=inner)
    start, (mine,) = worker.common(), moves
    for step in range(4 * H + 1):
        worker.train(range(step, step + 1), poison=poison if dist.get_rank() == 1 else None)
        if (step + 1) % H == 0:
            mine.settle()
    mine.settle()
    state, (own, common) = worker.handle.state_dict(), (worker.own(), worker.common())
    missing, waiting = 0.0, 0.0
    for name, moved in zip(start, mine.total, strict=True):
        waits = [memory[name]["residual"] for memory in state["memories"][:-1] if "residual" in memory.get(name, {})]
        waits_here = sum((x.view(moved.shape) for x in waits), torch.zeros_like(moved))
        mean = (moved - (common[name] - own[name])) / dist.get_world_size() - waits_here
        dist.all_reduce(mean)
        missing = max(missing, float((mean - (start[name] - common[name])).abs().max()))
        waiting = max(waiting, float(waits_here.abs().max()))
    return missing, waiting


def _simple(recipe: str, fragments: int = 1) -> tw.OuterSteps:
    optimizer = partial(SGD, lr=1.0)
    return tw.OuterSteps(every=H, recipe=_small(recipe), make_optimizer=optimizer, fragments=fragments, leave_out=False)


@pytest.mark.parametrize("poison", [None, 4])
@pytest.mark.parametrize("recipe", ["topk", "gtopk", "dct_dp", "fft, error feedback"])
def test_what_workers_moved_was_applied_or_waits(ranks: Ranks, recipe: str, poison: int | None) -> None:
    for missing, waiting in ranks.run(3, _account, partial(_simple, recipe), poison):
        assert missing < 1e-14 if "fft" not in recipe else missing < 1e-7  # spectra travel in float32
        assert waiting > 1e-4


def test_fragments_lose_nothing_either(ranks: Ranks) -> None:
    for missing, waiting in ranks.run(3, _account, partial(_simple, "topk", 2), None):
        assert missing < 1e-14
        assert waiting > 1e-4


# --- parameters of 16 bits ---


def _small_steps(dtype: torch.dtype, *, sharded: bool = False, offload: bool = False) -> float:
    """One of the workers moves by half a unit in an outer step. Return how far the mean ends from where it should."""
    mesh = mesh_of(*((2, 2) if sharded else (4, 1)), names=("worker", "shard"))
    group, first = mesh.get_group("worker"), mesh.get_local_rank("worker") == 0
    model = nn.Linear(64, 64, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    if sharded:
        fully_shard(model, mesh=mesh["shard"])
    optimizer = SGD(model.parameters(), lr=1.0)
    handle = tw.outer(
        model, optimizer, tw.OuterSteps(every=4, make_optimizer=partial(SGD, lr=1.0)), group=group, offload=offload
    )
    for _ in range(40):
        model.weight.grad = torch.full_like(model.weight, 2.0**-10 if dtype != torch.bfloat16 else 2.0**-8) * first
        optimizer.step()
    moved = 40 * (2.0**-10 if dtype != torch.bfloat16 else 2.0**-8) / group.size()
    assert handle.memory.waiting == sum(4 * p.numel() for p in handle.parameters.values())
    return max(float((p.detach() - (1 - moved)).abs().max()) for p in handle.parameters.values())


@pytest.mark.parametrize(
    ("dtype", "sharded", "offload"),
    [
        (torch.bfloat16, False, False),
        (torch.float16, False, False),
        (torch.bfloat16, True, False),
        (torch.bfloat16, False, True),
        (torch.bfloat16, True, True),
    ],
)
def test_what_is_small_beside_16_bits_adds_up(ranks: Ranks, dtype: torch.dtype, sharded: bool, offload: bool) -> None:
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11  # own parameters stop between two numbers
    assert max(ranks.run(4, partial(_small_steps, dtype, sharded=sharded, offload=offload))) <= unit


def _far_away(make: Callable[[], tw.OuterSteps], offload: bool) -> tuple[set[int], int, float, dict[str, Tensor]]:
    """Train, with `offload` on another device. Return what lies there at each step, and what training alone has there.

    The third is what the handle has in host memory, in bytes a parameter.
    """
    torch.manual_seed(0)
    model, found = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)), set[int]()
    with moved_far(model) if offload else nullcontext():
        optimizer = ADAMW(model.parameters())
        handle = tw.outer(model, optimizer, make(), offload=offload)
        for step in range(9):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            x = Far(x) if offload else x
            (model(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            del x
            found.add(far_bytes())
        trained = [*model.parameters(), *(x for each in optimizer.state.values() for x in each.values() if x.dim())]
        numel = sum(p.numel() for p in model.parameters())
        own = sum(x.nbytes for x in trained)
        return found, own, handle.memory_bytes / numel, {name: p.detach() for name, p in handle.parameters.items()}


@pytest.mark.parametrize(
    ("make", "nbytes"),
    [
        pytest.param(partial(tw.outer_steps.diloco, every=H), 12, marks=pytest.mark.slow),
        (partial(tw.outer_steps.streaming_diloco, every=4, fragments=2, delay=1), 12.5),
        pytest.param(partial(tw.outer_steps.muloco, every=H), 20, marks=pytest.mark.slow),
        pytest.param(partial(tw.outer_steps.sparseloco, every=H), 16, marks=pytest.mark.slow),
        (partial(tw.outer_steps.muloco, every=H, residual_dtype=torch.bfloat16), 16),
        pytest.param(
            partial(tw.outer_steps.sparseloco, every=H, residual_dtype=torch.bfloat16), 12, marks=pytest.mark.slow
        ),
    ],
    ids=["diloco", "streaming", "muloco", "sparseloco", "muloco, bf16", "sparseloco, bf16"],
)
@pytest.mark.first(1)
def test_with_offload_a_device_holds_the_model_and_its_optimizer_alone(
    ranks: Ranks, make: Callable[[], tw.OuterSteps], nbytes: float
) -> None:
    runs = [ranks.run(2, partial(_far_away, make), offload) for offload in (True, False)]
    for (held, trained, each, common), here in zip(*runs, strict=True):
        assert held == {trained}
        assert each == pytest.approx(nbytes, rel=0.03)
        assert here[2] == each
        assert _same(common, here[3])


def _narrow(x: object) -> object:
    return x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x


def _once_saved() -> bool:
    """Load a state whose global parameters, means and outer momentum have the 16 bits of the model's."""
    steps = tw.outer_steps.streaming_diloco(every=4, fragments=2, delay=1)
    worker = Worker(steps, dtype=torch.bfloat16).train(range(6))
    saved = worker.save()
    *_, common = saved["handle"]["memories"]
    for fields in common.values():
        fields.update({key: _narrow(x) for key, x in fields.items()})
    other = Worker(steps, dtype=torch.bfloat16).load(saved)
    expected = {name: x.bfloat16().float() for name, x in worker.common().items()}
    alike = _same(other.common(), expected)
    other.train(range(6, 12))
    return alike and other.handle.verify_replicas()


def test_global_parameters_once_saved_in_16_bits_load(ranks: Ranks) -> None:
    assert all(ranks.run(2, _once_saved))


# --- what is not finite ---


def _waiting(worker: Worker) -> dict[str, Tensor]:
    """Return what waits on this worker, and is committed."""
    memories = [m for each in worker.handle.fragments for m in each.attachment.recipe.memories()]
    return {n: f["residual"].clone() for memory in memories for n, f in memory.state().items() if "residual" in f}


def _called_off(leave_out: bool) -> dict[str, Any]:
    """One of three workers becomes NaN within the second outer step. Report what is there before and after it."""
    steps = tw.OuterSteps(every=H, recipe=_small("topk"), make_optimizer=NESTEROV, leave_out=leave_out)
    worker = Worker(steps).train(range(H))
    poisoned = dist.get_rank() == 1
    before, memory = worker.common(), copy.deepcopy(worker.handle.state_dict()["memories"][:-1])
    worker.train(range(H, 2 * H - 1), poison=H if poisoned else None)
    worker.train(range(2 * H - 1, 2 * H))
    held = worker.handle.state_dict()["memories"][:-1]
    found = {
        "unchanged": _same(before, worker.common()),
        "memory unchanged": all(_same(a[n], b[n]) for a, b in zip(memory, held, strict=True) for n in a),
        "back": _same(worker.own(), worker.common()),
    }
    worker.train(range(2 * H, 4 * H))
    finite = all(bool(x.isfinite().all()) for x in (*worker.common().values(), *worker.own().values()))
    state = [x for held in worker.optimizer.state.values() for x in held.values()]
    return found | {
        "finite": finite and all(bool(x.isfinite().all()) for x in state),
        "moves": not _same(before, worker.common()),
        "alike": worker.handle.verify_replicas(),
    }


def test_what_is_not_finite_calls_the_outer_step_off(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(3, _called_off, False)):
        assert found.pop("back") == (rank == 1)
        assert set(found.values()) == {True}, found


def _nobody(leave_out: bool) -> dict[str, bool]:
    """All workers are NaN before the third outer step."""
    worker = Worker(tw.OuterSteps(every=H, recipe=_small("topk"), make_optimizer=NESTEROV, leave_out=leave_out))
    worker.train(range(2 * H))
    before = worker.common(), _waiting(worker)
    worker.train(range(2 * H, 3 * H), poison=2 * H)
    found = {"global": _same(before[0], worker.common()), "memory": _same(before[1], _waiting(worker))}
    found["back"] = _same(worker.own(), worker.common())
    worker.train(range(3 * H, 4 * H))
    return found | {"goes on": not _same(before[0], worker.common()), "alike": worker.handle.verify_replicas()}


@pytest.mark.parametrize("leave_out", [False, True])
def test_where_nobody_is_sound_the_outer_step_is_called_off(ranks: Ranks, leave_out: bool) -> None:
    for found in ranks.run(2, _nobody, leave_out):
        assert set(found.values()) == {True}, found


def _one_number() -> dict[str, bool]:
    """One worker has a single NaN, in a bias, when the second outer step begins."""
    poisoned = list[bool]()

    def inner(parameters: Any) -> torch.optim.Optimizer:
        optimizer = ADAMW(parameters)
        bias = optimizer.param_groups[0]["params"][1]
        optimizer.register_step_post_hook(lambda *_: bias.data[:1].fill_(math.nan) if poisoned else None)
        return optimizer

    steps = tw.OuterSteps(every=H, recipe=_small("topk"), make_optimizer=NESTEROV, leave_out=False)
    worker = Worker(steps, inner=inner).train(range(2 * H - 1))
    before = worker.common(), _waiting(worker)
    poisoned.extend([True] * (dist.get_rank() == 1))
    worker.train(range(2 * H - 1, 2 * H))
    return {"global": _same(before[0], worker.common()), "memory": _same(before[1], _waiting(worker))}


def test_a_single_number_calls_all_of_it_off(ranks: Ranks) -> None:
    assert ranks.run(3, _one_number) == [{"global": True, "memory": True}] * 3


def test_or_that_worker_is_left_out(ranks: Ranks) -> None:
    for found in ranks.run(3, _called_off, True):
        assert not found.pop("unchanged")
        assert not found.pop("memory unchanged")
        assert set(found.values()) == {True}, found


def _left_out() -> float:
    """Return how far the global parameters are from the mean of the two sound workers, the third being NaN."""
    steps = tw.OuterSteps(every=H, make_optimizer=partial(SGD, lr=1.0), leave_out=True)
    worker, own = Worker(steps), dict[str, Tensor]()
    worker.train(range(H - 1))
    if dist.get_rank() == 1:
        worker.train(range(H - 1, H), poison=H - 1)
        own = {name: torch.zeros_like(x) for name, x in worker.common().items()}
    else:
        alone = copy.deepcopy(worker.model)
        optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
        optimizer.load_state_dict(copy.deepcopy(worker.optimizer.state_dict()))
        optimizer.zero_grad()
        worker.loss(alone, H - 1).backward()
        optimizer.step()
        own = {name: p.detach().clone() for name, p in alone.named_parameters()}
        worker.train(range(H - 1, H))
    for x in own.values():
        dist.all_reduce(x)
    return _far(worker.common(), {name: x / 2 for name, x in own.items()})


def _one_is_sick(**options: bool) -> tuple[bool, int, int, dict[int | str, int], str]:
    """After a first outer step, one of three workers is NaN in twelve more."""
    worker = Worker(tw.OuterSteps(every=1, recipe=_small("topk"), **options))  # type: ignore[arg-type]
    with logged() as said:
        before, handle = worker.train(range(1)).common(), worker.handle
        for step in range(1, 13):
            worker.train(range(step, step + 1), poison=step if dist.get_rank() == 1 else None)
    moved = not _same(before, worker.common())
    return moved, handle.stats().total.steps, handle.skipped, handle.left_out, "; ".join(said)


def test_a_sick_worker_is_named_and_does_not_stop_the_others(ranks: Ranks) -> None:
    for rank, (moved, steps, skipped, left_out, said) in enumerate(ranks.run(3, _one_is_sick)):
        assert (moved, steps, skipped, left_out) == (True, 13, 0, {1: 12})
        assert said.count("worker 1 is not finite") == (2 if rank < 2 else 0)  # the first time, and the tenth
    for rank, (moved, steps, skipped, left_out, said) in enumerate(
        ranks.run(3, partial(_one_is_sick, leave_out=False))
    ):
        assert (moved, steps, skipped, left_out) == (False, 1, 12, {1: 12})
        assert said.count("nobody took the outer step") == (2 if rank < 2 else 0)


def test_the_mean_is_then_of_the_others(ranks: Ranks) -> None:
    assert max(ranks.run(3, _left_out)) < 1e-14


# --- saving and loading ---


def _resumed(method: str, after: int) -> tuple[bool, bool, bool]:
    old = Worker(METHODS[method]()).train(range(after))
    saved = old.save()
    new = Worker(METHODS[method]()).load(saved)
    old.train(range(after, after + 7))
    new.train(range(after, after + 7))
    return _same(old.own(), new.own()), _same(old.common(), new.common()), new.handle.verify_replicas()


@pytest.mark.grid
@pytest.mark.parametrize("after", [0, 5, 6])
@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_worker_takes_the_same_steps(ranks: Ranks, method: str, after: int) -> None:
    assert ranks.run(2, _resumed, method, after) == [(True, True, True)] * 2


def _undisturbed(method: str) -> bool:
    """Whether saving while an exchange is under way changes nothing."""
    saving, other = Worker(METHODS[method]()), Worker(METHODS[method]())
    for step in range(9):
        saving.train(range(step, step + 1)).save()
    return _same(saving.own(), other.train(range(9)).own())


def test_saving_changes_nothing(ranks: Ranks) -> None:
    assert all(ranks.run(2, _undisturbed, "streaming, error feedback"))


def _in_flight(what: str) -> str:
    """Do something while a fragment's exchange is under way, and return what is said."""
    worker = Worker(METHODS["streaming, error feedback"]()).train(range(3))
    if what == "remove":
        worker.handle.remove()
        return told(worker.handle.state_dict)
    worker.train(range(3, 9)).handle.forget()
    assert not any(bool(x.any()) for x in _sum_of_waiting(worker).values())
    worker.train(range(9, 12))
    return str(worker.handle.verify_replicas())


def test_a_removed_handle_is_not_saved(ranks: Ranks) -> None:
    """Its residual is gone, and what was under way."""
    for said in ranks.run(2, _in_flight, "remove"):
        assert said.startswith("StateError: this handle was removed")


def test_residuals_are_forgotten_that_are_under_way(ranks: Ranks) -> None:
    assert ranks.run(2, _in_flight, "forget") == ["True"] * 2


def _means_of_other_steps(other: tw.OuterSteps) -> tuple[str, bool]:
    """Load what is under way into other outer steps: what is said, and whether all is as before."""
    saved, worker = Worker(_halves()).train(range(3)).save(), Worker(other)
    before = worker.common()
    return told(worker.handle.load_state_dict, saved["handle"]), _same(before, worker.common())


def _halves(every: int = 4, delay: int = 2, fragments: Any = 2) -> tw.OuterSteps:
    return tw.OuterSteps(every=every, delay=delay, fragments=fragments)


@pytest.mark.parametrize(
    "other", [_halves(every=8), _halves(delay=1), _halves(fragments=(("2",), ("0",)))], ids=["every", "delay", "cut"]
)
def test_a_mean_that_other_outer_steps_would_lose_is_not_loaded(ranks: Ranks, other: tw.OuterSteps) -> None:
    for said, same in ranks.run(2, _means_of_other_steps, other):
        assert same
        assert re.match("ValueError: .*mean under way for '.*use the every, delay and fragments", said), said


def _overtaken() -> bool:
    """Load a state while an exchange is under way that rank 1 gets last. Whether that changes nothing there."""
    worker = Worker(_halves()).train(range(1))
    saved, late, gather = worker.save(), list[Callable[[], Any]](), all_gather

    def held(*parts: Any) -> Mock:
        done = gather(*parts)
        return Mock(then=lambda work: late.append(partial(done.then, work)))

    with patch.object(meeting, "all_gather", held):
        worker.train(range(1, 2))
    arrives = threading.Timer(0.1, late[0])
    arrives.start()
    worker.load(saved)
    worker.handle.fragments[0].measure()
    before = worker.handle.fragments[0]._buckets[0].flat.clone()
    arrives.join()
    return torch.equal(before, worker.handle.fragments[0]._buckets[0].flat)


def test_what_is_under_way_does_not_overwrite_what_is_loaded(ranks: Ranks) -> None:
    assert all(ranks.run(2, _overtaken))


def _interrupted(delay: int) -> tuple[bool, bool]:
    """Rank 1 is interrupted while it waits, and goes on: whether all end as without, and are alike."""
    one, other = Worker(_halves(delay=delay)), Worker(_halves(delay=delay)).train(range(9))
    one.train(range(1 + delay))
    waits = patch.object(futures, "wait_all", side_effect=KeyboardInterrupt) if dist.get_rank() else nullcontext()
    with waits, suppress(KeyboardInterrupt):
        one.train(range(1 + delay, 2 + delay))
    one.save()  # waits for it, and nothing is lost
    one.train(range(2 + delay, 9))
    return _same(one.common(), other.common()), one.handle.verify_replicas()


@pytest.mark.parametrize("delay", [0, 1])
def test_an_outer_step_that_is_interrupted_goes_on(ranks: Ranks, delay: int) -> None:
    assert ranks.run(2, _interrupted, delay) == [(True, True)] * 2


def _loads_alone() -> str:
    worker = Worker(METHODS["diloco"]())
    if dist.get_rank() == 0:
        return told(worker.train, range(1))
    return told(worker.handle.load_state_dict, worker.handle.state_dict())


def test_a_state_that_one_worker_alone_loads_is_refused_on_all(ranks: Ranks) -> None:
    trains, loads = ranks.run(2, _loads_alone)
    assert trains == "RuntimeError: workers [1] load a state, and the others train: call load_state_dict() on all"
    assert loads.startswith("StateError: nothing was loaded, as ranks [0] train meanwhile: call load_state_dict()")


def _entries(worker: Worker, checkpoint: tw.Checkpoint) -> dict[str, Any]:
    """What workers save together: each its own model and optimizer, under a name of its own."""
    return {"thinwire": checkpoint, f"worker {dist.get_rank()}": {"model": worker.model.state_dict()}}


def _saved_together(method: str, after: int, path: str) -> tuple[dict[str, Tensor], Any]:
    worker = Worker(METHODS[method]()).train(range(after))
    dcp.save(_entries(worker, tw.Checkpoint(worker.handle)), checkpoint_id=path)
    if dist.get_rank() == 0:
        torch.save(worker.optimizer.state_dict(), f"{path}/optimizer.pt")
    dist.barrier()
    return worker.common(), _sum_of_waiting(worker)


def _sum_of_waiting(worker: Worker) -> dict[str, Tensor]:
    found = {name: torch.zeros(p.numel(), dtype=p.dtype) for name, p in worker.handle.parameters.items()}
    for memory in worker.handle.state_dict()["memories"][:-1]:
        for name, fields in memory.items():
            found[name] += sum(fields.values())
    for x in found.values():
        dist.all_reduce(x)
    return found


def _loaded_together(method: str, path: str) -> tuple[dict[str, Tensor], Any, bool, int]:
    worker = Worker(METHODS[method]())
    dcp.load({"thinwire": tw.Checkpoint(worker.handle, path)}, checkpoint_id=path)
    worker.handle.go_back()
    common, waiting, steps = worker.common(), _sum_of_waiting(worker), worker.handle.inner_steps
    worker.train(range(7))
    return common, waiting, worker.handle.verify_replicas() and not _same(common, worker.common()), steps


@pytest.mark.parametrize("method", ["sparseloco", "streaming, error feedback", "numbers", "dct chunks"])
def test_other_numbers_of_workers_keep_the_pending_mean(ranks: Ranks, method: str, tmp_path: Path) -> None:
    (common, waiting), *_ = ranks.run(2, _saved_together, method, 6, str(tmp_path))
    assert any(bool(x.any()) for x in waiting.values()) == (method != "numbers")
    for count in (1, 2, 3):
        for found, waits, goes_on, steps in ranks.run(count, _loaded_together, method, str(tmp_path)):
            assert _same(found, common)
            assert _far(waits, waiting) < 1e-15
            assert goes_on
            assert steps == 6


# --- two levels ---


def _islands() -> tuple[bool, bool, bool]:
    """Two islands of two ranks: DDP within, outer steps between."""
    rank = dist.get_rank()
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    module = _model()
    ddp = DistributedDataParallel(module, process_group=inside)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    steps = tw.outer_steps.sparseloco(every=H, minimum_size=64)
    handle = tw.outer(ddp, optimizer, steps, group=between)
    for step in range(2 * H + 1):
        optimizer.zero_grad()
        x = torch.randn(8, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
        (ddp(x) - x[:, :16]).square().mean().backward()
        optimizer.step()
    world = dist.group.WORLD
    assert world is not None
    differing = drift.differing
    alike = not differing(handle.parameters, world)
    within = not differing(dict(module.named_parameters()), inside)
    apart = bool(differing(dict(module.named_parameters()), between))
    return alike, within, apart


def test_two_levels(ranks: Ranks) -> None:
    assert ranks.run(4, _islands) == [(True, True, True)] * 4


def _sharded_islands() -> tuple[bool, bool, bool, float]:
    """Two islands of two ranks: FSDP2 shards the model within, outer steps between. Beside it, two whole workers."""
    rank = dist.get_rank()
    mesh = mesh_of(2, 2, names=("replicate", "shard"))
    module = _model()
    for p in module.parameters():
        dist.broadcast(p.detach(), 0)
    whole = copy.deepcopy(module)
    fully_shard(module, mesh=mesh["shard"])
    between = mesh["replicate"].get_group()
    handles = list[tw.integrations.Outer]()
    for model in (module, whole):
        optimizer = ADAMW(model.parameters())
        handles.append(tw.outer(model, optimizer, tw.OuterSteps(every=H, make_optimizer=NESTEROV), group=between))
        for step in range(2 * H):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank // 2)  # one island, one batch
            x = torch.randn(8, 24, dtype=torch.float64, generator=generator)
            (model(x) - x[:, :16]).square().mean().backward()
            optimizer.step()
    far = max(
        float((p.full_tensor() - q).detach().abs().max())  # type: ignore[attr-defined]  # a DTensor
        for p, q in zip(module.parameters(), whole.parameters(), strict=True)
    )
    sharded, plain = handles
    again = copy.deepcopy(sharded.state_dict())
    sharded.load_state_dict(again)
    half = all(
        p.numel() * 2 == q.numel() for p, q in zip(sharded.parameters.values(), plain.parameters.values(), strict=True)
    )
    return sharded.verify_replicas(), plain.verify_replicas(), half, far


def test_sharded_islands_are_workers_too(ranks: Ranks) -> None:
    for alike, plain, half, far in ranks.run(4, _sharded_islands):
        assert alike
        assert plain
        assert half
        assert far < 1e-12


def _evaluated() -> float:
    """An evaluation leaves what the root holds whole. How far another one is from that of the global parameters."""
    mesh, x = mesh_of(2, 2, names=("between", "within")), torch.ones(2, 24)
    model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 16))
    for part in (model[0], model):
        fully_shard(part, mesh=mesh["within"])
    optimizer = SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(x)
    handle = tw.outer(model, optimizer, tw.OuterSteps(every=H), group=mesh["between"].get_group())
    model(x).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        model(x)
        handle.go_back()
        found = model(x).clone()
        model.reshard()  # type: ignore[operator]
        return float((found - model(x)).abs().max())


def test_who_goes_back_after_an_evaluation_has_the_global_parameters(ranks: Ranks) -> None:
    assert ranks.run(4, _evaluated) == [0.0] * 4


def _without_a_shard(fragments: Any) -> str:
    """Two islands of two ranks, whose second has nothing of the last layer."""
    mesh = mesh_of(2, 2, names=("between", "within"))
    model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 1))
    fully_shard(model, mesh=mesh["within"])
    group, steps = mesh["between"].get_group(), tw.OuterSteps(every=H, fragments=fragments)
    return told(partial(tw.outer, model, SGD(model.parameters(), lr=0.1), steps, group=group))


@pytest.mark.parametrize("fragments", [4, (("0",), ("2",))])
def test_a_fragment_of_which_a_rank_has_nothing_is_refused_on_all(ranks: Ranks, fragments: Any) -> None:
    for said in ranks.run(4, _without_a_shard, fragments):
        assert re.search(r"ValueError: (rank 1: )?.*(expected at most 2, .*each rank|'2', which has no .* here)", said)


# --- torch.compile ---


def _compiled_step() -> tuple[float, int]:
    """Train with a compiled step of the optimizer. Return how far from one that is not."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of what torch's compiler imports
    found = []
    for compiled in (False, True):
        worker = Worker(tw.outer_steps.diloco(every=2), inner=partial(SGD, lr=0.1))
        plain: Callable[[], object] = worker.optimizer.step
        step = torch.compile(plain, backend="eager") if compiled else plain
        for at in range(4):
            worker.optimizer.zero_grad()
            worker.loss(worker.model, at).backward()
            step()
        found.append(worker)
    return _far(found[0].common(), found[1].common()), found[1].handle.ticks


@pytest.mark.slow
def test_a_compiled_step_counts(ranks: Ranks) -> None:
    for far, ticks in ranks.run(2, _compiled_step):
        assert far < 1e-12
        assert ticks == 4


# --- where workers start from ---


def _loaded(order: str) -> tuple[str, float]:
    """Load what workers saved in the middle of a period, or in part, or late. Return what that raised, and how far
    their mean moves in the next two outer steps."""
    steps, sharded = tw.OuterSteps(every=H, make_optimizer=partial(SGD, lr=1.0)), "sharded" in order
    worker = Worker(steps, sharded=sharded).train(range(6 * H + ("own" in order)))
    saved = worker.save()
    loaded = copy.deepcopy(worker.common())
    worker.handle.remove()
    worker = Worker(steps, sharded=sharded)
    for word in order.split():
        match word:
            case "own":
                worker.model.load_state_dict(saved["model"])
                worker.optimizer.load_state_dict(saved["optimizer"])
            case "made":  # load what was there when the model was made, as a single worker may that loads early
                worker.model.load_state_dict(copy.deepcopy(worker.model.state_dict()))
            case "alike":
                worker.model.load_state_dict(loaded)
            case "alone":
                if dist.get_rank() == 1:
                    worker.model.load_state_dict(loaded)
            case "handle":
                worker.handle.load_state_dict(saved["handle"])
            case "back":
                worker.handle.go_back()
    said = told(worker.train, range(6 * H + 1, 8 * H + 1))
    return said, _far(loaded, worker.common())


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("own handle", ""),
        pytest.param("handle own", "", marks=pytest.mark.slow),
        ("handle back own", ""),
        pytest.param("own handle back", "", marks=pytest.mark.slow),
        pytest.param("handle back", "", marks=pytest.mark.slow),
        pytest.param("alike", "", marks=pytest.mark.slow),
        ("made handle made", ""),
        ("sharded handle own", ""),
        ("alone back", ""),
        ("own", r"workers \[0, 1\] of 2.*load_state_dict.*before outer"),
        ("alone", r"workers \[1\] of 2.*load_state_dict.*before outer"),
        ("handle", r"workers \[0, 1\] of 2.*but not the model.*go_back"),
    ],
)
def test_what_is_loaded_late_is_not_taken_for_training(ranks: Ranks, order: str, words: str) -> None:
    for said, far in ranks.run(2, _loaded, order):
        assert re.search(f"^RuntimeError.*{words}" if words else "^nothing$", said, re.DOTALL), said
        assert words or order in ("alone back", "made handle made") or far < 0.2


def _reloaded(order: str) -> list[int]:
    """Load what was saved four outer steps ago. Return how often that was a warning, by training afterwards."""
    worker = Worker(tw.OuterSteps(every=H, make_optimizer=partial(SGD, lr=1.0))).train(range(2 * H))
    saved = worker.save()
    worker.train(range(2 * H, 6 * H))
    counts = []
    with logged() as said:
        for word in order.split():
            match word:
                case "model":
                    worker.model.load_state_dict(saved["model"])
                case "handle":
                    worker.handle.load_state_dict(saved["handle"])
                case "back":
                    worker.handle.go_back()
        for start in (6 * H, 7 * H):
            worker.train(range(start, start + H))
            counts.append(sum("in mid-training" in each for each in said))
    return counts


@pytest.mark.parametrize(
    ("order", "warned"), [("model", 1), ("model handle", 0), ("handle model", 0), ("model back", 0), ("", 0)]
)
def test_a_model_that_is_loaded_alone_in_mid_training_is_a_warning(ranks: Ranks, order: str, warned: int) -> None:
    assert ranks.run(2, _reloaded, order) == [[warned, warned]] * 2


# --- workers of unequal speed ---


def _weighed() -> float:
    """Return how far an outer step is from the mean in which one worker's samples count three times."""
    odd = dist.get_rank() == 1
    worker = Worker(tw.OuterSteps(every=H, make_optimizer=partial(SGD, lr=1.0)), samples=3 if odd else 1)
    own = dict[str, Tensor]()
    worker.handle.fragments[0].start = _noting(worker, own)  # type: ignore[method-assign]  # to see what it sends
    worker.train(range(H))
    total = {name: (3 if odd else 1) * x / (dist.get_world_size() + 2) for name, x in own.items()}
    for x in total.values():
        dist.all_reduce(x)
    return _far(worker.common(), total)


def _noting(worker: Worker, own: dict[str, Tensor]) -> Callable[..., None]:
    start = worker.handle.fragments[0].start

    def noting(*arguments: Any, **options: Any) -> None:
        own.update(worker.own())
        start(*arguments, **options)

    return noting


def test_samples_weigh(ranks: Ranks) -> None:
    assert max(ranks.run(3, _weighed)) < 1e-14


# --- models and loops ---


def _normalised() -> tuple[bool, float]:
    """Whether running statistics agree after an outer step, and how far they are from their mean before it."""
    normalised = nn.BatchNorm1d(16)
    model = nn.Sequential(nn.Linear(24, 16), normalised)
    optimizer = SGD(model.parameters(), lr=0.1)
    found, means = normalised.running_mean, list[Tensor]()
    assert found is not None
    optimizer.register_step_post_hook(lambda *_: means.append(found.clone()))
    tw.outer(model, optimizer, tw.outer_steps.diloco(every=H))
    for step in range(H):
        optimizer.zero_grad()
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().mean().backward()
        optimizer.step()
    mean = means[-1].double() / dist.get_world_size()
    dist.all_reduce(mean)
    world = dist.group.WORLD
    assert world is not None
    return not drift.differing({"mean": found}, world), float((found - mean).abs().max())


def test_running_statistics_are_averaged(ranks: Ranks) -> None:
    for alike, far in ranks.run(3, _normalised):
        assert alike
        assert far < 1e-7


def _with_statistics(dtype: torch.dtype) -> nn.Module:
    return _model(dtype).insert(1, nn.BatchNorm1d(40, dtype=dtype))


def _statistics_resumed(after: int, path: str) -> tuple[bool, bool, bool]:
    """Whether statistics resume from all that a worker saved, and from the handle's state alone as they last agreed."""
    method = tw.outer_steps.streaming_diloco(every=4, fragments=1, delay=2)
    old, new, other = (Worker(method, make=_with_statistics) for _ in range(3))
    saved = old.train(range(after)).save()
    dcp.save({"thinwire": tw.Checkpoint(old.handle)}, checkpoint_id=path)
    dcp.load({"thinwire": tw.Checkpoint(other.handle, path)}, checkpoint_id=path)
    old.handle.go_back()
    other.handle.go_back()
    back = _statistics(old)
    alike = _same(back, _statistics(other))
    for each in (old, new):
        each.load(copy.deepcopy(saved)).train(range(after, after + 6))
    return alike, bool(back["running_mean"].any()), _same(_statistics(old), _statistics(new))


def _statistics(worker: Worker) -> dict[str, Tensor]:
    held = dict(worker.model.get_submodule("1").named_buffers())
    return {name: held[name].clone() for name in ("running_mean", "running_var")}


@pytest.mark.parametrize("after", [5, 7])
def test_running_statistics_resume(ranks: Ranks, after: int, tmp_path: Path) -> None:
    assert ranks.run(2, _statistics_resumed, after, str(tmp_path)) == [(True, after == 7, True)] * 2


def _statistics_after(leave_out: bool, nan_on: tuple[int, ...]) -> tuple[bool, bool]:
    """Some ranks meet one batch with a NaN. Whether this rank's running statistics are finite after that, and agree."""
    normalised = nn.BatchNorm1d(16)
    model = nn.Sequential(nn.Linear(24, 16), normalised)
    optimizer = SGD(model.parameters(), lr=0.1)
    tw.outer(model, optimizer, tw.OuterSteps(every=H, leave_out=leave_out))
    for step in range(3 * H):
        optimizer.zero_grad()
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        x[0, 0] += math.nan if step == H and dist.get_rank() in nan_on else 0.0
        model(x).square().mean().backward()
        optimizer.step()
    found, world = normalised.running_mean, dist.group.WORLD
    assert found is not None
    assert world is not None
    return bool(found.isfinite().all()), not drift.differing({"mean": found}, world)


@pytest.mark.grid
@pytest.mark.parametrize("nan_on", [(1,), (0, 1)])
@pytest.mark.parametrize("leave_out", [False, True])
def test_running_statistics_recover_from_a_nan(ranks: Ranks, leave_out: bool, nan_on: tuple[int, ...]) -> None:
    assert ranks.run(2, _statistics_after, leave_out, nan_on) == [(True, True)] * 2


def _one_bad_shard(leave_out: bool) -> tuple[bool, bool]:
    """Two sharded islands; a NaN in rank 2's shard. Whether global ones stay, and whether all are finite at the end."""
    mesh = mesh_of(2, 2, names=("between", "inside"))
    model = _model()
    fully_shard(model, mesh=mesh["inside"])
    optimizer, between = SGD(model.parameters(), lr=0.1), mesh["between"].get_group()
    steps = tw.OuterSteps(every=1, make_optimizer=partial(SGD, lr=1.0), leave_out=leave_out)
    handle = tw.outer(model, optimizer, steps, group=between)
    before = {name: p.detach().clone() for name, p in handle.parameters.items()}
    moves = 1.0 if dist.get_rank() < 2 else 3.0
    for p in model.parameters():
        p.grad = torch.full_like(p, moves)
    if dist.get_rank() == 2:
        next(iter(model.parameters())).grad.to_local().view(-1)[0] = math.nan  # type: ignore[union-attr]
    optimizer.step()
    step = 0.1 if leave_out else 0.0  # of the sound island alone, or none
    held = all(bool(((before[name] - p).detach() - step).abs().max() < 1e-6) for name, p in handle.parameters.items())
    return held, all(bool(p.to_local().isfinite().all()) for p in model.parameters())  # type: ignore[attr-defined]


@pytest.mark.parametrize("leave_out", [False, True])
def test_a_nan_in_one_shard_is_one_in_all(ranks: Ranks, leave_out: bool) -> None:
    assert ranks.run(4, _one_bad_shard, leave_out) == [(True, True)] * 4


def _two_optimizers() -> tuple[int, bool]:
    model = _model()
    optimizers = [SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[2].parameters(), lr=1e-2)]
    handle = tw.outer(model, optimizers, tw.outer_steps.diloco(every=2))
    for step in range(4):
        x = torch.randn(8, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(step + dist.get_rank()))
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return handle.inner_steps, handle.stats().total.steps == 2 and handle.verify_replicas()


def test_several_optimizers_take_a_step_together(ranks: Ranks) -> None:
    assert ranks.run(2, _two_optimizers) == [(4, True)] * 2


def _given_back() -> tuple[bool, int]:
    worker = Worker(tw.outer_steps.diloco(every=2)).train(range(3))
    worker.handle.remove()
    before = worker.common()
    return _same(before, worker.train(range(3, 8)).common()), worker.handle.inner_steps


def _unfrozen() -> str:
    """Return what is raised where a parameter is trained only after the handle was made."""
    model = _model()
    model[0].bias.requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = tw.outer(model, optimizer, tw.OuterSteps(every=1))
    optimizer.step()
    model[0].bias.requires_grad_(True)
    said = told(optimizer.step)
    handle.remove()
    tw.outer(model, optimizer, tw.OuterSteps(every=1))
    optimizer.step()
    return said


def test_what_is_unfrozen_later_is_not_left_to_drift(ranks: Ranks) -> None:
    for said in ranks.run(2, _unfrozen):
        assert re.search("RuntimeError: the optimizer trains 1 parameters that it did not.*make another", said), said


def _changed_alone(how: str, options: dict[str, int]) -> tuple[list[str], int, bool]:
    """Change an optimizer on rank 1 until that is refused: what is said, the outer steps, and whether workers agree."""
    worker = Worker(tw.OuterSteps(**options))  # type: ignore[arg-type]
    said = list[str]()
    for step in range(4 * H):
        if step == H - 1 and dist.get_rank() == 1:
            undo = _change(worker, how)
        if (word := told(worker.train, range(step, step + 1))) != "nothing":
            said.append(word)
            if dist.get_rank() == 1:
                undo()
    return said, worker.handle.stats().total.steps, worker.handle.verify_replicas()


def _change(worker: Worker, how: str) -> Callable[[], Any]:
    """Change an optimizer. Return what undoes it."""
    outer: Any = worker.handle.optimizers[0]
    match how:
        case "inner group":
            worker.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
            return worker.optimizer.param_groups.pop
        case "outer group":
            outer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
            return outer.param_groups.pop
        case "outer class":
            outer.__class__ = torch.optim.AdamW
            return partial(setattr, outer, "__class__", SGD)
        case _:
            return partial(outer.param_groups[0]["params"].append, outer.param_groups[0]["params"].pop())


@pytest.mark.parametrize(
    ("how", "options", "words"),
    [
        ("inner group", {"every": H}, "the optimizer trains 1 parameters that it did not.*make another"),
        ("inner group", {"every": H, "delay": 1}, "the optimizer trains 1 parameters that it did not.*make another"),
        (
            "outer group",
            {"every": H},
            r"optimizers\[0\] is no longer the SGD that .*or holds other parameters.*undo it",
        ),
        (
            "outer class",
            {"every": H},
            r"optimizers\[0\] is no longer the SGD that .*or holds other parameters.*undo it",
        ),
        ("outer less", {"every": H}, r"optimizers\[0\] is no longer the SGD that .*or holds other parameters.*undo it"),
    ],
)
def test_an_optimizer_that_one_worker_changes_is_refused_on_all(
    ranks: Ranks, how: str, options: dict[str, int], words: str
) -> None:
    for said, steps, agree in ranks.run(2, _changed_alone, how, options):
        assert len(said) == 1
        assert re.search(rf"^RuntimeError: .*{words}.* \(on workers \[1\]\)$", said[0]), said
        assert (steps, agree) == (3, True)


def _by_another_optimizer() -> tuple[list[str], list[str]]:
    """What is said while a wrapper's steps alternate with those that count, and then where another optimizer steps."""
    worker, messages = Worker(tw.OuterSteps(every=H)), list[list[str]]()
    for others in (1, H + 2):
        with logged() as said:
            worker.train(range(2))
            other = SGD(worker.model.parameters(), lr=0.1)
            for _ in range(others):
                other.step()
            worker.handle.remove()
            other.step()
        messages.append(list(said))
        worker = Worker(tw.OuterSteps(every=H))
    return messages[0], messages[1]


def test_steps_of_another_optimizer_that_nothing_follows_are_a_warning(ranks: Ranks) -> None:
    for before, after in ranks.run(2, _by_another_optimizer):
        assert before == []
        assert len(after) == 1
        assert after[0].startswith("a SGD that outer() was not given")


def test_a_step_that_evaluates_a_closure_is_one_step() -> None:
    p = nn.Parameter(torch.zeros(1))
    strangers, other = Strangers({id(p)}, []), SGD([p])
    strangers.due = 1
    with logged() as said:
        other.step(lambda: 0.0)
        assert said == []
        other.step(lambda: 0.0)
    assert len(said) == 1


def test_a_removed_handle_takes_no_more_steps(ranks: Ranks) -> None:
    assert ranks.run(2, _given_back) == [(True, 3)] * 2


def _lying_otherwise() -> tuple[list[str], float]:
    """What differs between workers that start with their elements in another order in memory, and the first's sum."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    if dist.get_rank():
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    handle = tw.outer(model, SGD(model.parameters(), lr=0.1), tw.OuterSteps(every=H))
    return handle.differing_parameters(), float(model.weight[0, 0].detach().sum())


def test_workers_whose_memory_formats_differ_start_alike(ranks: Ranks) -> None:
    (differing, one), (_, other) = ranks.run(2, _lying_otherwise)
    assert (differing, one) == ([], other)


def _changed_later() -> bool:
    """Whether running statistics agree whose buffers `double()` has replaced."""
    model = nn.Sequential(nn.Linear(24, 16), nn.BatchNorm1d(16))
    optimizer = SGD(model.parameters(), lr=0.1)
    tw.outer(model, optimizer, tw.OuterSteps(every=H))
    model.double()
    for step in range(H):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).double()
        model(x).square().mean().backward()
        optimizer.step()
    return not drift.differing(dict(model.named_buffers()), dist.group.WORLD)  # type: ignore[arg-type]


def test_running_statistics_are_the_models_own(ranks: Ranks) -> None:
    assert all(ranks.run(2, _changed_later))


def _frozen_ones_changed() -> list[str]:
    """What differs once `double()` has given frozen parameters other memory, and one worker's change."""
    model, frozen = _model(torch.float32), nn.Parameter(torch.zeros(3), requires_grad=False)
    model.register_parameter("frozen", frozen)
    handle = tw.outer(model, SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), tw.OuterSteps(every=H))
    model.double()
    frozen.add_(dist.get_rank())
    return handle.differing_parameters()


def test_frozen_parameters_are_the_models_own(ranks: Ranks) -> None:
    assert ranks.run(2, _frozen_ones_changed) == [["frozen"]] * 2


def _scaled() -> int:
    """Inner steps that are counted of 18, of which a fused optimizer skips one by itself; a warning is an error."""
    model = _model(torch.float32)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cpu", init_scale=1.0)
    handle = tw.outer(model, optimizer, tw.outer_steps.sparseloco(every=1))
    for step in range(18):
        optimizer.zero_grad()
        loss = model(torch.ones(8, 24)).square().mean() * (math.inf if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return handle.inner_steps


def test_steps_that_a_scaler_skips_do_not_count(ranks: Ranks) -> None:
    assert ranks.run(1, _scaled) == [17]


def _turned_off(how: str, recipe: str, options: dict[str, int]) -> tuple[list[str], int, float]:
    """Turn running statistics off on rank 1 until that is refused: what is said, the outer steps, and how far all go.

    Each inner step moves every parameter by 1, and the outer optimizer adds the mean of that.
    """
    model = nn.Sequential(nn.Linear(24, 16), nn.BatchNorm1d(16))
    nn.utils.vector_to_parameters(torch.zeros(24 * 16 + 48), model.parameters())
    normalised, optimizer = model[1], SGD(model.parameters(), lr=1.0)
    steps = tw.OuterSteps(recipe=_small(recipe), make_optimizer=partial(SGD, lr=1.0), **options)  # type: ignore[arg-type]
    handle = tw.outer(model, optimizer, steps)
    held, said = dict(normalised._buffers), list[str]()
    for step in range(4 * H):
        if step == H - 1 and dist.get_rank() == 1:
            _turn_off(normalised, how)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if (word := told(optimizer.step)) != "nothing":
            normalised._buffers |= held
            said.append(word)
    assert handle.verify_replicas()
    far = -min(float(p.detach().min()) for p in handle.parameters.values())
    return said, handle.stats().total.steps, far


def _turn_off(normalised: Any, how: str) -> None:
    if how == "deleted":
        del normalised.running_mean
    else:
        normalised.running_mean = None if how == "none" else torch.zeros(3)


@pytest.mark.parametrize(
    ("how", "recipe", "options", "moved"),
    [
        ("none", "dense", {"every": H}, 4 * H),
        ("deleted", "topk", {"every": H}, 4 * H),
        ("shape", "dense", {"every": H}, 4 * H),
        ("none", "dense", {"every": H, "fragments": H, "delay": H - 1}, 6),
    ],
)
def test_running_statistics_that_are_turned_off_are_refused(
    ranks: Ranks, how: str, recipe: str, options: dict[str, int], moved: float
) -> None:
    words = r"RuntimeError: the buffer '1.running_mean' is gone.*\(16,\).*put it back.*on all.*\(on workers \[1\]\)$"
    for said, taken, far in ranks.run(2, _turned_off, how, recipe, options):
        assert len(said) == 1
        assert re.search(words, said[0]), said
        assert (taken, far) == (3, moved)


def _with_state_of_its_own() -> tuple[bool, bool]:
    """Go back with an optimizer that keeps numbers and lists. Whether it keeps what is finite, and nothing else."""
    worker = Worker(tw.OuterSteps(every=H), inner=SGD)
    one, other, *_ = worker.model.parameters()
    state: dict[Any, Any] = worker.optimizer.state
    state |= {"calls": 1, one: {"pasts": [torch.ones(2)]}, other: {"pasts": [torch.tensor(math.nan)]}}
    worker.handle.go_back()
    worker.handle.optimizers[0].state["calls"] = 1  # type: ignore[index]
    assert worker.handle.memory.total
    return {"calls", one} == state.keys(), state["calls"] == 1


def test_any_optimizers_state_is_looked_through(ranks: Ranks) -> None:
    assert ranks.run(1, _with_state_of_its_own) == [(True, True)]


# --- bad input ---


def _told_by_all(wrong: str) -> str:
    """Have rank 1 ask for something else than the others."""
    odd, model = dist.get_rank() == 1, _model()
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    steps, options = tw.OuterSteps(every=H), dict[str, Any]()
    match wrong:
        case "every":
            steps = tw.OuterSteps(every=H + odd)
        case "recipe":
            steps = tw.OuterSteps(every=H, recipe=tw.recipes.topk() if odd else tw.recipes.dense())
        case "fragments":
            steps = tw.OuterSteps(every=H, fragments=1 + odd)
        case "rate":
            steps = tw.OuterSteps(every=H, make_optimizer=partial(SGD, lr=0.5 + odd))
        case "outer optimizer":
            kind = torch.optim.AdamW if odd else torch.optim.Adam
            steps = tw.OuterSteps(every=H, make_optimizer=partial(kind, lr=0.1))
        case "epsilon":
            steps = tw.OuterSteps(every=H, make_optimizer=partial(torch.optim.Adam, lr=0.1, eps=1e-6 if odd else 1e-8))
        case "model" if odd:
            model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 17)).double()
            optimizer = SGD(model.parameters(), lr=0.1)
        case "foreign" if odd:
            optimizer = SGD(_model().parameters(), lr=0.1)
        case "part" if odd:
            optimizer = SGD(model[0].parameters(), lr=0.1)
        case "more" if odd:
            optimizer = SGD([*model.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)
        case "no steps" if odd:
            steps = tw.recipes.dense()  # type: ignore[assignment]
        case "no optimizer" if odd:
            optimizer = []
        case "uncovered" if odd:
            steps = tw.OuterSteps(every=H, fragments=(("0",),))
        case "twice" if odd:
            steps = tw.OuterSteps(every=H, fragments=(("0",), ("0.bias", "2")))
        case "unknown" if odd:
            steps = tw.OuterSteps(every=H, fragments=(("0", "2"), ("decoder",)))
        case "many" if odd:
            steps = tw.OuterSteps(every=H, fragments=5)
        case "complex" if odd:
            model.register_parameter("phase", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
        case "frozen" if odd:
            model.requires_grad_(False)
        case "no outer optimizer" if odd:
            steps = tw.OuterSteps(every=H, make_optimizer=lambda parameters: len(parameters))  # type: ignore[arg-type,return-value]
        case "no outer optimizer here" if odd:
            steps = tw.OuterSteps(every=H, make_optimizer=lambda _: dict[str, Any]()["missing"])
        case "another's" if odd:
            steps = tw.OuterSteps(every=H, make_optimizer=lambda _: SGD(_model().parameters(), lr=0.5))
        case "buffer" if odd:
            model.register_buffer("mask", torch.zeros(3))
        case "unused" | "unknown argument" if odd:
            options = {"grace": 1.0} if wrong == "unused" else {"sample": 3}
        case "FSDP1":
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))  # type: ignore[assignment]
            optimizer = SGD(model.parameters(), lr=0.1)
        case "at work":
            tw.outer(model, optimizer, steps).remove()
            tw.outer(model, optimizer, steps)
    return told(partial(tw.outer, model, optimizer, steps, **options))


WRONG = {
    "every": "FingerprintError.*'every': 3.*rank 1 has.*'every': 4",
    "recipe": "FingerprintError: recipe differs",
    "fragments": "FingerprintError.*'fragments': 2",
    "rate": r"FingerprintError.*'lr': 0.5.*'lr': 1.5",
    "outer optimizer": r"FingerprintError.*Adam \[.*AdamW \[",
    "epsilon": r"FingerprintError.*'eps': 1e-08.*'eps': 1e-06",
    "model": "FingerprintError: parameter 2.weight differs",
    "foreign": "ValueError.*does not hold '0.weight' and 3 more.*pass the one that trains",
    "part": "ValueError.*does not hold '2.weight' and 1 more",
    "more": "ValueError.*holds 1 parameters that the model lacks.*pass a module that has them all",
    "no steps": "TypeError.*steps is .*expected",
    "no optimizer": "TypeError.*expected the torch.optim.Optimizer that trains",
    "uncovered": "ValueError.*'2.weight' is in 0 fragments.*name its module in one of them",
    "twice": "ValueError.*'0.bias' is in 2 fragments.*leave it to one",
    "unknown": "ValueError.*'decoder'.*no trainable parameters.*0.weight",
    "many": "ValueError: (rank 1: )?fragments is 5; expected at most 4",
    "frozen": "ValueError: (rank 1: )?the model has no trainable parameters: unfreeze",
    "no outer optimizer": "TypeError.*made a int; expected one of torch.optim's",
    "no outer optimizer here": r"KeyError: 'missing'|RuntimeError: rank 1: KeyError\('missing'\)",
    "another's": "ValueError.*the optimizer SGD holds 4 parameters; expected the 4 that it is given",
    "at work": "RuntimeError.*already follow the steps of this SGD; call remove",
    "FSDP1": "TypeError: FullyShardedDataParallel .FSDP1.*fully_shard",
    "complex": "TypeError.*phase is complex; keep it as torch.view_as_real",
    "buffer": r"FingerprintError: parameter or buffer mask differs.*absent.*\(3,\)",
    "unused": "ValueError.*grace=1.0 given without store=",
    "unknown argument": "TypeError.*outer has no argument 'sample'",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_on_one_worker_is_refused_on_all(ranks: Ranks, wrong: str) -> None:
    for found in ranks.run(3, _told_by_all, wrong):
        assert re.search(WRONG[wrong], found), found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every is 0; expected an integer of at least 1"),
        ({"every": 3, "delay": 3}, "expected a delay below it"),
        ({"every": tw.schedules.Every(steps=1), "delay": 1}, "every is a schedule; expected no delay"),
        ({"every": 3, "mixing": 1.0}, "mixing is 1.0"),
        ({"every": 3, "fragments": 0}, "fragments is 0"),
    ],
)
def test_settings_out_of_range(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tw.OuterSteps(**options)


def test_anything_but_a_recipe() -> None:
    with pytest.raises(TypeError, match=r"expected one such as recipes.topk"):
        tw.OuterSteps(every=3, recipe=0.01)  # type: ignore[arg-type]  # what is wrong


def _state_of_another(wrong: str) -> str:
    worker = Worker(METHODS["sparseloco"]()).train(range(4))
    saved = worker.save()["handle"]
    before = worker.common()
    if dist.get_rank() == 1:
        common = saved["memories"][-1]
        match wrong:
            case "name":
                common["other.weight"] = common["0.weight"]
            case "shape":
                common["0.weight"]["common:global"] = torch.zeros(3, 3, dtype=torch.float64)
            case "missing":
                del common["2.bias"]
            case "fragments":
                saved["outer"] *= 2
            case "attachment":
                del saved["outer"]
            case "optimizer":
                saved["outer"] = [[{"lr": 0.1, "betas": (0.9, 0.999)}]]
            case "own":
                del saved["own"]
            case "own is none":
                saved["own"] = None
            case "NaN":
                common["0.weight"]["common:global"][0] = torch.nan
            case "no tensor":
                common["0.weight"]["common:global"] = None
            case "no memory":
                saved["memories"][0] = None
    found = told(worker.handle.load_state_dict, saved)
    assert _same(before, worker.common())
    return found


def _not_finite_in_an_island(value: float, dtype: torch.dtype) -> tuple[str, bool, bool]:
    """Load what is not finite in the momentum of one rank of two sharded islands: what is said, and what is kept."""
    mesh = mesh_of(2, 2, names=("between", "inside"))
    model = _model()
    fully_shard(model, mesh=mesh["inside"])
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = tw.outer(model, optimizer, tw.OuterSteps(every=1), group=mesh["between"].get_group())
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        before = copy.deepcopy(handle.state_dict())
    held = copy.deepcopy(before)
    fields = held["memories"][-1]["0.weight"]
    fields["common:optimizer momentum_buffer"] = fields["common:optimizer momentum_buffer"].to(dtype)
    if dist.get_rank() == 2:
        fields["common:optimizer momentum_buffer"][0] = value
    held["step"] -= 1
    said = told(handle.load_state_dict, held)
    after = handle.state_dict()
    same = [_same(one, other) for one, other in zip(*(_flat(each) for each in (before, after)), strict=True)]
    return said, all(same), before["step"] == after["step"] == handle.ticks


def _flat(state: dict[str, Any]) -> list[dict[str, Tensor]]:
    return [fields for memory in state["memories"] for fields in memory.values()]


@pytest.mark.parametrize(
    ("value", "dtype"), [(math.nan, torch.float64), (-math.inf, torch.bfloat16), (math.nan, torch.float8_e4m3fn)]
)
def test_momentum_that_is_not_finite_is_refused_on_all_ranks(ranks: Ranks, value: float, dtype: torch.dtype) -> None:
    for said, kept, stayed in ranks.run(4, _not_finite_in_an_island, value, dtype):
        assert re.search(r"ValueError: .*24 of 480 values in optimizer momentum_buffer of '0.weight' are not", said), (
            said
        )
        assert (kept, stayed) == (True, True)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            "name",
            "'other.weight', which the model lacks: it has '0.bias', .*, and so on. Load the state of this model",
        ),
        ("shape", r"has shape \(3, 3\).*expected \(40, 24\).*another model"),
        ("missing", "lacks '2.bias'"),
        ("fragments", "has 2 fragments, but this handle has 1"),
        ("attachment", "not a state of outer steps"),
        ("optimizer", "belongs to another optimizer.*SGD.*it was saved with"),
        ("own", "'own' in the state.* is None; expected two counts"),
        ("own is none", "'own' in the state.* is None; expected two counts"),
        ("NaN", "24 of 960 values in global of '0.weight' are not finite"),
        ("no tensor", "None.* for '0.weight'; expected tensors with values"),
        ("no memory", "not what state_dict.. returned on this rank: AttributeError"),
    ],
)
def test_the_state_of_another_model_is_refused(ranks: Ranks, wrong: str, words: str) -> None:
    for found in ranks.run(2, _state_of_another, wrong):
        assert re.search(f"ValueError.*{words}", found), found


# --- how a model is cut ---


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_fragments_are_of_about_equal_size(parts: int) -> None:
    parameters = {str(i): nn.Parameter(torch.empty(10 + i)) for i in range(20)}
    found = cut(parameters, parts)
    sizes = [sum(p.numel() for p in part.values()) for part in found]
    assert [name for part in found for name in part] == list(parameters)
    assert len(found) == parts
    assert max(sizes) - min(sizes) <= 29


def test_every_fragment_has_something() -> None:
    parameters = {
        "large": nn.Parameter(torch.empty(1000)),
        "a": nn.Parameter(torch.empty(1)),
        "b": nn.Parameter(torch.empty(1)),
    }
    assert [list(part) for part in cut(parameters, 3)] == [["large"], ["a"], ["b"]]


@pytest.mark.parametrize("every", [1, 2, 5, 30])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_each_fragment_is_due_once_in_every_h_steps(every: int, parts: int) -> None:
    steps = tw.OuterSteps(every=every, fragments=parts)
    for part in range(parts):
        due = [step for step in range(1, 5 * every + 1) if part in steps.parts_due(step)]
        assert len(due) == 5
        assert {b - a for a, b in pairwise(due)} == {every}
        assert [steps.done(part, step) for step in due] == [1, 2, 3, 4, 5]
        assert steps.done(part, due[0] - 1) == 0
    assert parts - 1 in steps.parts_due(every)


def test_a_schedule_of_the_inner_steps() -> None:
    every = tw.schedules.Stages(values=(2, 4), steps_each=2, final=6)
    steps, plain = tw.OuterSteps(every=every, fragments=2), tw.outer_steps.sparseloco(every=every)
    due = [2, 4, 8, 12, 18, 24]
    assert (
        [tick for tick in range(1, 25) if 1 in steps.parts_due(tick)]
        == [tick for tick in range(25) if 0 in plain.parts_due(tick)]
        == due
    )
    assert [tick for tick in range(1, 25) if 0 in steps.parts_due(tick)] == [1, 3, 6, 10, 15, 21]
    assert [plain.done(0, tick) for tick in due] == [1, 2, 3, 4, 5, 6]
    assert [plain.following(tick) for tick in (-1, 0, 1, 2, 12, 17, 18)] == [2, 2, 2, 4, 18, 18, 24]
    assert [steps.following(tick) for tick in (0, 1, 2, 4)] == [1, 2, 3, 6]
    never = tw.OuterSteps(every=tw.schedules.Stages(values=(2,), steps_each=1, final=0))
    with pytest.raises(ValueError, match="every gives 0 inner steps at outer step 1"):
        never.parts_due(3)
    with pytest.raises(ValueError, match="gives nan at step 1; expected a finite number"):
        tw.OuterSteps(every=_Broken()).parts_due(3)
