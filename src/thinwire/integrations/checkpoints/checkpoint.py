"""A handle in torch.distributed.checkpoint: each rank's state under names of its own, for any number of ranks later.

Reading is ours alone, for three reasons. What to read depends on how many ranks have saved, which a Stateful cannot
know before torch.distributed.checkpoint reads. All of it must be checked before anything else is loaded, as that
overwrites the model and the optimizer in place. And where parts may be missing, the others still have to be read.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, final

import torch.distributed as dist
from torch import Tensor

from thinwire.checked import checked
from thinwire.collectives import Group
from thinwire.errors import StateError
from thinwire.integrations.attachments.attachment import Attachment
from thinwire.integrations.checkpoints import storage
from thinwire.integrations.checkpoints.storage import Header, Saved, Storage, header_name
from thinwire.integrations.membership import state
from thinwire.integrations.membership.membership import agreed, first_found, together, union
from thinwire.integrations.membership.redistribution import noting, redistribute, taken_over
from thinwire.integrations.replicas.replicate import Replicas
from thinwire.integrations.sharding.layout import Layout, Piece, recut
from thinwire.integrations.sharding.scatter import Scattered
from thinwire.integrations.sharding.shard import Shards
from thinwire.integrations.workers.outer_handle import Outer
from thinwire.integrations.workers.outer_state import of_a_group
from thinwire.memories import Noted

_log = logging.getLogger("thinwire")

State = dict[str, Any]
_Handle = Attachment | Replicas | Scattered | Shards | Outer
Headers = tuple[dict[int, Header], dict[int, str]]
"""Headers by rank and, for those that cannot be read, why."""
T = TypeVar("T")


class _ToLoad(Tensor):
    """An entry that is only to be loaded: saved, it would look like a checkpoint without residuals."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError("this Checkpoint was given a path and has not loaded yet; to save, make it Checkpoint(handle)")


