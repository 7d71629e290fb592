"""Models sharded over all ranks: a compressed reduce-scatter against FSDP's own, and against a plain reference."""

import copy
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, Self
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import RECIPES
from ddp_models import same
from ranks import Ranks, mesh_of, told
from test_shard import PENALTIES, Net, Use, _small_buckets, batch, build, grid, penalised
from test_shard import USES as OF_SHARDS
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.integrations.attachments import assembly
from thinwire.integrations.sharding import gathering, lane
from thinwire.integrations.sharding.contributions import Contributions
from thinwire.integrations.training.gradients import local
from thinwire.reducer import Segment
from thinwire.reducer.owners import ToOwners, to_owners

STEPS = 4
USES = OF_SHARDS | {
    "float64": Use(dtype=torch.float64, policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)),
}
SUMS = 16 * 2**-24
"""By how much sums of four numbers in another order may differ, over the largest of them, after `STEPS` steps."""
MAKE: dict[str, Callable[[], tw.reducer.Reducer]] = {
    **{name: case.make for name, case in RECIPES.items()},
    "all": partial(tw.recipes.topk, density=1.0, minimum_size=0),
    "some": partial(tw.recipes.topk, density=0.05, minimum_size=0),
    "parts": lambda: tw.reducer.PerTensor(
        reducers={"dense": tw.recipes.dense()},
        chosen={"scale": "dense"},
        otherwise=tw.reducer.WarmUp(
            steps=1, first=tw.recipes.dense(), then=tw.recipes.topk(density=0.1, minimum_size=64)
        ),
    ),
}
ABLE = [
    name
    for name, case in RECIPES.items()
    if not case.momentum and not told(to_owners, case.make()).startswith("TypeError")
]
"""What `to_owners` takes."""
CONSERVING = [name for name in ABLE if RECIPES[name].conserving and RECIPES[name].make().memories()[-1].stateful]


def line() -> DeviceMesh:
    """Return a mesh of all ranks in one dimension."""
    return mesh_of(dist.get_world_size(), names=("shard",))


class Native:
    """A model in training that FSDP shards over all ranks."""

    def __init__(self, use: Use | str = "several groups", **options: Any) -> None:
        self.use = USES[use] if isinstance(use, str) else use
        self.mesh = line()
        self.net = build(self.use, self.mesh)
        self.optimizer = torch.optim.SGD(self.net.parameters(), **({"lr": 0.05, "momentum": 0.9} | options))

    def backward(self, step: int) -> None:
        for i in range(self.use.microbatches):
            getattr(self.net, self.use.put_off)(i == self.use.microbatches - 1)
            x = batch(step, i).to(self.use.dtype)
            self.net(x, self.use.others and step % 2 == 1).square().mean().backward()

    def step(self, step: int) -> bool:
        """Do one step, and return whether this rank's gradients were finite; the optimizer steps only then."""
        self.optimizer.zero_grad(set_to_none=self.use.to_none)
        self.backward(step)
        finite = all(bool(g.isfinite().all()) for g in self.gradients().values())
        if finite:
            self.optimizer.step()
        return finite

    def run(self, steps: range) -> Self:
        for step in steps:
            self.step(step)
        return self

    def gradients(self) -> dict[str, Tensor]:
        return {name: local(p.grad) for name, p in self.net.named_parameters() if p.grad is not None}

    def shards(self) -> dict[str, Tensor]:
        return {name: local(p.detach()) for name, p in self.net.named_parameters()}


class Scattered(Native):
    """The same, where thinwire takes gradients to their owners."""

    def __init__(self, use: Use | str = "several groups", recipe: str = "some", **options: Any) -> None:
        overlap = options.pop("overlap", True)
        super().__init__(use, **options)
        make = MAKE[recipe]
        self.handle = tw.scatter(self.net, make(), mesh=self.mesh, optimizer=self.optimizer, overlap=overlap)


