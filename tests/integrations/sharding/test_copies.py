"""FSDP's all-gathers through thinwire: what every rank computes with, what is sent for it, and when nothing is."""

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from cases import GATHERS
from ddp_models import same
from ranks import _MESHES, Ranks, told
from test_scatter import Scattered, alike, line
from test_shard import USES, Net, Use, batch, build, grid
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import thinwire as tw
from thinwire import trace
from thinwire.integrations.sharding import copies, gathering
from thinwire.integrations.sharding.backward import Arrivals
from thinwire.integrations.sharding.copies import Copies, _Copy
from thinwire.integrations.sharding.lane import Coded, Lane, Started
from thinwire.integrations.training.gradients import local

dcp: Any = torch.distributed.checkpoint  # torch does not export the names in it, as mypy has it
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WAYS = {
    name: replace(USES[name], policy=BF16)
    for name in ("several groups", "one group", "idle blocks", "checkpoints", "a list of modules")
}
# FSDP itself fails where a block is idle in every micro-batch and is gathered in another dtype than it is reduced in.
WAYS["accumulation"] = Use(microbatches=3, policy=BF16, modules=("first", "middle", ""))
OF_BITS = [name for name, how in GATHERS.items() if isinstance(how, tw.gathers.Differences)]
MODEL = 4 * sum(p.numel() for p in Net().parameters())


