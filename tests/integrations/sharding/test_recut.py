"""What the shards of a replica saved, cut for another number of shards: no collective, so every S and S' is tried."""

import logging
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from cases import MEMORIES, RECIPES
from ddp_models import same
from ranks import Ranks, told
from test_shard import STATEFUL, Sharded, grid
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from thinwire.errors import StateError
from thinwire.integrations.membership import state
from thinwire.integrations.momentum.correction import corrections
from thinwire.integrations.sharding.layout import Cuts, Piece, recut
from thinwire.integrations.training.gradients import local
from thinwire.memories import Memory
from thinwire.reducer import Reducer

dcp: Any = torch.distributed.checkpoint  # torch does not export the names in it, as mypy has it

COUNTS = range(1, 5)
SHAPES = {"weight": (7, 3), "bias": (7,), "one row": (1, 4), "columns": (4, 12), "never used": (5,)}
CUTS = Cuts(SHAPES, {"columns": 1})
NOTE = "note"
Wholes = dict[tuple[int, str, str], Tensor]


def _of(memory: Callable[[], Memory]) -> Callable[[], Reducer]:
    return lambda: tw.reducer.Compressed(
        memory=memory(), codec=tw.codecs.TopK(density=0.1), exchange=tw.exchanges.AllGather()
    )


MAKERS: dict[str, Callable[[], Reducer]] = {name: RECIPES[name].make for name in STATEFUL}
MAKERS |= {f"{name}, alone": _of(make) for name, make in MEMORIES.items()}


def _wholes(recipe: Reducer) -> Wholes:
    """Return something for every element of every field: what all shards of a replica hold together."""
    generator = torch.Generator().manual_seed(0)
    found: Wholes = {}
    for i, memory in enumerate(recipe.memories()):
        for name, shape in SHAPES.items():
            for field in sorted(memory.fields - memory.free) if name != "never used" else ():
                dtype = memory.held(torch.float64)
                found[i, name, field] = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return found


def _piece(x: Tensor, name: str, piece: Piece) -> Tensor:
    """Return a shard, cut as FSDP cuts; flat."""
    parts = torch.chunk(x, piece.shards, CUTS.dims.get(name, 0))
    return parts[piece.shard].reshape(-1) if piece.shard < len(parts) else x.new_empty(0)


def _state(recipe: Reducer, wholes: Wholes, piece: Piece, *, replica: int = 0, replicas: int = 1) -> dict[str, Any]:
    """Return what the rank of one shard would have saved, with a note beside all that waits."""
    memories: list[dict[str, dict[str, Tensor]]] = [{} for _ in recipe.memories()]
    for (i, name, field), x in wholes.items():
        part = _piece(x, name, piece)
        if part.numel():  # a shard without rows may have nothing
            memories[i].setdefault(name, {})[field] = part
    for memory, held in zip(recipe.memories(), memories, strict=True):
        for fields in held.values() if memory.free else ():
            fields[NOTE] = torch.ones(2, dtype=torch.float64)
    return {
        "version": state.VERSION,
        "rank": replica,
        "world_size": replicas,
        "recipe": state.words(recipe),
        "step": 7,
        "draw": 9,
        "loss_scale": 256.0,
        "momentum": [[0.9, False] for _ in corrections(recipe.memories())],
        "fields": state.kinds(recipe.memories()),
        "memories": memories,
        "shard": piece.place,
        "dims": {"columns": 1},
    }


def _without_notes(saved: dict[str, Any]) -> dict[str, Any]:
    memories = [
        {name: {f: x for f, x in fields.items() if f != NOTE} for name, fields in memory.items()}
        for memory in saved["memories"]
    ]
    return saved | {"memories": memories}