class Plain:
    """The whole model on each rank, and what it should be given: means in float64 of what FSDP rounds to float32."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = Net().double()

    def means(self, step: int, of: Callable[[Tensor], Tensor] = lambda g: g) -> dict[str, Tensor]:
        """Return the mean over ranks of what `of` makes of each gradient."""
        self.net.zero_grad()
        self.net(batch(step).double()).square().mean().backward()
        found = {name: p.grad for name, p in self.net.named_parameters() if p.grad is not None}
        found = {name: of(g.float().double()) / dist.get_world_size() for name, g in found.items()}
        for mean in found.values():
            dist.all_reduce(mean)
        return found


def far(a: Native, b: Native) -> float:
    """Return the largest difference between two models' shards, over the largest of their values."""
    pairs = [(x, y) for x, y in zip(a.shards().values(), b.shards().values(), strict=True) if x.numel()]
    return max(float((x - y).abs().max()) for x, y in pairs) / max(float(x.abs().max()) for x, _ in pairs)


def alike(a: Native, b: Native) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.shards().values(), b.shards().values(), strict=True))


# --- as FSDP's own reduce-scatter ---


def _both(use: str, recipe: str) -> tuple[float, int]:
    native, scattered = Native(use).run(range(STEPS)), Scattered(use, recipe).run(range(STEPS))
    return far(native, scattered), scattered.handle.attachment.step


@pytest.mark.grid
@pytest.mark.parametrize("recipe", ["dense", "all"])
@pytest.mark.parametrize("use", USES)
def test_sending_all_is_native_fsdp_but_for_the_order_of_sums(ranks: Ranks, use: str, recipe: str) -> None:
    for difference, step in ranks.run(4, _both, use, recipe):
        assert difference <= (SUMS if use != "bf16 computation" else 2**-7)
        assert step == STEPS


@pytest.mark.parametrize("count", [1, 3])
def test_it_works_alone_and_with_rows_that_do_not_divide(ranks: Ranks, count: int) -> None:
    for difference, _ in ranks.run(count, _both, "several groups", "all"):
        assert difference <= SUMS


def _in_bf16() -> float:
    """Return how far a bfloat16 gradient is from the float64 sum of what the ranks send, over the largest of it."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.bfloat16)
    scattered, alone = Scattered(Use(policy=policy), "all"), Net()
    alone.load_state_dict({name: x.full_tensor() for name, x in scattered.net.state_dict().items()})
    scattered.backward(0)
    alone(batch(0)).square().mean().backward()
    worst = 0.0
    for name, p in alone.named_parameters():
        if p.grad is not None:
            due = p.grad.bfloat16().double() / dist.get_world_size()
            dist.all_reduce(due)
            got = scattered.net.get_parameter(name).grad.full_tensor()  # type: ignore[union-attr]
            worst = max(worst, float((got - due).abs().max() / due.abs().max()))
    return worst


def _of_bf16_parameters(microbatches: int) -> tuple[float, float]:
    """Return how far FSDP's and our gradients of bfloat16 parameters are from the float64 mean, over the largest."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    use = Use(dtype=torch.bfloat16, policy=policy, microbatches=microbatches, modules=("first", "middle", ""))
    native, scattered = Native(use), Scattered(use, "all")
    torch.manual_seed(0)
    alone = Net().bfloat16()
    far = [0.0, 0.0]
    for each in (native, scattered):
        each.backward(0)
    due: dict[str, Tensor] = {}
    for i in range(microbatches):
        alone.zero_grad()
        alone(batch(0, i).bfloat16()).square().mean().backward()
        due |= {n: due.get(n, 0) + p.grad.double() for n, p in alone.named_parameters() if p.grad is not None}
    for name, mean in due.items():
        dist.all_reduce(mean.div_(dist.get_world_size()))
        for i, each in enumerate((native, scattered)):
            got = each.net.get_parameter(name).grad.full_tensor()  # type: ignore[union-attr]
            far[i] = max(far[i], float((got - mean).abs().max() / mean.abs().max()))
    return far[0], far[1]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_of_bf16_parameters_are_rounded_once_at_each_sender(ranks: Ranks, microbatches: int) -> None:
    for native, scattered in ranks.run(3, _of_bf16_parameters, microbatches):
        assert native <= 2**-8
        assert scattered <= 2**-7


def test_what_is_reduced_in_bf16_is_summed_in_float32(ranks: Ranks) -> None:
    assert all(difference <= SUMS for difference in ranks.run(4, _in_bf16))