class Gathered(Scattered):
    """A model whose gathers go through thinwire, or with None through FSDP, in bfloat16 unless `policy` says else."""

    def __init__(self, gathers: str | None = "4 bits", use: str = "several groups", **options: Any) -> None:
        how = GATHERS[gathers] if gathers else None
        self.reshard = options.pop("reshard", True)
        policy = options.pop("policy", BF16)
        scatter = tw.scatter
        with mock.patch.object(tw, "scatter", lambda *args, **given: scatter(*args, **given, gathers=how)):
            super().__init__(replace(WAYS[use], policy=policy), "dense", **options)
        for module in () if self.reshard else self.submodules():
            module.set_reshard_after_forward(False)

    def submodules(self) -> list[Any]:
        """Return the modules that `fully_shard` was called with."""
        return [module for module in self.net.modules() if isinstance(module, FSDPModule)]

    @property
    def copies(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Each parameter's copy of this rank's rows, and what these are; both flat, in float32."""
        kept: Any = self.handle._gathers
        found = {}
        held = dict(zip((name for each in kept._copies for name in each.names), kept._parameters, strict=True))
        for name, rows in (part for each in kept._copies for part in each.parts().items()):
            mine = local(held[name]).flatten()
            own = rows[dist.get_rank()].flatten()
            found[name] = own[: mine.numel()].float(), mine.to(own.dtype).float()
        return found

    def sends(self, call: Callable[..., object], *args: Any) -> int:
        """Return how many bytes of parameters this rank sends in a call."""
        before = self.handle.gathered_bytes
        call(*args)
        return self.handle.gathered_bytes - before

    def off(self) -> float:
        """Return how far the copies are from the parameters."""
        return max(float((own - x).abs().max()) for own, x in self.copies.values() if x.numel())

    def forward(self, step: int = 0) -> Tensor:
        found: Tensor = self.net(batch(step)).square().mean()
        return found

    @torch.no_grad()
    def evaluate(self, step: int = 0) -> Tensor:
        """Return the loss, and leave nothing gathered, as FSDP leaves the root."""
        found = self.forward(step)
        for module in self.submodules():
            module.reshard()
        return found


# --- what every rank computes with ---


def _exact(gathers: str, use: str, reshard: bool) -> tuple[bool, bool]:
    native, sent = (Gathered(how, use, reshard=reshard).run(range(3)) for how in (None, gathers))
    return alike(native, sent), sent.handle.verify_replicas()


@pytest.mark.parametrize(
    ("gathers", "use", "reshard"),
    [
        ("16 bits", "several groups", True),
        ("16 bits", "accumulation", True),
        ("lossless", "several groups", True),
        ("16 bits", "a list of modules", True),
        *(
            pytest.param("16 bits", use, True, marks=pytest.mark.slow)
            for use in ("one group", "idle blocks", "checkpoints")
        ),
        *(pytest.param("16 bits", use, False, marks=pytest.mark.slow) for use in ("several groups", "accumulation")),
    ],
)
def test_16_bits_and_no_loss_are_bf16_fsdp_to_the_bit(ranks: Ranks, gathers: str, use: str, reshard: bool) -> None:
    assert ranks.run(4, _exact, gathers, use, reshard) == [(True, True)] * 4


def _bounded(gathers: str, policy: MixedPrecisionPolicy) -> tuple[float, bool, float]:
    """Return how far copies were from parameters, at most, over the bound of the quantiser; and from where it began."""
    each, worst, same_everywhere = Gathered(gathers, policy=policy), 0.0, True
    how = GATHERS[gathers]
    assert isinstance(how, tw.gathers.Differences)
    each.run(range(1))
    for step in range(1, 4):
        before = {name: (own.clone(), x) for name, (own, x) in each.copies.items()}
        each.optimizer.zero_grad()
        each.backward(step)
        same_everywhere &= each.handle.verify_replicas()
        for name, (own, x) in each.copies.items():
            for old, now, due in zip(*(t.split(128) for t in (before[name][0], own, x)), strict=True):
                if not due.numel():
                    continue
                levels = 2 ** (how.bits - 1) - 1
                rounding = 2**-8 * float(now.abs().max()) if policy == BF16 else 2**-21 * float(due.abs().max())
                bound = float((due - old).abs().max()) * (0.5 / levels if levels < 1000 else 2**-8) + rounding
                worst = max(worst, float((now - due).abs().max()) / bound)
        each.optimizer.step()
    return worst, same_everywhere, each.off()


@pytest.mark.parametrize(
    "gathers", [pytest.param(each, marks=[pytest.mark.slow] if each[0] in "38" else []) for each in OF_BITS]
)
def test_copies_are_alike_and_within_the_quantisers_bound_at_every_step(ranks: Ranks, gathers: str) -> None:
    for policy in (BF16, MixedPrecisionPolicy()) if gathers in ("4 bits", "16 bits") else (BF16,):
        for worst, same_everywhere, off in ranks.run(3, _bounded, gathers, policy):
            assert worst <= 1 + 1e-6
            assert same_everywhere
            assert off > 0  # the optimizer has stepped since


def _smaller(gathers: str) -> tuple[bool, bool]:
    """Have FSDP gather in backward from half of the ranks, and evaluate in inference mode."""
    with mock.patch("test_shard.fully_shard", partial(fully_shard, reshard_after_forward=2)):
        native, sent = (Gathered(how).run(range(3)) for how in (None, gathers))
    with torch.inference_mode():
        losses = [each.forward(3) for each in (native, sent)]
    return alike(native, sent), torch.equal(*losses)


@pytest.mark.parametrize("gathers", ["16 bits", "lossless"])
@pytest.mark.first(1)
def test_a_smaller_mesh_in_backward_and_inference_are_fsdps_to_the_bit(ranks: Ranks, gathers: str) -> None:
    assert ranks.run(4, _smaller, gathers) == [(True, True)] * 4


class Tied(nn.Module):
    """Blocks between an embedding and a head that are one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(37, 12), nn.Linear(12, 37, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3))
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).float()


def _tied(gathers: str, replicas: int) -> bool:
    """Whether a model with tied weights, fetched ahead, trains as FSDP trains it, and HSDP's with `replicas`."""
    mesh, found = grid(replicas) if replicas > 1 else line(), []
    for how in (None, GATHERS[gathers]):
        torch.manual_seed(0)
        net = Tied()
        blocks: list[Any] = [fully_shard(block, mesh=mesh["shard"], mp_policy=BF16) for block in net.blocks]
        fully_shard(net, mesh=mesh["shard"], mp_policy=BF16)
        for block, after in pairwise(blocks):
            block.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([block])
        attach: Any = tw.shard if replicas > 1 else tw.scatter
        attach(net, tw.recipes.dense(), mesh=mesh, gathers=how)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for step in range(3):
            tokens = torch.randint(37, (4, 6), generator=torch.Generator().manual_seed(9 * step + dist.get_rank()))
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
        found.append([local(p).clone() for p in net.parameters()])
    return all(map(torch.equal, *found))


