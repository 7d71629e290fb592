"""Sharded models: replicas of FSDP2's shards against FSDP's own HSDP, and what a step may bring."""

import copy
import hashlib
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from cases import RECIPES
from ddp_models import same
from ranks import Ranks, mesh_of, told
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from thinwire.integrations.training.gradients import local

STEPS = 4
WIDTH = 20
STATEFUL = [name for name, case in RECIPES.items() if any(memory.stateful for memory in case.make().memories())]
MAKE: dict[str, Callable[[], tw.reducer.Reducer]] = {
    **{name: case.make for name, case in RECIPES.items()},
    "all": partial(tw.recipes.topk, density=1.0, minimum_size=0),
    **{
        name + " everywhere": partial(getattr(tw.recipes, name), density=0.1, minimum_size=0)
        for name in ("topk", "dgc")
    },
    "corrected": lambda: tw.recipes.dense(memory=tw.memories.MomentumCorrection()),
}


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Net(nn.Module):
    """No dimension divides by 2 or 3 alone, and `scale` has one row: other ranks hold none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.first, self.middle, self.other = Block(WIDTH, 41), Block(41, 31), Block(41, 31)
        self.last = nn.Linear(31, 5)
        self.checkpoints = False

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        x = self.first(x)
        middle = self.other if other else self.middle
        x = checkpoint(middle, x, use_reentrant=False) if self.checkpoints else middle(x)
        return self.last(x) * self.scale


@dataclass(frozen=True, kw_only=True)
class Use:
    """A way to train a sharded model: what FSDP is told, the micro-batches of a step, and what comes between them."""

    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009 - frozen
    dtype: torch.dtype = torch.float32
    microbatches: int = 1
    put_off: str = "set_requires_gradient_sync"
    checkpoints: bool = False
    others: bool = False  # odd steps use another block, and the one that is idle has no gradient
    to_none: bool = True
    modules: tuple[str, ...] = ("first", "middle", "other", "")


USES = {
    "a list of modules": Use(modules=("first", "middle,other", "")),
    "several groups": Use(),
    "one group": Use(modules=("",)),
    "bf16 computation": Use(policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
    "idle blocks": Use(others=True),
    "accumulation": Use(microbatches=3),
    "accumulation of shards": Use(microbatches=3, put_off="set_requires_all_reduce"),
    "checkpoints": Use(checkpoints=True),
    "zeroed in place": Use(to_none=False),
    "float64": Use(dtype=torch.float64),
}


def grid(replicas: int = 2) -> DeviceMesh:
    """Return a mesh of all ranks."""
    return mesh_of(replicas, dist.get_world_size() // replicas, names=("replicate", "shard"))


def build(use: Use, mesh: DeviceMesh) -> Net:
    torch.manual_seed(0)
    net = Net().to(use.dtype)
    net.checkpoints = use.checkpoints
    for name in use.modules:
        several: Any = [net.get_submodule(each) for each in name.split(",")]
        fully_shard(several if len(several) > 1 else several[0], mesh=mesh, mp_policy=use.policy)
    return net


def batch(step: int, microbatch: int = 0) -> Tensor:
    """Return this rank's inputs."""
    generator = torch.Generator().manual_seed(10_000 * dist.get_rank() + 100 * microbatch + step)
    return torch.randn(8, WIDTH, generator=generator)


class Native:
    """A model in training that FSDP replicates and shards, with its own HSDP."""

    def __init__(
        self, use: Use | str = "several groups", *, replicas: int = 2, make: Any = None, **options: Any
    ) -> None:
        self.use = USES[use] if isinstance(use, str) else use
        self.mesh = grid(replicas)
        self.net = self.build()
        self.scaler: torch.amp.GradScaler | None = None
        make = make or partial(torch.optim.SGD, momentum=0.9)
        self.optimizer = make(self.net.parameters(), **({"lr": 0.05} | options))

    def build(self) -> Net:
        return build(self.use, self.mesh)

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad.to_local() for n, p in self.net.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]

    def backward(self, step: int) -> None:
        put_off = getattr(self.net, self.use.put_off)
        for i in range(self.use.microbatches):
            put_off(i == self.use.microbatches - 1)
            loss = self.net(batch(step, i).to(self.use.dtype), self.use.others and step % 2 == 1).square().mean()
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, step: int) -> bool:
        """Do one step, and return whether this rank's gradients were finite; the optimizer steps only then."""
        self.optimizer.zero_grad(set_to_none=self.use.to_none)
        self.backward(step)
        finite = all(bool(g.isfinite().all()) for g in self.gradients().values())
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif finite:
            self.optimizer.step()
        return finite

    def run(self, steps: range) -> Self:
        for step in steps:
            self.step(step)
        return self

    def shards(self) -> dict[str, Tensor]:
        return {name: p.detach().to_local() for name, p in self.net.named_parameters()}  # type: ignore[attr-defined]

    def digest(self) -> str:
        sha = hashlib.sha256()
        for x in self.shards().values():
            sha.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()