def _parted() -> tuple[int, bool, bool]:
    """Return how many buckets started before backward ended, and whether that changed nothing."""
    with _small_buckets():
        before, after = Scattered(), Scattered(overlap=False)
    arrivals, started = before.handle._arrivals, list[int]()
    exchange = arrivals.exchange

    def counted() -> None:
        started.append(len(arrivals.started))
        exchange()

    with _small_buckets(), mock.patch.object(arrivals, "exchange", counted):
        for each in (before, after):
            each.run(range(STEPS))
    return max(started), alike(before, after), same(before.handle.state_dict(), after.handle.state_dict())


def test_overlap_changes_no_bit(ranks: Ranks) -> None:
    for started, weights, waiting in ranks.run(4, _parted):
        assert started > 0
        assert weights
        assert waiting


def _cut(nbytes: int) -> tuple[list[list[str]], int]:
    """Return the parameters of each bucket, and the bytes of the largest bucket of whole gradients."""
    scattered, sent, reduce = Scattered(), list[int](), ToOwners.reduce

    def noted(self: ToOwners, bucket: tw.reducer.Bucket, at: tw.reducer.Round) -> Any:
        sent.append(bucket.flat.nbytes)
        return reduce(self, bucket, at)

    with _small_buckets(nbytes), mock.patch.object(ToOwners, "reduce", noted):
        scattered.run(range(2))
    names = scattered.handle.attachment.names
    return [[names[p] for p in bucket.parameters] for bucket in scattered.handle._arrivals.buckets], max(sent)


@pytest.mark.parametrize("nbytes", [100, 240, 700])
def test_ranks_with_fewer_rows_have_the_same_buckets_of_whole_gradients(ranks: Ranks, nbytes: int) -> None:
    found = ranks.run(4, _cut, nbytes)
    largest = max(p.numel() * p.element_size() for p in Net().parameters())
    assert all(each == found[0] for each in found)
    assert found[0][1] < nbytes + largest


def _penalised(when: str) -> float:
    native, scattered = Native(), Scattered(recipe="all")
    for training in (native, scattered):
        penalised(training, when)
    return far(native, scattered)


@pytest.mark.parametrize("when", PENALTIES)
def test_a_penalty_on_parameters_counts(ranks: Ranks, when: str) -> None:
    assert max(ranks.run(4, _penalised, when)) < SUMS


def _several(recipe: str) -> float:
    """Several exchanges in a step, whose results add up."""
    native, scattered = Native(), Scattered(recipe=recipe)
    for each in (native, scattered):
        each.backward(0)
        each.backward(1)
        each.optimizer.step()
        each.run(range(2, 4))
    return far(native, scattered)


@pytest.mark.parametrize("recipe", ["dense", "all"])
def test_a_step_may_have_several_exchanges(ranks: Ranks, recipe: str) -> None:
    assert max(ranks.run(4, _several, recipe)) <= SUMS


# --- what waits ---


def _conserved(recipe: str, remove: bool = False) -> tuple[float, float]:
    """Return how far delivered + waiting is from all there was, over the largest of that; and how much waits."""
    scattered, plain = Scattered("float64", recipe, lr=0.0, momentum=0.0), Plain()
    left: dict[str, Tensor] = {}
    largest = 0.0
    for step in range(STEPS):
        if remove and step == STEPS - 1:
            scattered.handle.remove()
        scattered.step(step)
        for name, mean in plain.means(step).items():
            got = scattered.net.get_parameter(name).grad.full_tensor()  # type: ignore[union-attr]
            left[name] = left.get(name, 0) + mean - got
            largest = max(largest, float(mean.abs().max()))
    waiting = 0.0
    for memory in scattered.handle.state_dict()["memories"]:
        for name, fields in memory.items():
            waits = fields["residual"].clone()
            dist.all_reduce(waits)
            if name in left:
                left[name] -= waits.view_as(left[name])
            waiting = max(waiting, float(waits.abs().max()))
    return max(float(x.abs().max()) for x in left.values()) / largest, waiting