@pytest.mark.parametrize("replicas", [1, 2])
def test_tied_weights_prefetched_and_in_islands_are_fsdps_to_the_bit(ranks: Ranks, replicas: int) -> None:
    assert ranks.run(4, _tied, "16 bits", replicas) == [True] * 4


# --- while something else goes on ---


def _signal(*_: object) -> None:
    """Have the other ranks wait here for rank 0."""
    if dist.get_rank():
        dist.recv(torch.empty(1), 0, tag=7)
    else:
        for rank in range(1, dist.get_world_size()):
            dist.send(torch.ones(1), rank, tag=7)


def _ahead(each: Gathered, step: int) -> None:
    """Have rank 0 begin all gathers before another rank begins any."""
    modules = each.submodules()
    if dist.get_rank():
        _signal()
    handles = [module.unshard(async_op=True) for module in modules]
    if not dist.get_rank():
        _signal()
    for handle in handles:
        handle.wait()
    each.step(step)


def _fetched(each: Gathered, step: int) -> None:
    """Have rank 0 begin gathers ahead, within the computation before, where the others begin them only after it."""
    net = each.net
    net._set_unshard_async_op(True)  # type: ignore[operator]
    net.first.set_modules_to_forward_prefetch([net.middle] if not dist.get_rank() else [])  # type: ignore[operator]
    net.middle.set_modules_to_backward_prefetch([net] if dist.get_rank() else [net.first])  # type: ignore[operator]
    hooks = [net.first.linear.register_forward_pre_hook(_signal)]
    hooks.append(net.middle.linear.register_forward_hook(lambda *args: args[2].register_hook(_signal) and None))
    each.step(step)
    for hook in hooks:
        hook.remove()


AHEAD = {"unshard": _ahead, "prefetch": _fetched}


def _meanwhile(gathers: str | None, how: str) -> bool:
    plain, each = Gathered(gathers).run(range(3)), Gathered(gathers).run(range(1))
    for step in (1, 2):
        AHEAD[how](each, step)
    return alike(plain, each)


@pytest.mark.parametrize("how", AHEAD)
@pytest.mark.parametrize("gathers", [pytest.param(None, marks=pytest.mark.slow), "4 bits", "lossless"])
def test_gathers_begin_and_return_as_fsdps_do(ranks: Ranks, gathers: str | None, how: str) -> None:
    assert ranks.run(2, _meanwhile, gathers, how) == [True, True]


def _uneven(gathers: str | None) -> tuple[Gathered, int]:
    """Leave parameters whole between micro-batches, of which no two ranks have the same number."""
    each, later = Gathered(gathers, "accumulation", reshard=False), 0
    net: Any = each.net

    def micro(step: int, i: int, last: int) -> None:
        net.set_requires_gradient_sync(i == last)
        net.set_reshard_after_backward(i == last)
        net(batch(step, i)).square().mean().backward()

    for step in range(3):
        each.optimizer.zero_grad()
        for i in range(dist.get_rank() + 2):
            sent = each.sends(micro, step, i, dist.get_rank() + 1)
            later += sent if i else 0
        each.optimizer.step()
    return each, later


def _as_often() -> tuple[bool, int]:
    (native, _), (each, later) = _uneven(None), _uneven("16 bits")
    return alike(native, each), later


def test_nothing_is_asked_where_fsdp_does_not_gather(ranks: Ranks) -> None:
    assert ranks.run(3, _as_often) == [(True, 0)] * 3


# --- what is sent, and when ---


def _sent(use: str, reshard: bool) -> list[float]:
    """Return the bytes of a forward, of backward, of an evaluation, of more micro-batches, over a bf16 all-gather."""
    each, native = Gathered("4 bits", use, reshard=reshard).run(range(1)), MODEL / 4 * 2 * 3 / 4
    loss = None

    def forward() -> None:
        nonlocal loss
        loss = each.forward()

    def backward() -> None:
        assert loss is not None
        loss.backward()

    def evaluate() -> None:
        with torch.inference_mode():
            each.forward(1)

    found = [each.sends(call) / native for call in (forward, backward, evaluate)]
    found.append(each.sends(lambda: each.forward(2).backward()) / native)
    each.optimizer.step()
    found.append(each.sends(evaluate) / native)
    found.append(each.sends(lambda: each.forward(2).backward()) / native)
    return found