class Sharded(Native):
    """The same, where thinwire exchanges between the replicas."""

    def __init__(
        self,
        use: Use | str = "several groups",
        recipe: str = "topk",
        *,
        scaler: torch.amp.GradScaler | None = None,
        overlap: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(use, **options)
        self.scaler = scaler
        self.handle = tw.shard(
            self.net, MAKE[recipe](), mesh=self.mesh, optimizer=self.optimizer, scaler=scaler, overlap=overlap
        )

    def build(self) -> Net:
        return build(self.use, self.mesh["shard"])


def _clone(training: Native) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in training.shards().items()}


def _far(a: Native, b: Native) -> float:
    """Return the largest difference between two models' shards, over the largest of their values."""
    pairs = [(x, y) for x, y in zip(a.shards().values(), b.shards().values(), strict=True) if x.numel()]
    return max(float((x - y).abs().max()) for x, y in pairs) / max(float(x.abs().max()) for x, _ in pairs)


# --- as FSDP's own HSDP ---


def _both(use: str, recipe: str) -> tuple[str, str, bool, int]:
    native, sharded = Native(use).run(range(STEPS)), Sharded(use, recipe).run(range(STEPS))
    return native.digest(), sharded.digest(), sharded.handle.verify_replicas(), sharded.handle.attachment.step


@pytest.mark.grid
@pytest.mark.parametrize("recipe", ["dense", "all"])
@pytest.mark.parametrize("use", USES)
def test_sending_all_is_native_hsdp_to_the_bit(ranks: Ranks, use: str, recipe: str) -> None:
    # A sum of two has no order, and dividing by 2 rounds nothing.
    for native, sharded, alike, steps in ranks.run(4, _both, use, recipe):
        assert native == sharded
        assert (alike, steps) == (True, STEPS)


def _close(replicas: int, recipe: str) -> tuple[float, bool]:
    native = Native(replicas=replicas).run(range(STEPS))
    sharded = Sharded(recipe=recipe, replicas=replicas).run(range(STEPS))
    return _far(native, sharded), sharded.handle.verify_replicas()


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("recipe", ["dense", "all"])
def test_with_six_ranks_it_is_native_hsdp_but_for_rounding(ranks: Ranks, replicas: int, recipe: str) -> None:
    for far, alike in ranks.run(6, _close, replicas, recipe):
        assert far < 1e-6
        assert alike


@pytest.mark.parametrize(("ranks_", "replicas"), [(2, 1), (2, 2), (1, 1)])
def test_one_replica_and_one_shard_are_enough(ranks: Ranks, ranks_: int, replicas: int) -> None:
    for far, alike in ranks.run(ranks_, _close, replicas, "all"):
        assert (far, alike) == (0.0, True)


def _corrected() -> tuple[float, float, float]:
    """Return how far momentum in the memory is from momentum in the optimizer, before and after it is given back."""
    native = Native(weight_decay=0.1).run(range(STEPS))
    sharded = Sharded(recipe="corrected", weight_decay=0.1).run(range(STEPS))
    before, left = _far(native, sharded), sharded.optimizer.param_groups[0]["momentum"]
    sharded.handle.remove()
    return before, _far(native.run(range(STEPS, 2 * STEPS)), sharded.run(range(STEPS, 2 * STEPS))), left


def test_momentum_moves_into_the_memory_and_back(ranks: Ranks) -> None:
    for before, after, left in ranks.run(4, _corrected):
        assert before < 1e-6
        assert after < 1e-6
        assert left == 0.9


def _accumulated(recipe: str) -> float:
    """Exchange after each of three backwards, which add up to one step."""
    native, sharded = Native(), Sharded(recipe=recipe)
    for step in range(STEPS):
        for training in (native, sharded):
            training.optimizer.zero_grad()
            for part in range(3):
                training.backward(3 * step + part)
            training.optimizer.step()
    assert sharded.handle.attachment.step == STEPS
    return _far(native, sharded)


PENALTIES = "first", "last", "before"


def penalised(training: Any, when: str) -> None:
    """Train with a penalty on the shards themselves: autograd adds its gradient, and FSDP does not reduce it."""

    def penalty() -> Any:
        return 0.05 * sum(p.to_local().square().sum() for p in training.optimizer.param_groups[0]["params"])

    for step in range(STEPS):
        training.optimizer.zero_grad()
        first, loss, last = penalty(), training.net(batch(step)).square().mean(), penalty()
        parts = {"first": [first + loss], "last": [loss + last], "before": [last, loss]}
        for each in parts[when]:
            each.backward()
        training.optimizer.step()


def _penalised(when: str) -> float:
    native, sharded = Native(), Sharded(recipe="all")
    for training in (native, sharded):
        penalised(training, when)
    return _far(native, sharded)


@pytest.mark.parametrize("when", PENALTIES)
def test_a_penalty_on_parameters_counts(ranks: Ranks, when: str) -> None:
    assert max(ranks.run(4, _penalised, when)) < 1e-6