@pytest.mark.parametrize("recipe", [*CONSERVING, "some", "parts"])
def test_what_owners_did_not_get_waits_at_the_senders(ranks: Ranks, recipe: str) -> None:
    for difference, waiting in ranks.run(4, _conserved, recipe):
        assert difference < (1e-12 if recipe != "fft" else 1e-6)
        assert waiting > 0


def _largest_of_each_owner(g: Tensor) -> Tensor:
    """Pick by hand: of each owner's rows, the largest."""
    kept = torch.zeros_like(g)
    for rows, out in zip(g.chunk(dist.get_world_size()), kept.chunk(dist.get_world_size()), strict=True):
        place = rows.flatten().abs().topk(max(1, round(0.05 * rows.numel()))).indices
        out.view(-1)[place] = rows.flatten()[place]
    return kept


def _picked() -> list[bool]:
    scattered, plain = Scattered("float64", "some"), Plain()
    scattered.backward(0)
    found = []
    for name, mean in plain.means(0, _largest_of_each_owner).items():
        got = scattered.net.get_parameter(name).grad.full_tensor()  # type: ignore[union-attr]
        found.append(float((got - mean).abs().max()) < 1e-15)
    return found


def test_each_rank_picks_from_the_rows_of_each_owner(ranks: Ranks) -> None:
    for found in ranks.run(4, _picked):
        assert all(found)
        assert len(found) > 5


def _figures() -> tuple[int, int, float, float, float]:
    scattered = Scattered().run(range(2))
    size = sum(p.numel() for name, p in scattered.net.named_parameters() if not name.startswith("other"))
    total = scattered.handle.stats().total
    assert scattered.handle.memory.total == scattered.handle.memory_bytes
    assert scattered.handle.memory.scratch > 0
    return scattered.handle.memory.waiting, size, total.dense_bytes, total.ratio, total.density