def _held(saved: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is empty: whether a shard without rows has an entry makes no difference."""
    memories = [
        {name: {f: x for f, x in fields.items() if x.numel()} for name, fields in memory.items()}
        for memory in saved["memories"]
    ]
    return saved | {"memories": [{name: fields for name, fields in memory.items() if fields} for memory in memories]}


@pytest.mark.parametrize("recipe", MAKERS)
def test_each_shard_gets_its_part_of_what_the_others_held_bit_for_bit(recipe: str) -> None:
    own = MAKERS[recipe]()
    wholes = _wholes(own)
    for before in COUNTS:
        saved = {shard: _state(own, wholes, Piece(shard, before)) for shard in range(before)}
        for after in COUNTS:
            for shard in range(after):
                piece = Piece(shard, after)
                found = recut(saved, before, CUTS, piece)
                assert same(_held(found), _without_notes(_state(own, wholes, piece))), (before, after, shard)


@pytest.mark.parametrize("recipe", ["topk", "dgc", "fading", "powersgd"])
def test_the_pending_mean_survives_other_numbers_of_replicas_and_shards(recipe: str) -> None:
    own = MAKERS[recipe]()
    for replicas, shards in ((2, 2), (3, 1), (1, 4), (2, 3)):
        each = [_wholes(own) for _ in range(replicas)]
        for wholes, scale in zip(each, (1.0, -2.5, 0.3), strict=False):
            for x in wholes.values():
                x.mul_(scale)
        due = {key: sum(wholes[key].double() for wholes in each) for key in each[0]}
        for now, pieces in ((1, 3), (3, 2), (2, 4), (4, 1)):
            for key, expected in due.items():
                found = _dealt(own, each, shards, now, pieces, key)
                far = float((found - torch.as_tensor(expected)).abs().max())
                eps = 1e-12 if each[0][key].dtype == torch.float64 else 2**-6
                assert far <= eps * max(1.0, float(torch.as_tensor(expected).abs().max())), (key, now, pieces)


def _dealt(own: Reducer, each: list[Wholes], shards: int, now: int, pieces: int, key: tuple[int, str, str]) -> Tensor:
    """Return the sum over new replicas of what waits under a key, put together from all new shards."""
    i, name, field = key
    replicas, parts = len(each), []
    for shard in range(pieces):
        piece = Piece(shard, pieces)
        states = [
            recut(
                {s: _state(own, wholes, Piece(s, shards), replica=r, replicas=replicas) for s in range(shards)},
                shards,
                CUTS,
                piece,
            )
            for r, wholes in enumerate(each)
        ]
        dealt = [tw.redistribute(states, rank=rank, world_size=now) for rank in range(now)]
        held = [each["memories"][i].get(name, {}).get(field) for each in dealt]
        shape = CUTS.shape(name, piece)
        total = torch.zeros(shape, dtype=torch.float64)
        for x in held:
            total += 0 if x is None else x.double().view(shape)
        parts.append(total)
    return torch.cat(parts, CUTS.dims.get(name, 0))


def test_a_shard_that_is_missing_leaves_zeros() -> None:
    own = MAKERS["topk"]()
    wholes = _wholes(own)
    key = next(key for key in wholes if key[1] == "bias")
    saved = {0: _state(own, wholes, Piece(0, 2))}
    whole = recut(saved, 2, CUTS, Piece(0, 1))["memories"][key[0]]["bias"][key[2]]
    assert torch.equal(whole, torch.cat([wholes[key][:4], torch.zeros(3, dtype=whole.dtype)]))


def test_shards_of_different_steps_or_shapes_are_refused() -> None:
    own = MAKERS["topk"]()
    wholes = _wholes(own)
    saved = {shard: _state(own, wholes, Piece(shard, 2)) for shard in range(2)}
    mixed = {0: saved[0], 1: saved[1] | {"step": 8}}
    with pytest.raises(StateError, match="step is 7 on rank 0, shard 0 and 8 on rank 0, shard 1"):
        recut(mixed, 2, CUTS, Piece(0, 3))
    with pytest.raises(ValueError, match=r"'weight' on shard 0 of 2 has 12 elements; expected those of \(3, 3\)"):
        recut(saved, 2, Cuts(SHAPES | {"weight": (6, 3)}, CUTS.dims), Piece(0, 1))
    with pytest.raises(ValueError, match="'bias', which the model lacks"):
        recut(saved, 2, Cuts({k: v for k, v in SHAPES.items() if k != "bias"}, CUTS.dims), Piece(0, 1))
    with pytest.raises(StateError, match=r"used the shard dimensions \{'columns': 1\}, this model \{\}"):
        recut(saved, 2, Cuts(SHAPES), Piece(0, 1))
    with pytest.raises(StateError, match="split over 2 mesh dimensions"):
        Piece.at([[0, 2], [1, 2]])


# --- real ranks ---


def _pending(sharded: Sharded) -> dict[str, Tensor]:
    """Return what waits for each parameter, summed over replicas and put together from shards. A collective."""
    layout, group = sharded.handle.layout, sharded.handle.group
    mine = (Piece.at(layout.shard or []).shard, sharded.handle.state_dict()["memories"])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    shards = dist.get_world_size() // group.size()
    totals: dict[str, list[Tensor]] = {}
    for shard, memories in everyone:
        for i, memory in enumerate(memories):
            for name, fields in memory.items():
                for field in fields.keys() - {NOTE}:
                    shapes = [layout.cuts.shape(name, Piece(s, shards)) for s in range(shards)]
                    zeros = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
                    held = totals.setdefault(f"{i} {name} {field}", zeros)
                    held[shard] += fields[field].double().view(shapes[shard])
    return {key: torch.cat(parts) for key, parts in totals.items()}


def _all_of(sharded: Sharded, *saved: str, **options: Any) -> dict[str, Any]:
    return {"model": sharded.net.state_dict(), "thinwire": tw.Checkpoint(sharded.handle, *saved, **options)}


def _begun(recipe: str, path: str, replicas: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    sharded = Sharded("float64", recipe, replicas=replicas).run(range(3))
    dcp.save(_all_of(sharded), checkpoint_id=path)
    return _pending(sharded), _weights(sharded)


def _weights(sharded: Sharded) -> dict[str, Tensor]:
    return {name: p.detach().full_tensor().clone() for name, p in sharded.net.named_parameters()}  # type: ignore[attr-defined]


def _gone_on(recipe: str, path: str, replicas: int) -> tuple[dict[str, Tensor], dict[str, Tensor], int, bool]:
    sharded = Sharded("float64", recipe, replicas=replicas)
    dcp.load(_all_of(sharded, path), checkpoint_id=path)
    pending, weights, step = _pending(sharded), _weights(sharded), sharded.handle.attachment.step
    sharded.run(range(3, 5))
    return pending, weights, step, sharded.handle.verify_replicas()


FROM_TO = [
    ("topk everywhere", (2, 2), (1, 3)),
    ("dgc", (1, 3), (2, 1)),
    *(
        pytest.param(*pair, marks=pytest.mark.slow)
        for pair in (
            ("powersgd", (1, 3), (2, 2)),
            ("dgc everywhere", (2, 2), (3, 2)),
            ("topk everywhere", (2, 3), (1, 4)),
            ("dragonn", (1, 4), (2, 2)),
            ("topk everywhere", (3, 1), (1, 2)),
        )
    ),
]


@pytest.mark.parametrize(("recipe", "before", "after"), FROM_TO)
def test_training_goes_on_with_other_replicas_and_shards(
    ranks: Ranks, tmp_path: Path, recipe: str, before: tuple[int, int], after: tuple[int, int]
) -> None:
    waiting, weights = ranks.run(before[0] * before[1], _begun, recipe, str(tmp_path), before[0])[0]
    for found, loaded, step, alike in ranks.run(after[0] * after[1], _gone_on, recipe, str(tmp_path), after[0]):
        assert (step, alike) == (3, True)
        assert same(loaded, weights)
        assert any(bool(x.any()) for x in waiting.values())
        for key in waiting.keys() | found.keys():
            x, y = (each.get(key, torch.zeros(1, dtype=torch.float64)) for each in (waiting, found))
            assert float((x - y).abs().max()) <= 1e-12 * max(1.0, float(x.abs().max()))


class _Changed(Sharded):
    """The first block is frozen since, or has the name that torch.compile gives it."""

    frozen = True

    def build(self) -> Any:
        net: Any = super().build()
        if self.frozen:
            net.first.requires_grad_(False)
        else:
            net.first = nn.ModuleDict({"_orig_mod": net.first})
        return net


class _Compiled(_Changed):
    frozen = False


def _loaded_into(kind: type[_Changed], path: str) -> dict[str, Tensor]:
    changed = kind("float64", "topk everywhere", replicas=1)
    dcp.load({"thinwire": tw.Checkpoint(changed.handle, path)}, checkpoint_id=path)
    return {key.replace("_orig_mod.", ""): x for key, x in _pending(changed).items()}


@pytest.mark.parametrize("kind", [_Changed, _Compiled])
def test_what_waits_for_a_frozen_or_a_compiled_block_is_cut_anew(
    ranks: Ranks, tmp_path: Path, kind: type[_Changed]
) -> None:
    waiting, _ = ranks.run(2, _begun, "topk everywhere", str(tmp_path), 2)[0]
    assert any(bool(x.any()) for key, x in waiting.items() if "first" in key)
    for found in ranks.run(2, _loaded_into, kind, str(tmp_path)):
        assert waiting.keys() == found.keys()
        assert all(float((x - found[key]).abs().max()) <= 1e-12 for key, x in waiting.items())


def _uninterrupted(recipe: str, path: str) -> tuple[bool, bool]:
    old = Sharded(recipe=recipe, momentum=0.0 if recipe == "powersgd" else 0.9).run(range(3))
    dcp.save(_all_of(old), checkpoint_id=path)
    new = Sharded(recipe=recipe, momentum=0.0 if recipe == "powersgd" else 0.9)
    dcp.load(_all_of(new, path), checkpoint_id=path)
    new.optimizer.load_state_dict(deepcopy(old.optimizer.state_dict()))  # or both would update the same buffers
    alike = same(new.handle.state_dict(), old.handle.state_dict())
    return alike, old.run(range(3, 5)).digest() == new.run(range(3, 5)).digest()


@pytest.mark.parametrize(
    "recipe", ["powersgd", *(pytest.param(each, marks=pytest.mark.slow) for each in ("topk", "dgc", "dct_dp"))]
)
def test_with_the_same_mesh_training_goes_on_as_if_uninterrupted(ranks: Ranks, tmp_path: Path, recipe: str) -> None:
    assert ranks.run(4, _uninterrupted, recipe, str(tmp_path)) == [(True, True)] * 4


class _Normed(nn.Module):
    """Half of a norm is smaller than `minimum_size`, and the whole is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.last = nn.Linear(8, 1536, bias=False), nn.LayerNorm(1536), nn.Linear(1536, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.inner(x)))
        return y