@final
@checked
class Checkpoint:
    """Lets torch.distributed.checkpoint save and load a handle, even with another number of ranks or shards.

    To save, construct it from the handle, on every rank. To load, give it the path too. It holds copies, so training
    may go on during `dcp.async_save`. Do not save the handle itself: torch.distributed.checkpoint would keep only one
    rank's tensors.

    All that thinwire has saved is read and checked before anything is loaded. If the number of ranks has changed, the
    state is resharded as by `redistribute`. If the number of shards has changed, residuals are resharded as parameters
    are; notes, such as thresholds and PowerSGD's Q, start from scratch, and the logger "thinwire" says so. After
    loading, you can save with the same object; before, saving raises CheckpointException.

    Args:
        handle: What to save, or to load into: what `attach`, `replicate`, `shard`, `scatter` or `outer` returned.
        saved: Where to load from: a path or a StorageReader.
        key: The key it was saved under, if the checkpoint has several. Handles of different groups, such as the stages
            of a pipeline, need different keys.
        partial: Whether to load even if some ranks' parts are missing or unreadable; their residuals are lost.

    Example:
        >>> model = DistributedDataParallel(nn.Linear(64, 64))
        >>> handle = tw.attach(model, tw.recipes.topk(density=0.01))
        >>> dcp.save({"thinwire": tw.Checkpoint(handle)}, checkpoint_id="saved")
        Metadata(...)
        >>> dcp.load({"thinwire": tw.Checkpoint(handle, "saved")}, checkpoint_id="saved")
    """

    def __init__(
        self, handle: _Handle, saved: Saved | None = None, *, key: str | None = None, partial: bool = False
    ) -> None:
        self._handle, self._saved, self._key, self._partial = handle, saved, key, partial
        self._layout = _layout(handle)
        self._found: State | None = None

    def state_dict(self) -> State:
        """Return what this rank saves, or if there is something to load, read it; a collective.

        If it raises, it raises on every rank, and nothing has changed.

        Raises:
            ValueError: If some ranks would load and others save, or with another key or `partial`.
            StateError: If the saved state cannot be read, is damaged, is of different steps, does not fit the handle,
                or lacks ranks.
        """
        loads = f"a path, key={self._key!r}, partial={self._partial}"
        everyone = union(self._layout.groups, {dist.get_rank(): "none" if self._saved is None else loads})
        if len(set(everyone.values())) > 1:
            given = "; ".join(f"rank {rank} {what}" for rank, what in sorted(everyone.items()))
            raise ValueError(
                f"ranks gave Checkpoint different things to load from ({given}): to load, make it "
                "Checkpoint(handle, path) with the same key and partial on every rank; to save, Checkpoint(handle)"
            )
        if self._saved is None:
            handle, layout = self._handle, self._layout
            return agreed(layout.groups, lambda: {**storage.named(handle.state_dict(), dist.get_rank(), layout.ranks)})
        loading = _Loading(self._handle, self._saved, self._key, partial=self._partial)
        self._found = loading.state()
        return loading.one_entry()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the handle resume from what `state_dict` has read; a collective.

        Raises:
            ValueError: If no path was given, or where the handle's own `load_state_dict` raises it.
        """
        if self._found is None:
            raise ValueError("no path to load from: make it thinwire.Checkpoint(handle, saved=checkpoint_id)")
        self._handle.load_state_dict(self._found)
        self._saved = self._found = None


class _Loading:
    """Reading what a handle's ranks need of a checkpoint. Every method is a collective but `one_entry`."""

    def __init__(self, handle: _Handle, saved: Saved, key: str | None, *, partial: bool) -> None:
        self._handle, self._layout, self._partial = handle, _layout(handle), partial
        groups, mine = self._layout.groups, self._layout.ranks
        self._storage = _together(groups, lambda: Storage(saved, key))
        # one rank reads all headers, or each would be read as often as there are ranks
        read = _together(groups, lambda: _headers(self._storage, mine) if dist.get_rank() == mine[0] else None)
        pairs: Any = read and [list(each.items()) for each in read]
        found, lost = first_found(groups, pairs) or ([], [])
        self._headers, self._lost = dict(found), dict(lost)

    def state(self) -> State:
        """Return the state with which this rank goes on. Raises StateError if there is none."""
        self._check_lost()
        self._check_store()
        while True:
            dealt, lost = _together(self._layout.groups, self._attempt)
            if not (lost := union(self._layout.groups, lost)):
                break
            self._lost |= lost
            self._check_lost()
        check = self._handle.check_state_dict
        together(self._layout.groups, lambda group: state.agree(group, lambda: check(dealt)), StateError, ValueError)
        notes = any(storage.paths(header, notes_only=True) for header in self._headers.values())
        if notes and not self._uncut(next(iter(self._headers.values()))) and dist.get_rank() == self._layout.ranks[0]:
            _log.warning(
                "the number of shards has changed since the checkpoint: residuals were resharded; thresholds and "
                "PowerSGD's Q start from scratch"
            )
        return dealt

    def one_entry(self) -> State:
        left = min(self._headers.keys() - self._lost.keys())
        return {name: x.as_subclass(_ToLoad) for name, x in self._storage.blank([header_name(left)]).items()}

    def _check_lost(self) -> None:
        if self._lost and (not self._partial or not self._headers.keys() - self._lost.keys()):
            rank, reason = min(self._lost.items())
            raise StateError(
                f"nothing was loaded, as what rank {rank} saved cannot be read ({reason}): load another checkpoint"
                + ("" if self._partial else ", or go on without its residuals: Checkpoint(..., partial=True)")
            )

    def _check_store(self) -> None:
        """Raise StateError for a group's state where each worker would take the residuals of all."""
        count = next(iter(self._headers.values()))["world_size"]
        if count > 1 and isinstance(self._handle, Outer) and self._handle.name:
            raise StateError(f"nothing was loaded: {of_a_group(count)}")

    def _attempt(self) -> tuple[State, dict[int, str]]:
        """Return this rank's state from the parts that are left, or else which of them cannot be read, and why."""
        left = {at: header for at, header in self._headers.items() if at not in self._lost}
        some = next(iter(left.values()))
        rank, world_size = self._handle.group.rank(), self._handle.group.size()
        mine = self._replicas(left)
        taken = taken_over(mine, rank, world_size)
        wanted = {*taken, noting(mine, rank, some["world_size"])} if mine else set()
        states, lost = [], dict[int, str]()
        for replica, shards in mine.items():
            parts = {}
            for shard, at in shards.items():
                try:
                    parts[shard] = self._state(at, taken=replica in taken, wanted=replica in wanted)
                except ValueError as error:
                    lost[at] = str(error)
            if not lost:
                states.append(self._cut(parts))
        if lost:
            return {}, lost
        blank = {**storage.state_of(some, {}), "shard": self._layout.shard}  # nothing is left of this shard
        dealt = redistribute(states or [blank], rank=rank, world_size=world_size, partial=self._partial)
        try:
            self._handle.check_state_dict(dealt)
        except ValueError as error:
            if self._uncut(some):
                raise
            raise ValueError(
                f"{str(error).removesuffix(state.AS_SAVED)}; the shards had other sizes when this was saved: pass a "
                "smaller minimum_size, which keeps more of them compressed"
            ) from error
        return dealt, {}

    def _replicas(self, left: Mapping[int, Header]) -> dict[int, dict[int, int]]:
        """Return which ranks have saved something of this rank's shard, by replica and their shard."""
        found: dict[int, dict[int, int]] = {}
        for at, header in left.items():
            place, mine = header.get("shard"), self._layout.shard
            if (place is None) != (mine is None):
                ways = "whole parameters, but these are sharded", "shards, but these parameters are whole"
                said = ways[0] if place is None else ways[1]
                raise ValueError(f"the checkpoint was saved from {said}: load it into the kind of handle that saved it")
            if not self._uncut(header):
                found.setdefault(header["rank"], {})[Piece.at(header["shard"]).shard] = at
            elif place == mine:
                found.setdefault(header["rank"], {})[0] = at
        return found

    def _uncut(self, header: Header) -> bool:
        then, now = header.get("shard") or [], self._layout.shard or []
        return [size for _, size in then] == [size for _, size in now]

    def _cut(self, parts: Mapping[int, State]) -> State:
        """Return this rank's part of what the shards of a replica have saved."""
        some = next(iter(parts.values()))
        if self._uncut(some):
            return some
        assert self._layout.shard is not None
        return recut(parts, Piece.at(some["shard"]).shards, self._layout.cuts, Piece.at(self._layout.shard))

    def _state(self, at: int, *, taken: bool, wanted: bool) -> State:
        """Return what rank `at` has saved, with those tensors that are wanted. Raises ValueError if it is damaged."""
        header = self._headers[at]
        chosen = storage.paths(header, notes_only=not taken) if wanted else []
        if not self._uncut(header):  # only what has elements of this shard
            assert self._layout.shard is not None
            cuts, there, mine = self._layout.cuts, Piece.at(header["shard"]), Piece.at(self._layout.shard)
            fields = ((path, *storage.parameter_of(path)) for path in chosen)
            chosen = [path for path, name, f in fields if f not in Noted.free and cuts.common(name, there, mine)]
        found = self._storage.read([f"rank {at}/{path}" for path in chosen]) if chosen else {}
        return storage.state_of(header, dict(zip(chosen, found.values(), strict=True)))