def test_memory_is_for_the_whole_model_and_figures_are_of_a_reduce_scatter(ranks: Ranks) -> None:
    for held, size, dense, ratio, density in ranks.run(4, _figures):
        assert size * 8 <= held <= size * 8 * 1.8  # another block is never used
        assert dense == 2 * 3 / 4 * 4 * (held // 8)
        assert 0.01 < ratio < 0.3
        assert 0.02 < density < 0.1  # zeros of the idle block do not travel


# --- bad steps and checkpoints ---


def _poisoned(recipe: str) -> list[str]:
    """Return what went wrong around a step in which one rank has one bad column."""
    wrong = []
    scattered = Scattered(recipe=recipe).run(range(2))
    before, weights = (
        copy.deepcopy(scattered.handle.state_dict()),
        {n: x.clone() for n, x in scattered.shards().items()},
    )

    def spoil(module: object, inputs: object, output: Tensor) -> None:
        if dist.get_rank() == 2:  # the last row, which one rank owns
            output.register_hook(lambda g: torch.cat([g[:, :-1], torch.full_like(g[:, -1:], torch.nan)], dim=1))

    hook = scattered.net.first.linear.register_forward_hook(spoil)
    if scattered.step(2):
        wrong.append("not seen")
    hook.remove()
    if not all(bool(g.isnan().all()) for g in scattered.gradients().values()):
        wrong.append("not on every rank")
    if not same(scattered.handle.state_dict(), before | {"step": 3, "draw": 3}):
        wrong.append("memory changed")
    if not all(torch.equal(x, weights[name]) for name, x in scattered.shards().items()):
        wrong.append("weights changed")
    return wrong if scattered.step(3) else [*wrong, "does not go on"]


def test_a_bad_gradient_is_seen_by_all_and_kept_by_none(ranks: Ranks) -> None:
    assert ranks.run(4, _poisoned, "some") == [[]] * 4


def _resumed(recipe: str) -> tuple[bool, bool]:
    old = Scattered(recipe=recipe).run(range(3))
    saved = copy.deepcopy([old.optimizer.state_dict(), old.handle.state_dict()])
    weights = {name: x.clone() for name, x in old.shards().items()}
    old.run(range(3, 5))
    new = Scattered(recipe=recipe)
    for name, x in new.shards().items():
        x.copy_(weights[name])
    new.optimizer.load_state_dict(saved[0])
    new.handle.load_state_dict(saved[1])
    new.run(range(3, 5))
    return alike(old, new), same(new.handle.state_dict(), old.handle.state_dict())


@pytest.mark.parametrize("recipe", ["some", "parts"])
def test_a_resumed_run_makes_the_same_next_steps(ranks: Ranks, recipe: str) -> None:
    assert ranks.run(4, _resumed, recipe) == [(True, True)] * 4


def _saved() -> dict[str, Any]:
    return copy.deepcopy(Scattered().run(range(3)).handle.state_dict())


def _loaded(dealt: list[dict[str, Any]], whole: bool) -> dict[str, Any]:
    """Load into a model that is scattered, or else into replicas under DDP, and return what waits then."""
    mine = dealt[dist.get_rank()]
    if whole:
        torch.manual_seed(0)
        handle: Any = tw.attach(DistributedDataParallel(Net(), find_unused_parameters=True), MAKE["some"]())
    else:
        handle = Scattered().handle
    handle.load_state_dict(mine)
    found: dict[str, Any] = handle.state_dict()
    return found


@pytest.mark.parametrize(("count", "whole"), [(2, False), (3, False), (2, True)])
def test_what_waits_goes_on_with_other_ranks_and_as_replicas(ranks: Ranks, count: int, whole: bool) -> None:
    saved = ranks.run(4, _saved)
    dealt = [tw.redistribute(saved, rank=rank, world_size=count) for rank in range(count)]
    loaded = ranks.run(count, _loaded, dealt, whole)
    assert any(bool(fields["residual"].any()) for fields in saved[0]["memories"][-1].values())
    for name in saved[0]["memories"][-1]:
        before = sum(each["memories"][-1][name]["residual"].double() for each in saved)
        after = sum(each["memories"][-1][name]["residual"].double() for each in loaded)
        assert float((before - after).abs().max()) <= 1e-6 * max(float(before.abs().max()), 1e-30), name


@pytest.mark.parametrize("recipe", ["some", "parts"])
def test_removal_sends_what_waits(ranks: Ranks, recipe: str) -> None:
    for difference, waiting in ranks.run(4, _conserved, recipe, True):
        assert difference < 1e-12
        assert not waiting


# --- what must not go unnoticed ---


def _recorded() -> bool:
    """Return whether all that FSDP has lent is said to be used by the stream that copies it."""
    scattered, lent, used = Scattered(), set[int](), set[int]()
    kept: Any = scattered.handle.attachment.recipe
    allocate = kept.allocate

    def lending(*args: Any, **given: Any) -> Tensor:
        lent.add((made := allocate(*args, **given)).untyped_storage().data_ptr())
        return made

    with (
        mock.patch.object(kept, "allocate", lending),
        mock.patch(f"{Contributions.__module__}.used_here", lambda x: used.add(x.untyped_storage().data_ptr())),
    ):
        scattered.backward(0)
    return bool(used) and used <= lent


def test_what_fsdp_lends_on_a_stream_is_not_given_away_before_it_is_copied(ranks: Ranks) -> None:
    assert all(ranks.run(4, _recorded))


def _unsent() -> list[str]:
    """Have FSDP bring gradients that nobody sends: by means of its own, and after the end of the attachment."""
    replaced, ended, raising = Scattered(), Scattered().run(range(1)), Scattered().run(range(1))
    replaced.net.first.set_custom_reduce_scatter(DefaultReduceScatter())  # type: ignore[operator]
    ended.handle.attachment.end()

    def fail(gradient: Tensor) -> None:
        raise KeyError

    with raising.net.middle.register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None):
        failed = told(raising.backward, 1)
    return [told(replaced.backward, 0), told(ended.backward, 1), failed, told(raising.backward, 1)]


def test_gradients_that_nobody_sends_are_an_error_and_no_zeros(ranks: Ranks) -> None:
    for replaced, ended, failed, afterwards in ranks.run(4, _unsent):
        assert "leave out set_custom_reduce_scatter" in replaced
        assert "call it again" in ended
        assert failed.startswith("KeyError")
        assert afterwards == "nothing"


def _one_loads_nothing() -> str:
    saved = Scattered().run(range(2)).handle.state_dict()
    again = Scattered()
    return told(again.handle.load_state_dict, saved) if dist.get_rank() else told(again.net.eval(), batch(2))