class _App:
    """Model and optimizer as torch's own helpers save them."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.net, self.optimizer = net, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        options = StateDictOptions(strict=False)
        parts = {"model_state_dict": saved["model"], "optim_state_dict": saved["optimizer"]}
        set_state_dict(self.net, self.optimizer, **parts, options=options)


class _Fading:
    """A model in training by AdamW, whose optimizer has one group or two."""

    def __init__(self, groups: int, replicas: int, minimum_size: int = 1024) -> None:
        mesh = grid(replicas)
        torch.manual_seed(0)
        self.net = _Normed()
        fully_shard(self.net, mesh=mesh["shard"])
        norm, every = list(self.net.norm.parameters()), list(self.net.parameters())
        rest = [p for p in every if not any(p is each for each in norm)]
        split: list[Any] = [{"params": rest}, {"params": norm, "weight_decay": 0.0}] if groups == 2 else every
        self.optimizer = torch.optim.AdamW(split, lr=1e-3, betas=(0.9, 0.99))
        recipe = tw.recipes.fading(minimum_size=minimum_size)
        self.handle = tw.shard(self.net, recipe, mesh=mesh, optimizer=self.optimizer)

    def run(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            self.net(torch.randn(4, 8, generator=generator)).square().mean().backward()
            self.optimizer.step()

    def parts(self, path: str | None = None) -> dict[str, Any]:
        return {"app": _App(self.net, self.optimizer), "thinwire": tw.Checkpoint(self.handle, path)}


def _norm_before(groups: int, path: str) -> dict[str, Tensor]:
    """Return the norm's momentum, which AdamW has."""
    training = _Fading(groups, 2)
    training.run(range(3))
    dcp.save(training.parts(), checkpoint_id=path)
    held = training.optimizer.state
    return {name: held[p]["exp_avg"].full_tensor() for name, p in training.net.norm.named_parameters()}