def _layout(handle: Any) -> Layout:
    """Return this rank's place among those that save together. Raises TypeError where that is not known."""
    if isinstance(handle, Scattered | Shards):
        return handle.layout
    whole = handle.attachment if isinstance(handle, Replicas) else handle
    return Layout.whole(whole.group, whole.parameters)


def _headers(saved: Storage, mine: tuple[int, ...]) -> Headers:
    """Return the headers of the ranks of one group and, for those that cannot be read, why."""
    found, lost = dict[int, Header](), dict[int, str]()
    raw, unreadable = saved.read_each([header_name(rank) for rank in saved.ranks])
    for rank in saved.ranks:
        try:
            found[rank] = storage.opened(raw[header_name(rank)])
        except (KeyError, ValueError) as error:
            lost[rank] = unreadable.get(header_name(rank), str(error))
    if not found:
        raise ValueError(next(iter(lost.values())))
    groups = {tuple(header["ranks"]) for header in found.values()}
    if mine not in groups and len(groups) > 1:
        raise ValueError(
            f"one key holds the states of several groups, ranks {sorted(groups)}, and this handle's ranks are {mine}: "
            "save the handles of different groups under different keys"
        )
    chosen = mine if mine in groups else next(iter(groups))
    absent = {rank: lost.get(rank, "it is not there") for rank in chosen if rank not in found}
    return {rank: found[rank] for rank in chosen if rank in found}, absent


def _together(groups: Sequence[Group], work: Callable[[], T]) -> T:
    """Return what `work` does. A collective: if it raises on any rank, raises StateError on all."""
    try:
        return agreed(groups, work, StateError, ValueError)
    except (StateError, ValueError) as error:
        raise StateError(f"nothing was loaded: {error}") from error