@pytest.mark.parametrize(
    ("use", "reshard"),
    [
        ("checkpoints", True),
        pytest.param("several groups", False, marks=pytest.mark.slow),
        pytest.param("several groups", True, marks=pytest.mark.slow),
    ],
)
def test_what_has_not_changed_is_not_sent(ranks: Ranks, use: str, reshard: bool) -> None:
    for first, *nothing, changed, trained in ranks.run(4, _sent, use, reshard):
        assert 0.2 < first < 0.5  # four bits of 16, scales, headers; small tensors have a scale for a few values
        assert max(*nothing, trained) < 0.01  # a byte for each parameter asks whether any has changed
        assert nothing[0] == 0  # and nobody asks in backward
        assert first == pytest.approx(changed)


def _evaluated() -> bool:
    """Whether an evaluation in the middle of training leaves it as it was."""
    plain, watched = Gathered(), Gathered()
    for step in range(3):
        plain.step(step)
        watched.step(step)
        watched.net.eval()
        watched.evaluate(7)
        watched.net.train()
    return alike(plain, watched)


def test_an_evaluation_in_the_middle_changes_nothing(ranks: Ranks) -> None:
    assert all(ranks.run(3, _evaluated))


def _frozen() -> tuple[list[float], bool, float]:
    """Return what two further steps send, over what is trained, where all but `last` and `scale` are frozen."""
    with mock.patch.object(Net, "__init__", _half_frozen):
        each = Gathered().run(range(1))
    trained = sum(p.numel() for p in each.net.parameters() if p.requires_grad) * 2 * 3 / 4
    sent = [each.sends(each.step, step) / trained for step in (1, 2)]
    return sent, each.handle.verify_replicas(), each.off()


_INIT = Net.__init__


def _half_frozen(self: Net) -> None:
    _INIT(self)
    for name, p in self.named_parameters():
        p.requires_grad_(name.startswith(("last", "scale")))


def test_frozen_parameters_are_sent_once(ranks: Ranks) -> None:
    for sent, same_everywhere, _ in ranks.run(4, _frozen):
        assert all(0 < share < 1.2 for share in sent)  # of few values each has a header, a scale and padding
        assert same_everywhere


SHARES = {"4 bits": 0.18, "2 bits": 0.14, "lossless": 0.6}
"""What a step may send with gradients in 4 bits, of two gathers and a reduce-scatter of 16 bits."""


def _of_a_step() -> dict[str, float]:
    """Return what a step sends over what FSDP would in bfloat16, of layers that are worth a shard."""
    mesh, found = line(), {}
    for name in SHARES:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(2)]
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=BF16)
        net = nn.Sequential(*layers)
        fully_shard(net, mesh=mesh, mp_policy=BF16)
        tw.scatter(net, tw.recipes.qsgd(), mesh=mesh, gathers=GATHERS[name])
        optimizer, recorder = torch.optim.AdamW(net.parameters()), trace.Recorder()
        for step in range(3):
            recorder.clear()
            with trace.listen(recorder):
                optimizer.zero_grad()
                net(torch.randn(8, 128, generator=torch.Generator().manual_seed(step))).square().mean().backward()
                optimizer.step()
        share = (dist.get_world_size() - 1) / dist.get_world_size()
        native = 3 * share * 2 * sum(p.numel() for p in net.parameters())
        found[name] = (recorder.totals["sent_bytes"] + recorder.totals["gathered_bytes"]) / native
    return found


def test_a_step_sends_a_small_part_of_what_fsdp_does_in_bf16(ranks: Ranks) -> None:
    for found in ranks.run(4, _of_a_step):
        for name, share in found.items():
            assert 0.9 * SHARES[name] * (0.9 if name == "lossless" else 1) < share <= SHARES[name], name


# --- who has written ---


def _copied(each: Gathered) -> None:
    for p in each.net.parameters():
        p.data.copy_(p.data * 3)  # which no version counter tells


def _locally(each: Gathered) -> None:
    if dist.get_rank() == 1:
        local(each.net.first.linear.weight).mul_(3)