def _norm_after(groups: int, path: str) -> tuple[dict[str, Tensor], bool]:
    """Return what of the norm's momentum the memories have, as AdamW would."""
    training = _Fading(groups, 4)
    dcp.load(training.parts(path), checkpoint_id=path)
    training.handle.attachment.membership.handover.prepare(1.0)
    held = {name: fields for m in training.handle.attachment.recipe.memories() for name, fields in m.state().items()}
    found = {}
    for name, p in training.net.norm.named_parameters():
        found[name] = (1 - 0.9) * held[f"norm.{name}"]["momentum"].view(local(p).shape)
        dist.all_reduce(found[name], group=training.handle.group)
    training.run(range(3, 5))
    return found, training.handle.verify_replicas()


@pytest.mark.parametrize("groups", [1, 2])
def test_momentum_comes_along_where_a_shard_that_was_too_small_fades(ranks: Ranks, tmp_path: Path, groups: int) -> None:
    before = ranks.run(4, _norm_before, groups, str(tmp_path))[0]
    for after, alike in ranks.run(4, _norm_after, groups, str(tmp_path)):
        assert alike
        for name, momentum in before.items():
            assert bool(momentum.any())
            assert torch.allclose(after[name], momentum, rtol=1e-5, atol=1e-9)


def _nothing_faded(path: str) -> str:
    """Save where every tensor is too small to fade, and load where all of them fade."""
    small = _Fading(2, 2, minimum_size=1 << 20)
    small.run(range(3))
    dcp.save(small.parts(), checkpoint_id=path)
    large = _Fading(2, 4)
    said = told(lambda: dcp.load(large.parts(path), checkpoint_id=path))
    large.run(range(3, 5))
    return said