def test_a_rank_that_evaluates_where_others_load_is_an_error_on_every_rank(ranks: Ranks) -> None:
    for said in ranks.run(4, _one_loads_nothing):
        assert said.startswith("StateError: rank 0 resumes from"), said


# --- what fails to open ---

# The packages export functions of the same names.
SHARD = importlib.import_module("thinwire.integrations.sharding.shard")
REPLICATE = importlib.import_module("thinwire.integrations.replicas.replicate")
DOORS: dict[str, tuple[Callable[[Native], object], Any, str]] = {
    "a lane": (
        lambda each: tw.scatter(each.net, MAKE["some"](), mesh=each.mesh, gathers=tw.gathers.Differences()),
        lane,
        "communication_thread",
    ),
    "scatter": (
        lambda each: tw.scatter(each.net, MAKE["some"](), mesh=each.mesh, gathers=tw.gathers.Differences()),
        gathering,
        "Backwards",
    ),
    "shard": (lambda each: tw.shard(each.net, MAKE["some"](), mesh=grid(1)["replicate"]), SHARD, "start_alike"),
    "attach": (
        lambda each: tw.attach(DistributedDataParallel(Net()), MAKE["some"]()),
        DistributedDataParallel,
        "register_comm_hook",
    ),
    "replicate": (lambda each: tw.replicate(Net(), MAKE["some"]()), REPLICATE, "start_alike"),
}
"""What opens a door, and what fails within."""


def _unopened(door: str) -> tuple[str, int, bool]:
    """Return what a door raises that fails to open, what is attached then, and if the model trains as it did before."""
    native, each = Native().run(range(1)), Native().run(range(1))
    before = set(assembly._alive)
    opened, where, what = DOORS[door]
    with mock.patch.object(where, what, side_effect=RuntimeError("too many files")):
        said = told(opened, each)
    attached = [found for found in assembly._alive if found not in before and not found.ended]
    return said, len(attached), alike(native.run(range(1, 3)), each.run(range(1, 3)))


@pytest.mark.parametrize("door", DOORS)
def test_nothing_stays_of_a_door_that_fails_to_open(ranks: Ranks, door: str) -> None:
    assert ranks.run(2, _unopened, door) == [("RuntimeError: too many files", 0, True)] * 2


def test_a_recipe_decides_as_if_it_were_not_wrapped() -> None:
    """It begins, says which line a whole parameter takes, and whether memories change."""
    within, shard = mock.Mock(spec=tw.reducer.Reducer, changes=True), Segment(name="p", offset=3, length=4)
    wrapped = Contributions(within, {"p": (2, 4)}, alone=False)
    whole = Segment(name="p", offset=0, length=8, shape=torch.Size((2, 4)))
    assert wrapped.changes
    assert wrapped.route(shard, 5) is within.route.return_value
    within.route.assert_called_once_with(whole, 5)
    wrapped.begin(mock.sentinel.at)
    within.begin.assert_called_once_with(mock.sentinel.at)


def _kept_open() -> tuple[str, bool]:
    whole, each = (Scattered().run(range(2)) for _ in range(2))
    with mock.patch.object(lane, "communication_thread", side_effect=RuntimeError("too many files")):
        said = told(DOORS["a lane"][0], each)
    return said, alike(whole.run(range(2, 4)), each.run(range(2, 4)))


def test_what_was_attached_before_goes_on_where_another_fails_to_open(ranks: Ranks) -> None:
    assert ranks.run(2, _kept_open) == [("RuntimeError: too many files", True)] * 2


def _joined() -> tuple[str, str, list[bool]]:
    """Serve two parts, then the whole: at once, and after the parts' residuals are gone."""
    each = Native()
    net: Any = each.net
    parts = [tw.scatter(part, MAKE["some"](), mesh=each.mesh) for part in (net.first, net.middle)]
    whole = partial(tw.scatter, net, MAKE["some"](), mesh=each.mesh)
    each.step(0)
    refused = told(whole)
    for part in parts:
        part.remove()
    each.step(1)
    done = told(whole)
    each.step(2)
    return refused, done, [part.attachment.ended for part in parts]