def _loaded(each: Gathered) -> None:
    each.net.load_state_dict({name: x * 3 for name, x in each.net.state_dict().items()})


def _foreach(each: Gathered) -> None:
    torch._foreach_mul_([p.data for p in each.net.parameters()], 3)


def _between(each: Gathered) -> None:
    _copied(each)
    each.optimizer.step()


WRITES = {"p.data": _copied, "one rank's shard": _locally, "a state": _loaded, "_foreach": _foreach, "a step": _between}


def _written(how: str) -> tuple[float, float]:
    """Return how far copies are from parameters after an optimizer's step, and after somebody else has written."""
    each = Gathered("2 bits").run(range(3))
    each.forward(3).backward()
    stepped = each.off()
    with torch.no_grad():
        WRITES[how](each)
    each.evaluate(4)
    names = ["first.linear.weight"] if how == "one rank's shard" else list(each.copies)
    return stepped, max(float((own - x).abs().max()) for own, x in (each.copies[n] for n in names) if x.numel())


@pytest.mark.parametrize("how", WRITES)
def test_what_no_optimizer_has_written_is_sent_exactly(ranks: Ranks, how: str) -> None:
    for stepped, written in ranks.run(3, _written, how):
        assert stepped > 0
        assert written == 0


def _in_forward(each: Gathered) -> Any:
    return mock.patch.object(each.net.last, "forward", side_effect=KeyboardInterrupt)


def _in_backward(each: Gathered) -> Any:
    return mock.patch.object(Arrivals, "note", side_effect=KeyboardInterrupt)


def _before_a_gather(each: Gathered) -> Any:
    return mock.patch.object(Lane, "start", side_effect=KeyboardInterrupt)


def _while_ranks_agree(each: Gathered) -> Any:
    return mock.patch.object(copies, "all_gather", side_effect=RuntimeError("lost"))


def _before_it_has_arrived(each: Gathered) -> Any:
    return mock.patch.object(Started, "wait", side_effect=KeyboardInterrupt)


def _in_a_step(each: Gathered) -> Any:
    return mock.patch.object(Copies, "taken", side_effect=KeyboardInterrupt)


PLACES = {
    name: globals()[f"_{name.replace(' ', '_')}"]
    for name in (
        "in forward",
        "in backward",
        "before a gather",
        "while ranks agree",
        "before it has arrived",
        "in a step",
    )
}


def _interrupted(where: str) -> list[float]:
    """Return how far a block's copies are from its parameters, where it computes alone after a broken step.

    An optimizer has stepped since; at last, somebody else has written.
    """
    each, found = Gathered("16 bits").run(range(1)), []
    net: Any = each.net
    with PLACES[where](each), pytest.raises((KeyboardInterrupt, RuntimeError)):
        each.step(1)
    if not hasattr(net, "reset_iter_state") and where == "in backward":
        return [0.0]  # nor does FSDP itself go on before torch 2.13
    for write in (each.optimizer.step, lambda: each.optimizer.step(), lambda: _copied(each)):
        getattr(net, "reset_iter_state", lambda: None)()
        for module in each.submodules():
            module.reshard()
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        with torch.no_grad():
            write()
            net.first(batch(2))
        names = [name for name in each.copies if name.startswith("first")]
        found.append(max(float((own - x).abs().max()) for own, x in (each.copies[name] for name in names)))
    return found


@pytest.mark.parametrize("where", PLACES)
def test_a_broken_step_leaves_no_copy_that_counts_as_current(ranks: Ranks, where: str) -> None:
    for off in ranks.run(2, _interrupted, where):
        assert set(off) == {0.0}


def _spoilt() -> tuple[bool, float]:
    """Have one rank's optimizer write a NaN; return whether every rank computes it, and how far copies are at last."""
    each = Gathered().run(range(1))
    each.backward(1)
    if dist.get_rank() == 1:
        each.gradients()["first.linear.weight"][0, 0] = torch.nan
    each.optimizer.step()
    seen = bool(each.evaluate(2).isnan())
    kept: Any = each.handle._gathers
    kept.about_to_take(each.optimizer)
    for x in each.shards().values():  # as an optimizer's step might: no difference to a NaN makes a number of it
        x.nan_to_num_(0.0)
    kept.taken(each.optimizer)
    each.evaluate(3)
    own, x = each.copies["first.linear.weight"]
    return seen, float((own - x).abs().max())