@pytest.mark.parametrize("recipe", ["dense", "all"])
def test_a_step_may_have_several_exchanges(ranks: Ranks, recipe: str) -> None:
    assert max(ranks.run(4, _accumulated, recipe)) < 1e-6


def _kept() -> tuple[int, int, int]:
    """Return how many elements of one shard two exchanges of a step have delivered: the first, both, and in common."""
    sharded, found = Sharded(recipe="topk"), []
    for step in range(2):
        sharded.backward(step)
        found.append(sharded.gradients()["middle.linear.weight"] != 0)
    return int(found[0].sum()), int(found[1].sum()), int((found[0] & found[1]).sum())


def test_what_was_delivered_is_not_sent_again(ranks: Ranks) -> None:
    for first, both, common in ranks.run(4, _kept):
        assert 0 < first == common < both


def _applied() -> float:
    """Return how far parameters move when momentum is given back, from what waited times the learning rate."""
    sharded = Sharded(recipe="dgc").run(range(STEPS))
    before, name = _clone(sharded), "middle.linear.weight"
    waits = sum(m[name]["residual"] for m in sharded.handle.state_dict()["memories"] if name in m)
    assert isinstance(waits, Tensor)
    dist.all_reduce(waits, group=sharded.mesh.get_group("replicate"))
    assert bool(waits.any())
    sharded.handle.remove()
    return float((before[name] - sharded.shards()[name] - 0.05 * waits.view_as(before[name])).abs().max())


def test_what_waits_with_its_momentum_is_applied_on_removal(ranks: Ranks) -> None:
    assert max(ranks.run(4, _applied)) < 1e-6


def _summed(factor: float) -> float:
    native, sharded = Native(), Sharded(recipe="all")
    for training in (native, sharded):
        for module in training.net.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
                module.set_force_sum_reduction_for_comms(True)
    return _far(native.run(range(STEPS)), sharded.run(range(STEPS)))


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_a_divide_factor_counts_for_all_ranks(ranks: Ranks, factor: float) -> None:
    assert max(ranks.run(4, _summed, factor)) < 1e-6


# --- while backward goes on ---


@contextmanager
def _small_buckets(nbytes: int = 600) -> Iterator[None]:
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(importlib.import_module("thinwire.integrations.training.gradients"), "BYTES", nbytes)
        yield


def _parted(recipe: str, use: str) -> tuple[list[int], int, str, str]:
    """Return how many buckets had started when a backward was over, of how many, and what training comes to."""
    whole, started = Sharded(use, recipe).run(range(STEPS)), []
    parted = Sharded(use, recipe)
    arrivals: Any = parted.handle._arrivals
    exchange = arrivals.exchange

    def noting() -> None:
        started.append(len(arrivals.started))
        exchange()

    arrivals.exchange = noting
    with _small_buckets():
        parted.run(range(STEPS))
    return started, len(arrivals.buckets), whole.digest(), parted.digest()


@pytest.mark.grid
@pytest.mark.parametrize("recipe", ["dense", "topk", "dgc", "powersgd"])
@pytest.mark.parametrize("use", ["several groups", "accumulation of shards"])
def test_exchanges_overlap_with_backward_and_change_no_bit(ranks: Ranks, use: str, recipe: str) -> None:
    for started, count, whole, parted in ranks.run(4, _parted, recipe, use):
        assert whole == parted
        assert (started[0], len(set(started[1:]))) == (0, 1)
        assert count - 2 <= started[1] < count  # `other` is idle


def _twice(overlap: bool, first: bool) -> str:
    """Have FSDP say that it has added to a gradient twice in a backward, from the first or the second step on."""
    sharded = Sharded(recipe="all", overlap=overlap)
    handle, name = sharded.handle, "middle.linear.weight"

    def again(gradient: Tensor) -> None:
        handle._backwards._note_arrived(name, handle.attachment.parameters[name])

    def step(i: int) -> None:
        if i == 1 - first:
            sharded.net.first.register_forward_hook(lambda _, inputs, output: output.register_hook(again) and None)
        sharded.step(i)

    with _small_buckets():
        return next(filter("nothing".__ne__, (told(step, i) for i in range(3))), "nothing")


@pytest.mark.parametrize(("overlap", "first"), [(True, True), (False, False), (True, False)])
def test_a_gradient_may_come_twice_if_that_is_known(ranks: Ranks, overlap: bool, first: bool) -> None:
    for said in ranks.run(4, _twice, overlap, first):
        assert ("pass overlap=False" in said) == (overlap and not first), said
        assert (overlap and not first) or said == "nothing"


# --- the laws of a recipe, shard by shard ---