def test_an_optimizer_loads_where_nothing_faded(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(4, _nothing_faded, str(tmp_path)) == ["nothing"] * 4


def _warned(path: str) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # for this test
    logging.getLogger("thinwire").addHandler(handler)
    four = Sharded(recipe="powersgd", replicas=1).run(range(3))
    dcp.save(_all_of(four), checkpoint_id=path)
    two = Sharded(recipe="powersgd", replicas=2)
    said.clear()
    dcp.load(_all_of(two, path), checkpoint_id=path)
    logging.getLogger("thinwire").removeHandler(handler)
    assert not any(NOTE in fields for m in two.handle.state_dict()["memories"] for fields in m.values())
    return said


def test_notes_start_anew_and_the_first_rank_says_so_once(ranks: Ranks, tmp_path: Path) -> None:
    (first,), *others = ranks.run(4, _warned, str(tmp_path))
    assert "thresholds and PowerSGD's Q start from scratch" in first
    assert others == [[]] * 3


def _refused(path: str) -> dict[str, str]:
    sharded = Sharded(recipe="topk").run(range(2))
    handle, before = sharded.handle, sharded.handle.state_dict()
    plain = tw.replicate(torch.nn.Linear(4, 4), tw.recipes.topk())
    dcp.save({"thinwire": tw.Checkpoint(handle)}, checkpoint_id=f"{path}/shards")
    dcp.save({"thinwire": tw.Checkpoint(plain)}, checkpoint_id=f"{path}/whole")
    if dist.get_rank() == 0:
        file = Path(path) / "shards" / "__3_0.distcp"
        file.write_bytes(file.read_bytes()[:100])
    dist.barrier()

    def load(which: Any, place: str, **options: Any) -> str:
        saved = {"thinwire": tw.Checkpoint(which, f"{path}/{place}", **options)}
        return told(lambda: dcp.load(saved, checkpoint_id=f"{path}/{place}"))

    two = Sharded(recipe="topk", replicas=2).run(range(2))
    dcp.save({"thinwire": tw.Checkpoint(two.handle)}, checkpoint_id=f"{path}/two")
    found = {
        "small": load(Sharded(recipe="topk", replicas=1).handle, "two"),
        "attachment": told(tw.Checkpoint, handle.attachment),
        "into whole": load(plain, "two"),
        "into shards": load(handle, "whole"),
        "damaged": load(handle, "shards"),
    }
    assert same(handle.state_dict(), before)
    found["partial"] = load(handle, "shards", partial=True)
    return found


def test_what_cannot_be_loaded_is_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(4, _refused, str(tmp_path)):
        assert found["attachment"].startswith("TypeError: this attachment belongs to a sharded model")
        assert "minimum_size with which" not in found["small"]
        assert found["small"].endswith("pass a smaller minimum_size, which keeps more of them compressed")
        assert "the checkpoint was saved from shards, but these parameters are whole" in found["into whole"]
        assert "the checkpoint was saved from whole parameters, but these are sharded" in found["into shards"]
        assert "as what rank 3 saved cannot be read" in found["damaged"]
        assert found["partial"] == "nothing"