def test_a_nan_reaches_every_rank_and_leaves_with_its_cause(ranks: Ranks) -> None:
    assert ranks.run(3, _spoilt) == [(True, 0.0)] * 3


def _infinite() -> tuple[float, bool]:
    each = Gathered().run(range(2))
    x = each.shards()["first.linear.weight"]
    if dist.get_rank() == 1:
        x[0, 0] = torch.inf
    each.evaluate(2)
    kept: Any = each.handle._gathers
    kept.about_to_take(each.optimizer)
    x.add_(0.01)
    kept.taken(each.optimizer)
    each.evaluate(3)
    own, due = each.copies["first.linear.weight"]
    off = (own - due)[due.isfinite()].abs().max()
    return float(off), torch.equal(own.isinf(), due.isinf())


def test_an_infinity_stays_one_and_leaves_its_group_alone(ranks: Ranks) -> None:
    for off, same_places in ranks.run(3, _infinite):
        assert 0 < off < 0.01
        assert same_places


def _islands() -> tuple[list[bool], int, bool]:
    """Save in one island alone; return what `verify_replicas` says of each step, the warnings, and if shards agree."""
    mesh = grid()
    net = build(WAYS["several groups"], mesh["shard"])
    handle = tw.shard(net, tw.recipes.dense(), mesh=mesh, gathers=GATHERS["2 bits"])
    optimizer, verified = torch.optim.AdamW(net.parameters(), lr=0.01), []
    with mock.patch.object(copies._log, "warning") as warning:
        for step in range(5):
            if step == 3 and dist.get_rank() < mesh["shard"].size():
                handle.state_dict()
            optimizer.zero_grad()
            net(batch(step)).square().mean().backward()
            verified.append(handle.verify_replicas())
            optimizer.step()
        kept: Any = handle._gathers
        kept._copies[0].since[0] += dist.get_rank() < mesh["shard"].size()
        kept.compare()
        kept.compare()  # what has been told is not told again while nothing is gathered
    return verified, warning.call_count, not handle.attachment.differing_parameters()


def test_islands_that_were_refreshed_apart_are_told_so_and_brought_together(ranks: Ranks) -> None:
    assert ranks.run(4, _islands) == [([True, True, True, False, True], 2, True)] * 4


# --- faults ---


def _deserted(gathers: str) -> str:
    """Return what a step raises for those who go on once rank 1 has gone."""
    each = Gathered(gathers).run(range(2))
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        _MESHES.clear()  # they are of its groups
        return "gone"
    return told(each.step, 2)


@pytest.mark.slow  # Gloo notices when the group's time is up
@pytest.mark.parametrize("gathers", ["4 bits", "lossless"])
def test_a_rank_that_goes_ends_the_others_with_an_error(ranks: Ranks, gathers: str) -> None:
    first, gone, last = ranks.run(3, _deserted, gathers)
    assert gone == "gone"
    assert first.startswith("RuntimeError: ")
    assert last.startswith("RuntimeError: ")


def _truncated(gathers: str) -> tuple[str, bool, bool]:
    """Cut messages short; return what their readers raise, and whether all goes on without harm."""
    plain, each = (Gathered(gathers).run(range(2)) for _ in range(2))
    kind: Any = Coded if gathers == "lossless" else _Copy
    arrived = kind._arrived

    def cut(*args: Any) -> Tensor:
        rows: Tensor = arrived(*args)
        rows.view(len(rows), -1)[:, 8:] = 0
        return rows

    with mock.patch.object(kind, "_arrived", cut):
        said = told(each.evaluate, 2)
    verified = each.handle.verify_replicas()
    return said, verified, alike(plain.run(range(2, 4)), each.run(range(2, 4)))


@pytest.mark.parametrize("gathers", ["4 bits", "lossless"])
def test_a_truncated_message_is_an_error_and_leaves_copies_as_they_were(ranks: Ranks, gathers: str) -> None:
    for said, verified, unharmed in ranks.run(3, _truncated, gathers):
        assert said.startswith("PayloadError: ")
        assert verified
        assert unharmed


# --- checkpoints and the end ---