def _adam(parameters: Iterator[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, weight_decay=0.1, foreach=True, **options)


def _alike(recipe: str) -> list[tuple[bool, int, bool]]:
    found = []
    for use in ("several groups", "idle blocks", "accumulation"):
        make = _adam if recipe in ("fading", "demo") else None
        start = Sharded(use, recipe, make=make)
        before = start.digest()
        start.run(range(STEPS))
        found.append((start.handle.verify_replicas(), start.handle.attachment.step, start.digest() != before))
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_of_replicas_stay_bit_identical(ranks: Ranks, recipe: str) -> None:
    assert ranks.run(4, _alike, recipe) == [[(True, STEPS, True)] * 3] * 4


def _differs() -> tuple[bool, list[str]]:
    sharded = Sharded(recipe="topk")
    if dist.get_rank() == 3:
        sharded.shards()["middle.linear.weight"][2, 3] += 1
    return sharded.handle.verify_replicas(), sharded.handle.differing_parameters()


def test_replicas_that_differ_are_found_among_those_of_the_shard(ranks: Ranks) -> None:
    expected = [(True, []), (False, ["middle.linear.weight"])] * 2
    assert ranks.run(4, _differs) == expected


def _shard_of(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's rows, cut as FSDP cuts them."""
    parts = torch.chunk(x, mesh["shard"].size())
    mine = mesh.get_local_rank("shard")
    return parts[mine] if mine < len(parts) else x[:0]


def _plain() -> Net:
    torch.manual_seed(0)
    return Net().double()


def _conserved(recipe: str) -> tuple[float, float]:
    """Return how far delivered + waiting is from all there was, over all there was; and how much waits."""
    sharded, plain = Sharded("float64", recipe, lr=0.0, momentum=0.0), _plain()
    delivered: dict[str, Tensor] = {}
    due: dict[str, Tensor] = {}
    for step in range(STEPS):
        sharded.step(step)
        plain.zero_grad()
        plain(batch(step).double()).square().mean().backward()
        for name, p in plain.named_parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                due[name] = due.get(name, 0) + _shard_of(p.grad / dist.get_world_size(), sharded.mesh)
        for name, g in sharded.gradients().items():
            delivered[name] = delivered.get(name, 0) + g.clone()
    waits = {name: torch.zeros_like(x) for name, x in due.items()}
    for memory in sharded.handle.state_dict()["memories"]:
        for name, fields in memory.items():
            if "residual" in fields and name in waits:
                waits[name] += fields["residual"].view_as(waits[name])
    for x in waits.values():
        dist.all_reduce(x, group=sharded.mesh.get_group("replicate"))
    far = max(float((delivered[n] + waits[n] - due[n]).abs().max()) for n in due if due[n].numel())
    return far, max(float(x.abs().max()) for x in waits.values() if x.numel())


@pytest.mark.parametrize(
    "recipe",
    [name for name in STATEFUL if RECIPES[name].conserving and not RECIPES[name].momentum],
)
def test_what_is_not_delivered_waits_in_the_shard(ranks: Ranks, recipe: str) -> None:
    for far, waits in ranks.run(4, _conserved, recipe):
        assert far < (1e-12 if RECIPES[recipe].method.name not in ("fft", "powersgd") else 1e-6)
        assert waits > 0


def _memory_bytes() -> tuple[int, int]:
    sharded = Sharded(recipe="all").run(range(1))
    assert sharded.handle.memory.total == sharded.handle.memory_bytes
    held = sharded.handle.memory_bytes - sharded.handle.attachment.memory.staging
    return held, sum(x.nbytes for x in sharded.shards().values())


def test_memory_is_that_of_the_shard(ranks: Ranks) -> None:
    idle = 4 * (41 * 31 + 31)  # nothing waits for a block that is never used
    for held, size in ranks.run(4, _memory_bytes):
        assert held <= 3 * size
        assert held >= 3 * size - 3 * idle


# --- bad steps and checkpoints ---


@contextmanager
def _spoilt(sharded: Sharded, on_rank: int, value: float) -> Iterator[None]:
    """Make one element of one parameter's gradient bad on one rank."""

    def spoil(x: Tensor) -> Tensor:
        if dist.get_rank() == on_rank:
            x = x.clone()
            x[:, -1] = value
        return x

    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        output.register_hook(spoil)

    handle = sharded.net.middle.linear.register_forward_hook(hook)
    yield
    handle.remove()


def _poisoned(recipe: str, value: float) -> list[str]:
    """Return what went wrong around a step in which one rank has one bad column."""
    wrong = []
    sharded = Sharded(recipe=recipe, make=_adam if recipe in ("fading", "demo") else None).run(range(2))
    before, weights = copy.deepcopy(sharded.handle.state_dict()), sharded.digest()
    with _spoilt(sharded, 2, value):
        if sharded.step(2):
            wrong.append("not seen")
    if not all(bool(g.isnan().all()) for g in sharded.gradients().values()):
        wrong.append("not on every rank")
    if not same(sharded.handle.state_dict(), before | {"step": 3, "draw": 3}):
        wrong.append("memory changed")
    assert sharded.digest() == weights
    if not sharded.step(3) or sharded.digest() == weights:
        wrong.append("does not go on")
    return wrong if sharded.handle.verify_replicas() else [*wrong, "replicas differ"]


@pytest.mark.parametrize("recipe", STATEFUL)
def test_a_bad_gradient_is_seen_by_all_and_kept_by_none(ranks: Ranks, recipe: str) -> None:
    assert ranks.run(4, _poisoned, recipe, float("nan")) == [[]] * 4


def _scaled(recipe: str, scaled: bool) -> list[str]:
    """Return the digests of a training in which one rank's gradient is infinite in step 3."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) if scaled else None
    sharded, found = Sharded(recipe=recipe, scaler=scaler), []
    for step in range(6):
        with _spoilt(sharded, 2 if step == 3 else -1, float("inf")):
            sharded.step(step)
        found.append(sharded.digest())
    assert sharded.handle.verify_replicas()
    return found


@pytest.mark.parametrize("recipe", ["topk", "dgc", "gtopk"])
def test_a_grad_scaler_skips_the_bad_step_and_changes_no_bit(ranks: Ranks, recipe: str) -> None:
    scaled, plain = ranks.run(4, _scaled, recipe, True), ranks.run(4, _scaled, recipe, False)
    assert scaled == plain
    for found in scaled:
        assert found[3] == found[2]
        assert len(set(found)) == 5


def _in_bf16(recipe: str) -> float:
    """Return how far from HSDP's a gradient of bfloat16 parameters is, over the largest that any rank has for it."""
    use = Use(dtype=torch.bfloat16, policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    native, sharded, alone = Native(use), Sharded(use, recipe), Net()
    alone.load_state_dict({name: x.full_tensor() for name, x in native.net.state_dict().items()})
    alone = alone.to(use.dtype)
    for each in (native, sharded):
        each.backward(0)
    alone(batch(0).to(use.dtype)).square().mean().backward()
    worst = 0.0
    for p, q, own in zip(native.net.parameters(), sharded.net.parameters(), alone.parameters(), strict=True):
        if own.grad is None:
            continue
        largest = own.grad.float().abs()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        far = (p.grad.full_tensor().float() - q.grad.full_tensor().float()).abs()  # type: ignore[union-attr]
        worst = max(worst, float((far / largest.clamp_min(1e-30)).max()))
    return worst


@pytest.mark.parametrize("recipe", ["dense", "all"])
def test_bf16_parameters_differ_from_hsdp_by_roundings(ranks: Ranks, recipe: str) -> None:
    assert all(0 < far <= 2**-6 for far in ranks.run(4, _in_bf16, recipe))


def _resumed(recipe: str) -> tuple[str, str]:
    make = _adam if recipe in ("fading", "demo") else None
    old = Sharded(recipe=recipe, make=make).run(range(3))
    saved = copy.deepcopy([old.optimizer.state_dict(), old.handle.state_dict()])
    weights = _clone(old)
    old.run(range(3, 5))
    new = Sharded(recipe=recipe, make=make)
    for name, x in new.shards().items():
        x.copy_(weights[name])
    new.optimizer.load_state_dict(saved[0])
    new.handle.load_state_dict(saved[1])
    new.run(range(3, 5))
    assert same(new.handle.state_dict(), old.handle.state_dict())
    return old.digest(), new.digest()


@pytest.mark.parametrize("recipe", STATEFUL)
def test_a_resumed_run_makes_the_same_next_steps(ranks: Ranks, recipe: str) -> None:
    for uninterrupted, resumed in ranks.run(4, _resumed, recipe):
        assert uninterrupted == resumed


def _arranged() -> tuple[list[list[str]], list[list[str]], bool]:
    one, other = Sharded(recipe="topk").run(range(3)), Sharded(recipe="topk")
    other.handle.load_state_dict(one.handle.state_dict())
    other.run(range(3, 5))
    found = [
        [[s.handle.attachment.names[p] for p in b.parameters] for b in s.handle._arrivals.buckets] for s in (one, other)
    ]
    return found[0], found[1], other.handle._arrivals.overlaps


def test_buckets_and_overlap_are_the_same_after_resuming(ranks: Ranks) -> None:
    for one, other, overlaps in ranks.run(4, _arranged):
        assert one == other
        assert overlaps


def _replaced(thaw: bool) -> str:
    mesh = grid()
    net = build(USES["several groups"], mesh["shard"])
    first = next(net.parameters()).requires_grad_(not thaw)
    tw.shard(net, tw.recipes.topk(), mesh=mesh)
    if thaw:
        first.requires_grad_(True)
    else:
        net.load_state_dict(net.state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="call it again") as error:
        net(batch(0)).square().mean().backward()
    return str(error.value)


@pytest.mark.parametrize("thaw", [False, True])
def test_parameters_that_are_not_exchanged_are_noticed(ranks: Ranks, thaw: bool) -> None:
    assert all(said.startswith("parameters have been replaced or unfrozen") for said in ranks.run(4, _replaced, thaw))


def _misloaded() -> dict[str, tuple[str, bool]]:
    """Return what loading wrong states says, and whether it changed nothing."""
    sharded = Sharded(recipe="topk").run(range(2))
    own, rank = sharded.handle.state_dict(), dist.get_rank()
    everyone: list[dict[str, Any]] = [{}] * 4
    dist.all_gather_object(everyone, own)
    later = own | {"step": 7} if rank % 2 else own
    cut = {k: v for k, v in own.items() if k != "shard"} if rank == 1 else own
    wrong = {"shard": everyone[rank ^ 1], "replica": everyone[rank ^ 2], "mixture": later, "one rank": cut}
    return {
        what: (told(sharded.handle.load_state_dict, saved), same(sharded.handle.state_dict(), own))
        for what, saved in wrong.items()
    }


def test_a_state_of_another_place_is_refused_on_every_rank(ranks: Ranks) -> None:
    parts = {
        "shard": "",  # shapes tell, where rows are uneven
        "replica": "load on each rank the state that it saved",
        "mixture": "resumes from",
        "one rank": "load on each rank the state that it saved",
    }
    for found in ranks.run(4, _misloaded):
        for what, part in parts.items():
            message, unchanged = found[what]
            assert message.startswith(("ValueError", "StateError")), message
            assert part in message
            assert unchanged


def _renewed() -> tuple[str, str, int]:
    """Shard anew in the middle of a training: what waits is taken over."""
    one, other = Sharded(recipe="topk").run(range(STEPS)), Sharded(recipe="topk").run(range(2))
    other.handle = tw.shard(other.net, RECIPES["topk"].make(), mesh=other.mesh, optimizer=other.optimizer)
    other.run(range(2, STEPS))
    return one.digest(), other.digest(), other.handle.attachment.step


def test_another_handle_takes_over_what_waits(ranks: Ranks) -> None:
    for one, other, step in ranks.run(4, _renewed):
        assert one == other
        assert step == STEPS


def _unlike_at_first() -> list[tuple[bool, bool]]:
    """Replicas begin with different parameters, after an evaluation that left the root unsharded."""
    mesh = grid()
    found = []
    for where in (mesh, mesh["replicate"], mesh.get_group("replicate")):
        net = build(USES["several groups"], mesh["shard"])
        with torch.no_grad():
            for p in net.parameters():
                p.add_(mesh.get_local_rank("replicate"))
            net(batch(0))
        handle = tw.shard(net, tw.recipes.topk(), mesh=where)
        found.append((handle.verify_replicas(), handle.attachment.group.size() == 2))
    return found


def test_the_first_replica_sends_its_parameters_whatever_names_the_group(ranks: Ranks) -> None:
    assert ranks.run(4, _unlike_at_first) == [[(True, True)] * 3] * 4


# --- what is refused ---


def _refusals() -> Mapping[str, str]:
    rank = dist.get_rank()
    mesh = grid()
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    use, half = USES["several groups"], mesh["shard"]
    mixed = Net()
    fully_shard(mixed.middle, mesh=half)
    meta = torch.device("meta")
    with meta:
        ghost = Net()
        fully_shard(ghost, mesh=half)
    late = Net()
    late.first.to(meta).requires_grad_(False)
    fully_shard(late, mesh=half)
    offloaded = Net()
    fully_shard(offloaded, mesh=half, offload_policy=CPUOffloadPolicy(pin_memory=False))
    unlike = tw.recipes.topk(density=0.01 if rank != 1 else 0.02)
    used = tw.recipes.topk()
    served = build(use, half)
    tw.shard(served, used, mesh=mesh)
    one = partial(tw.shard, build(use, half))
    attempts: dict[str, Callable[[], object]] = {
        "attach": lambda: tw.attach(build(use, half), tw.recipes.topk()),  # type: ignore[arg-type]
        "replicate": lambda: tw.replicate(build(use, half), tw.recipes.topk()),
        "attach FSDP1": lambda: tw.attach(FullyShardedDataParallel(Net(), device_id="cpu"), tw.recipes.topk()),  # type: ignore[arg-type]
        "ddp": lambda: tw.shard(DistributedDataParallel(Net()), tw.recipes.topk(), mesh=mesh),
        "FSDP1": lambda: tw.shard(FullyShardedDataParallel(Net(), device_id="cpu"), tw.recipes.topk(), mesh=mesh),  # type: ignore[arg-type]
        "native": lambda: tw.shard(build(use, mesh), tw.recipes.topk(), mesh=mesh),
        "flat": lambda: tw.shard(build(use, flat), tw.recipes.topk(), mesh=flat),
        "shard alone": lambda: one(tw.recipes.topk(), mesh=half),
        "plain": lambda: tw.shard(Net(), tw.recipes.topk(), mesh=mesh),
        "mixed": lambda: tw.shard(mixed, tw.recipes.topk(), mesh=mesh),
        "sharded and ignored": lambda: one(tw.recipes.topk(), mesh=mesh, ignored_params=one.args[0].parameters()),
        "meta": lambda: tw.shard(ghost, tw.recipes.topk(), mesh=mesh),
        "frozen on meta": lambda: tw.shard(late, tw.recipes.topk(), mesh=mesh),
        "offloaded": lambda: tw.shard(offloaded, tw.recipes.topk(), mesh=mesh),
        "unlike recipes": lambda: one(unlike, mesh=mesh),
        "no momentum": lambda: one(tw.recipes.dgc(), mesh=mesh),
        "used": lambda: one(used, mesh=mesh),
        "a part": lambda: tw.shard(served.first, tw.recipes.topk(), mesh=mesh),
        "auto": lambda: one("auto", mesh=mesh),  # type: ignore[arg-type]
    }
    return {name: told(attempt) for name, attempt in attempts.items()}


def test_shard_refuses_with_the_fix_on_every_rank(ranks: Ranks) -> None:
    expected = {
        "attach": ("TypeError", "use thinwire.shard"),
        "replicate": ("TypeError", "use thinwire.shard"),
        "attach FSDP1": ("TypeError", "fully_shard (FSDP2)"),
        "ddp": ("TypeError", "thinwire.attach"),
        "FSDP1": ("TypeError", "fully_shard (FSDP2)"),
        "native": ("ValueError", 'fully_shard(module, mesh=mesh["shard"])'),
        "flat": ("ValueError", "mesh of two dimensions"),
        "shard alone": ("ValueError", "leaves no replicas"),
        "plain": ("TypeError", "call fully_shard"),
        "mixed": ("TypeError", "ignored_params"),
        "sharded and ignored": ("TypeError", "fully_shard(..., ignored_params=...)"),
        "meta": ("TypeError", "to_empty"),
        "frozen on meta": ("TypeError", "first.linear.weight is on the meta device"),
        "offloaded": ("TypeError", "fully_shard without offload_policy"),
        "unlike recipes": ("FingerprintError", "recipe differs"),
        "no momentum": ("MomentumError", "optimizer="),
        "used": ("RuntimeError", "make a new recipe"),
        "a part": ("RuntimeError", "call shard with the whole model"),
        "auto": ("TypeError", "choose a recipe by name"),
    }
    for messages in ranks.run(4, _refusals):
        assert messages.keys() == expected.keys()
        for name, parts in expected.items():
            assert all(part in messages[name] for part in parts), messages[name]


def _native_single(replicas: int) -> str:
    """FSDP gets the whole mesh, though its own replicas or islands are single ranks."""
    mesh = init_device_mesh("cpu", (replicas, 2 // replicas), mesh_dim_names=("replicate", "shard"))
    model: Any = fully_shard(nn.Linear(8, 8), mesh=mesh)
    return told(lambda: tw.shard(model, tw.recipes.topk(), mesh=mesh))


@pytest.mark.parametrize("replicas", [1, 2])
def test_shard_refuses_the_whole_mesh_of_single_ranks_too(ranks: Ranks, replicas: int) -> None:
    """Or else it would exchange within groups of one rank, and send nothing."""
    for message in ranks.run(2, _native_single, replicas):
        assert "ValueError" in message
        assert 'fully_shard(module, mesh=mesh["shard"])' in message


def _ignored() -> tuple[bool, bool]:
    """A plain parameter that was named is left to its owner."""
    mesh = grid()
    net: Any = Net()
    fully_shard(net, mesh=mesh["shard"], ignored_params={net.scale})
    handle = tw.shard(net, tw.recipes.topk(), mesh=mesh, ignored_params=[net.scale])
    net(batch(0)).square().mean().backward()
    assert net.scale.grad is not None
    grads = torch.cat([g.grad.to_local().view(-1) for g in net.last.parameters()])
    first = grads.clone()
    dist.broadcast(first, group=mesh.get_group("replicate"), group_src=0)
    return "scale" not in handle.attachment.parameters, torch.equal(first, grads)


def test_plain_parameters_may_be_left_out_on_request(ranks: Ranks) -> None:
    assert ranks.run(4, _ignored) == [(True, True)] * 4


# --- what happens on one rank alone ---


def _one_alone(wrong: int) -> dict[str, str]:
    """Have one rank give what no rank should, and return what all are told."""
    mesh, use = grid(), USES["several groups"]
    mine = dist.get_rank() == wrong

    def attempt(model: Any, recipe: Any = None) -> str:
        recipe = tw.recipes.topk() if recipe is None else recipe
        return told(lambda: tw.shard(model, recipe, mesh=mesh))

    def built() -> Net:
        return build(use, mesh["shard"])

    waiting, net = tw.recipes.topk(minimum_size=0), built()
    tw.shard(net, waiting, mesh=mesh)
    if mesh.get_local_rank("shard") == wrong % 2:  # something waits in one column
        residual = {"residual": torch.ones_like(local(net.last.weight)).view(-1)}
        next(m for m in waiting.memories() if m.stateful).restore({"last.weight": residual})
    return {
        "no recipe": attempt(built(), "auto" if mine else None),
        "a plain model": attempt(Net() if mine else built()),
        "a wrong type": told(
            lambda: tw.shard(built(), tw.recipes.topk(), mesh=mesh, overlap=3 if mine else True)  # type: ignore[arg-type]
        ),
        "another recipe": attempt(built(), tw.recipes.qsgd() if mine else None),
        "waiting in one column": attempt(net, tw.recipes.powersgd()),
    }


@pytest.mark.parametrize("wrong", [0, 3])
def test_what_is_wrong_on_one_rank_is_an_error_on_every_rank(ranks: Ranks, wrong: int) -> None:
    expected = {
        "no recipe": ("TypeError", "shard takes a recipe"),
        "a plain model": ("TypeError", "is sharded"),
        "a wrong type": ("TypeError", "overlap is 3; expected"),
        "another recipe": ("FingerprintError", "recipe differs"),
        "waiting in one column": ("RuntimeError", "an earlier attachment to this model has residuals"),
    }
    for messages in ranks.run(4, _one_alone, wrong):
        for name, parts in expected.items():
            assert all(part in messages[name] for part in parts), (name, messages[name])


def _one_loads_nothing() -> str:
    sharded = Sharded(recipe="topk").run(range(2))
    saved = sharded.handle.state_dict()
    again = Sharded(recipe="topk")
    return told(again.handle.load_state_dict, saved) if dist.get_rank() != 3 else told(again.step, 2)


def test_a_rank_that_loads_nothing_is_an_error_on_every_rank(ranks: Ranks) -> None:
    for said in ranks.run(4, _one_loads_nothing):
        assert said.startswith("StateError: rank 0 resumes from"), said


def _evaluated_alone() -> tuple[str, bool]:
    """Have one replica evaluate before training, while the other goes on."""
    sharded = Sharded(recipe="topk")
    if not sharded.mesh.get_local_rank("replicate"):
        with torch.no_grad():
            sharded.net.eval()(batch(0))
    dist.barrier()
    sharded.net.train()
    return sharded.run(range(2)).digest(), sharded.handle.verify_replicas()


def test_one_replica_may_evaluate_before_training(ranks: Ranks) -> None:
    found = ranks.run(4, _evaluated_alone)
    assert found[:2] == found[2:]
    assert all(alike for _, alike in found)


def _failing(recipe: str) -> str:
    """Have the exchange fail between the ranks of one column."""
    sharded = Sharded(recipe=recipe).run(range(2))
    if sharded.mesh.get_local_rank("shard") == 1:

        def fail(*_: object, **__: object) -> None:
            raise OSError("the link is down")

        sharded.handle.attachment.reduce = fail  # type: ignore[method-assign,assignment]  # on these ranks
    sharded.handle._arrivals.overlaps = False
    return told(sharded.step, 2)


@pytest.mark.parametrize("recipe", ["dense", "topk"])
def test_an_exchange_that_fails_in_one_column_is_an_error_on_every_rank(ranks: Ranks, recipe: str) -> None:
    said = ranks.run(4, _failing, recipe)
    assert said[1] == said[3] == "OSError: the link is down"
    assert (
        said[0] == said[2] == "RuntimeError: an exchange has failed between other ranks of this mesh: see their errors"
    )


def _removed() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # for this test
    logging.getLogger("thinwire").addHandler(handler)
    try:
        Sharded(recipe="topk").run(range(1)).handle.remove()
    finally:
        logging.getLogger("thinwire").removeHandler(handler)
    return said


def test_removal_says_what_averages_from_then_on(ranks: Ranks) -> None:
    words = "removed: gradients are averaged uncompressed from now on; what thinwire.shard returned does that"
    assert [said for each in ranks.run(4, _removed) for said in each] == [words] * 2  # the first of each column


def _rowless(to_none: bool, how: str) -> tuple[int, int, str]:
    """Train a model of one row: the second shard has none of it. Return its step as saved, and now."""
    mesh = grid()
    torch.manual_seed(0)
    net = nn.Linear(WIDTH, 1)
    fully_shard(net, mesh=mesh["shard"])
    handle = tw.shard(net, tw.recipes.topk(density=0.1, minimum_size=0), mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=to_none)
        for part in range(2 if how == "accumulated" else 1):
            net(batch(step, part)).square().mean().backward()
        if how != "skipped" or step % 2:
            optimizer.step()
    if how == "skipped" and not to_none:
        net(batch(0)).square().mean().backward()  # the shard without rows learns of it here
        optimizer.step()
    saved = handle.state_dict()
    return saved["step"], handle.attachment.step, told(handle.load_state_dict, saved)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("how", ["plain", "accumulated", "skipped"])
def test_a_shard_without_rows_keeps_step(ranks: Ranks, to_none: bool, how: str) -> None:
    (first, *_), *others = found = ranks.run(4, _rowless, to_none, how)
    assert first == (STEPS + 1 if how == "skipped" and not to_none else STEPS)
    assert others, found
    assert all(each == (first, first, "nothing") for each in found)