def test_parts_with_residuals_are_joined_once_these_are_sent(ranks: Ranks) -> None:
    for refused, done, ended in ranks.run(2, _joined):
        assert "2 earlier attachments" in refused
        assert done == "nothing"
        assert ended == [True, True]


# --- what is refused ---


def _refusals() -> dict[str, str]:
    mesh, use = line(), USES["several groups"]
    half, columns, unlike = grid(), Net(), "some" if dist.get_rank() else "all"
    fully_shard(
        columns, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 and p.shape[1] % 4 == 0 else None
    )
    waiting = build(use, mesh)
    tw.scatter(waiting, tw.recipes.topk(density=0.01, minimum_size=0), mesh=mesh)
    factor = build(use, mesh)
    tw.scatter(factor, tw.recipes.topk(), mesh=mesh)
    factor.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    for name in use.modules[:-1]:
        factor.get_submodule(name).set_gradient_divide_factor(1.0)  # type: ignore[operator]
    attempts: dict[str, Callable[[], object]] = {
        **{
            name: partial(tw.scatter, build(use, mesh), MAKE[name](), mesh=mesh)
            for name in ("dgc", "powersgd", "gtopk", "dct_dp", "fading")
        },
        "plain": lambda: tw.scatter(Net(), tw.recipes.topk(), mesh=mesh),
        "on one rank": lambda: tw.scatter(
            Net() if dist.get_rank() == 1 else build(use, mesh), tw.recipes.topk(), mesh=mesh
        ),
        "replicas": lambda: tw.scatter(build(use, half["shard"]), tw.recipes.topk(), mesh=half),
        "FSDP's own replicas": lambda: tw.scatter(build(use, half), tw.recipes.topk(), mesh=half),
        "ddp": lambda: tw.scatter(DistributedDataParallel(Net()), tw.recipes.topk(), mesh=mesh),
        "unlike recipes": lambda: tw.scatter(build(use, mesh), MAKE[unlike](), mesh=mesh),
        "float16": lambda: tw.scatter(build(Use(dtype=torch.float16), mesh), tw.recipes.topk(), mesh=mesh),
        "columns": lambda: tw.scatter(columns, tw.recipes.topk(), mesh=mesh),
        "auto": lambda: tw.scatter(build(use, mesh), "auto", mesh=mesh),  # type: ignore[arg-type]
        "factor": lambda: factor(batch(0)).sum().backward(),
        "a part": lambda: tw.scatter(waiting.first, tw.recipes.topk(), mesh=mesh),
        "float64": lambda: tw.scatter(build(Use(dtype=torch.float64), mesh), tw.recipes.topk(), mesh=mesh),
    }
    return {name: told(attempt) for name, attempt in attempts.items()}


def test_scatter_refuses_with_the_fix_on_every_rank(ranks: Ranks) -> None:
    expected = {
        "dgc": ("TypeError", "error feedback alone"),
        "powersgd": ("TypeError", "recipes.qsgd()"),
        "gtopk": ("TypeError", "AllGather or AllReduce"),
        "dct_dp": ("TypeError", "error feedback alone"),
        "fading": ("TypeError", "error feedback alone"),
        "plain": ("TypeError", "call fully_shard"),
        "on one rank": ("TypeError", "call fully_shard"),
        "replicas": ("ValueError", "thinwire.shard"),
        "FSDP's own replicas": ("TypeError", 'fully_shard(module, mesh=mesh["shard"])'),
        "ddp": ("TypeError", "thinwire.attach"),
        "unlike recipes": ("FingerprintError", "recipe differs"),
        "float16": ("TypeError", "param_dtype"),
        "columns": ("TypeError", "shard_placement_fn"),
        "auto": ("TypeError", "recipes.topk"),
        "factor": ("RuntimeError", "asks for a sum times a factor of torch.float32"),
        "a part": ("RuntimeError", "call scatter with the whole model"),
        "float64": ("TypeError", "reduce_dtype=torch.float32"),
    }
    for messages in ranks.run(4, _refusals):
        assert messages.keys() == expected.keys()
        for name, parts in expected.items():
            assert all(part in messages[name] for part in parts), messages[name]