def _resumed() -> tuple[bool, bool]:
    old = Gathered().run(range(2))
    saved = copy.deepcopy([old.optimizer.state_dict(), old.handle.state_dict()])
    weights = {name: x.clone() for name, x in old.shards().items()}
    old.run(range(2, 4))
    new = Gathered().run(range(1))
    for name, x in new.shards().items():
        x.copy_(weights[name])
    new.optimizer.load_state_dict(saved[0])
    new.handle.load_state_dict(saved[1])
    new.run(range(2, 4))
    return alike(old, new), same(new.handle.state_dict(), old.handle.state_dict())


def test_who_resumes_makes_the_steps_of_who_goes_on(ranks: Ranks) -> None:
    assert ranks.run(3, _resumed) == [(True, True)] * 3


def _whole(each: Gathered, *saved: str) -> dict[str, Any]:
    return {"model": each.net.state_dict(), "thinwire": tw.Checkpoint(each.handle, *saved)}


def _weights(each: Gathered) -> dict[str, Tensor]:
    return {name: p.detach().full_tensor().clone() for name, p in each.net.named_parameters()}  # type: ignore[attr-defined]


def _begun(path: str) -> dict[str, Tensor]:
    each = Gathered().run(range(3))
    dcp.save(_whole(each), checkpoint_id=path)
    return _weights(each)


def _gone_on(path: str) -> tuple[dict[str, Tensor], float, bool]:
    each = Gathered().run(range(1))  # so that there is a copy, of other parameters
    dcp.load(_whole(each, path), checkpoint_id=path)
    loaded = _weights(each)
    each.evaluate(3)
    off = each.off()
    each.run(range(3, 5))
    return loaded, off, each.handle.verify_replicas()


