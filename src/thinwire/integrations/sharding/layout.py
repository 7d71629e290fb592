"""Which shard a rank holds among those that save together, and resharding to another number of shards.

A memory holds a number for each element of a parameter, so it is cut as the parameter is. Notes, such as PowerSGD's Q
and thresholds, are about a shard as a whole: those of other shards are dropped, and start from scratch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives import Group
from thinwire.errors import StateError
from thinwire.integrations.membership.membership import union
from thinwire.integrations.membership.redistribution import check_alike
from thinwire.integrations.membership.state import stranger, uncompiled
from thinwire.integrations.training.gradients import is_dtensor
from thinwire.memories import Noted
from thinwire.memories.base import State
from thinwire.reducer.owners import rows_of

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """One of so many shards."""

    shard: int
    shards: int

    @classmethod
    def at(cls, place: list[list[int]]) -> "Piece":
        """Return the one that a state or a layout calls by its place. Raises StateError for several dimensions."""
        if len(place) > 1:
            raise StateError(
                f"the shard {place} is split over {len(place)} mesh dimensions, and only shards over one dimension can "
                "be resharded: resume with the same mesh"
            )
        return cls(*place[0]) if place else cls(0, 1)

    @property
    def place(self) -> list[list[int]]:
        """How a state calls it."""
        return [list(self)] if self.shards > 1 else []


@final
@dataclass(frozen=True)
class Cuts:
    """How parameters are cut: their whole shapes, and for those that are cut along another dimension than 0, which.

    Frozen ones, too, as something may wait for them; by the names they have uncompiled.
    """

    shapes: Mapping[str, Shape] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, parameters: Mapping[str, nn.Parameter]) -> "Cuts":
        """Return those of DTensors; a plain parameter is whole."""
        found: dict[str, int] = {}
        for name, p in parameters.items():
            placements: Any = getattr(p, "placements", ())
            found[uncompiled(name)] = next((each.dim for each in placements if each.is_shard()), 0)
        shapes = {uncompiled(name): tuple(p.shape) for name, p in parameters.items()}
        return cls(shapes, {name: dim for name, dim in found.items() if dim})

    def check(self, saved: Mapping[str, Any], kind: type[Exception]) -> None:
        """Raise this kind of error if what waits in a state was cut along other dimensions."""
        waiting = {uncompiled(name) for memory in saved["memories"] for name in memory}
        then = {uncompiled(name): dim for name, dim in saved.get("dims", {}).items()}
        if any(then.get(name, 0) != self.dims.get(name, 0) for name in waiting):
            raise kind(
                f"the saved state used the shard dimensions {then}, this model {dict(self.dims)} (0 where not listed): "
                "shard as when it was saved"
            )

    def rows(self, name: str, piece: Piece) -> range:
        """Return which indices of the dimension that is cut lie in a piece: FSDP cuts as torch.chunk does."""
        return rows_of(self._whole(name)[self.dim(name)], *piece)

    def shape(self, name: str, piece: Piece) -> Shape:
        """Return the shape of a parameter's piece."""
        sizes = list(self._whole(name))
        sizes[self.dim(name)] = len(self.rows(name, piece))
        return tuple(sizes)

    def common(self, name: str, one: Piece, other: Piece) -> range:
        """Return which indices lie in both pieces."""
        mine, theirs = self.rows(name, one), self.rows(name, other)
        return range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))

    def dim(self, name: str) -> int:
        """Return along which dimension a parameter is cut."""
        return self.dims.get(uncompiled(name), 0)

    def _whole(self, name: str) -> Shape:
        if uncompiled(name) not in self.shapes:
            raise stranger(name, self.shapes)
        return self.shapes[uncompiled(name)]


@final
@dataclass(frozen=True, kw_only=True)
class Layout:
    """The place of this rank: its mesh's `groups` (the first has the same shard), all `ranks`, and its `shard`."""

    groups: Sequence[Group]
    ranks: tuple[int, ...]
    shard: list[list[int]] | None = None
    cuts: Cuts = field(default_factory=Cuts)

    @classmethod
    def whole(cls, group: Group, parameters: Mapping[str, nn.Parameter]) -> "Layout":
        """Return that of replicas of whole parameters. Raises TypeError for shards, whose place it does not know."""
        if any(map(is_dtensor, parameters.values())):
            raise TypeError(
                "this attachment belongs to a sharded model: pass the handle that thinwire.shard returned, as in "
                "thinwire.Checkpoint(handle), not handle.attachment"
            )
        return cls(groups=[group], ranks=tuple(dist.get_process_group_ranks(group)))

    @classmethod
    def sharded(cls, group: Group, island: Sequence[Group], parameters: Mapping[str, nn.Parameter]) -> "Layout":
        """Return that of replicas of shards, which the groups of `island` hold together. A collective of the mesh.

        `parameters`: all of the model's.
        """
        groups = [group, *island]
        ranks = union(groups, dict.fromkeys(dist.get_process_group_ranks(group), ""))
        place = [[each.rank(), each.size()] for each in island]
        return cls(groups=groups, ranks=tuple(sorted(ranks)), shard=place, cuts=Cuts.of(parameters))


def recut(pieces: Mapping[int, Mapping[str, Any]], shards: int, cuts: Cuts, piece: Piece) -> dict[str, Any]:
    """Return the state of a piece from those that a replica's shards saved; what a missing one held becomes zeros."""
    first = next(iter(pieces.values()))
    for each in pieces.values():
        check_alike(first, each)
        cuts.check(each, StateError)
    memories = [
        _memory({shard: each["memories"][i] for shard, each in pieces.items()}, shards, cuts, piece)
        for i in range(len(first["memories"]))
    ]
    return {**first, "shard": piece.place, "memories": memories}


def _memory(held: Mapping[int, State], shards: int, cuts: Cuts, piece: Piece) -> State:
    found: dict[str, dict[str, Tensor]] = {}
    for name in dict.fromkeys(name for memory in held.values() for name in memory):
        fields = {shard: memory[name] for shard, memory in held.items() if name in memory}
        for each in dict.fromkeys(f for of_shard in fields.values() for f in of_shard if f not in Noted.free):
            parts = {shard: of_shard[each] for shard, of_shard in fields.items() if each in of_shard}
            found.setdefault(name, {})[each] = _field(parts, shards, cuts, piece, name)
    return found


def _field(parts: Mapping[int, Tensor], shards: int, cuts: Cuts, piece: Piece, name: str) -> Tensor:
    like = next(iter(parts.values()))
    dim = cuts.dim(name)
    whole = like.new_zeros(cuts.shape(name, piece))
    start = cuts.rows(name, piece).start
    for shard, flat in parts.items():
        source = Piece(shard, shards)
        if not (rows := cuts.common(name, source, piece)):
            continue
        shape = cuts.shape(name, source)
        if flat.numel() != torch.Size(shape).numel():
            raise ValueError(
                f"the residual of {name!r} on shard {shard} of {shards} has {flat.numel()} elements; expected those "
                f"of {shape}: the model had another shape, or was sharded differently"
            )
        taken = flat.view(shape).narrow(dim, rows.start - cuts.rows(name, source).start, len(rows))
        whole.narrow(dim, rows.start - start, len(rows)).copy_(taken)
    return whole.view(-1)