@pytest.mark.parametrize(("before", "after"), [(4, 2), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_a_checkpoint_of_other_ranks_is_gathered_exactly(ranks: Ranks, tmp_path: Path, before: int, after: int) -> None:
    weights = ranks.run(before, _begun, str(tmp_path))[0]
    for loaded, off, verified in ranks.run(after, _gone_on, str(tmp_path)):
        assert same(loaded, weights)
        assert (off, verified) == (0.0, True)


def _kept() -> tuple[int, int, int]:
    each = Gathered(use="one group").run(range(1))
    held = each.handle.memory_bytes
    each.handle.remove()
    sent = each.sends(each.run, range(1, 3))
    return held, each.handle.memory_bytes, sent


def test_copies_count_as_memory_until_removal(ranks: Ranks) -> None:
    for held, left, sent in ranks.run(4, _kept):
        assert MODEL / 4 * 2 <= held - left <= MODEL / 4 * 2 * 1.2  # rows are padded
        assert not sent


def _again(gathers: str | None) -> tuple[int, int, bool]:
    each = Gathered(use="one group").run(range(2))
    held = each.handle.memory_bytes
    new = tw.scatter(each.net, tw.recipes.dense(), mesh=line(), gathers=GATHERS[gathers] if gathers else None)
    each.run(range(2, 4))
    return held - each.handle.memory_bytes, new.memory_bytes - each.handle.memory_bytes, new.verify_replicas()


@pytest.mark.parametrize("gathers", [None, "2 bits", pytest.param("lossless", marks=pytest.mark.slow)])
def test_who_scatters_anew_takes_over_from_the_earlier_handle(ranks: Ranks, gathers: str | None) -> None:
    for freed, more, verified in ranks.run(2, _again, gathers):
        assert freed >= MODEL / 4 * 2
        assert (more >= MODEL / 4 * 2) == (gathers == "2 bits")
        assert verified


def _a_part_again() -> tuple[list[int], int, bool]:
    each = Gathered().run(range(1))
    net: Any = each.net.requires_grad_(False)
    net.middle.requires_grad_(True)
    with mock.patch.object(gathering._log, "warning") as warning:
        new = tw.scatter(net.middle, tw.recipes.dense(), mesh=line())
        each.run(range(1, 2))
    return [call.args[1] for call in warning.call_args_list], len(each.submodules()), new.verify_replicas()


def test_who_scatters_anew_what_is_still_trained_hears_of_the_rest(ranks: Ranks) -> None:
    for said, count, verified in ranks.run(2, _a_part_again):
        assert said == [count - 1]
        assert verified


def _outlived(gathers: str | None, removed: bool) -> bool:
    """Whether a model outlives all names for it."""
    each = Gathered(gathers).run(range(2))
    if removed:
        each.handle.remove()
    net = weakref.ref(each.net)
    del each
    gc.collect()
    return net() is not None


@pytest.mark.parametrize(
    ("gathers", "removed"), [(None, False), ("4 bits", False), ("4 bits", True), ("lossless", True)]
)
def test_a_model_goes_with_its_last_name(ranks: Ranks, gathers: str | None, removed: bool) -> None:
    assert ranks.run(2, _outlived, gathers, removed) == [False] * 2


def _assigned() -> tuple[bool, bool, float]:
    """Put other parameters in place of all, evaluate, and train on with them."""
    native, sent = (Gathered(how).run(range(2)) for how in (None, "16 bits"))
    for each in (native, sent):
        halved = {name: 0.5 * x.detach().clone() for name, x in each.net.state_dict().items()}
        each.net.load_state_dict(halved, assign=True)
    same_loss = bool(native.evaluate() == sent.evaluate())
    return same_loss, sent.handle.verify_replicas(), sent.off()


def test_parameters_that_replace_others_are_gathered(ranks: Ranks) -> None:
    assert ranks.run(2, _assigned) == [(True, True, 0.0)] * 2


def _alone() -> tuple[bool, int]:
    native, sent = (Gathered(how).run(range(2)) for how in (None, "2 bits"))
    return alike(native, sent), sent.handle.gathered_bytes


def test_alone_there_is_nothing_to_gather(ranks: Ranks) -> None:
    assert ranks.run(1, _alone) == [(True, 0)]


def _unsharded_first() -> tuple[int, int]:
    """Gather before forward, as those do who overlap it with loading data."""
    each = Gathered().run(range(1))
    for module in each.submodules():
        module.unshard()
    gathered = each.handle.gathered_bytes
    each.step(1)
    return gathered, each.handle.gathered_bytes


def test_gathers_ahead_of_forward_send_what_it_needs(ranks: Ranks) -> None:
    for before, after in ranks.run(3, _unsharded_first):
        assert 0 < before == after


# --- what is refused ---


def _refusals() -> dict[str, str]:
    mesh, use, how = line(), Use(), tw.gathers.Differences()

    def mixed() -> Any:
        net = Net()
        net.last.requires_grad_(False).bfloat16()
        return fully_shard(net, mesh=mesh)

    def unmade() -> Any:
        net = Net()
        net.last.requires_grad_(False).to("meta")
        return fully_shard(net, mesh=mesh)

    unlike = GATHERS["2 bits" if dist.get_rank() else "3 bits"]
    attempts: dict[str, Callable[[], object]] = {
        "bits": lambda: tw.gathers.Differences(bits=5),  # type: ignore[arg-type]
        "a name": lambda: tw.scatter(build(use, mesh), tw.recipes.topk(), mesh=mesh, gathers="4"),  # type: ignore[arg-type]
        "mixed": lambda: tw.scatter(mixed(), tw.recipes.topk(), mesh=mesh, gathers=how),
        "meta": lambda: tw.scatter(unmade(), tw.recipes.topk(), mesh=mesh, gathers=how),
        "unlike": lambda: tw.scatter(build(use, mesh), tw.recipes.topk(), mesh=mesh, gathers=unlike),
        "one without": lambda: tw.scatter(
            build(use, mesh), tw.recipes.topk(), mesh=mesh, gathers=how if dist.get_rank() else None
        ),
    }
    return {name: told(attempt) for name, attempt in attempts.items()}


def test_gathers_are_refused_with_the_fix(ranks: Ranks) -> None:
    for said in ranks.run(2, _refusals):
        assert "expected one of 2, 3, 4, 8, 16" in said["bits"]
        assert said["a name"].startswith("TypeError")
        assert "give each dtype its own fully_shard" in said["mixed"]
        assert "on the meta device: call to_empty()" in said["meta"]
        assert said["unlike"].startswith("FingerprintError")
        assert "FingerprintError" in said["one without"]
        assert "gathers None" in said["one without"]
