"""A handle in torch.distributed.checkpoint: each rank's state under names of its own, for any number of ranks later.

Reading is ours alone, for three reasons. What to read depends on how many ranks have saved, which a Stateful cannot
know before torch.distributed.checkpoint reads. All of it must be checked before anything else is loaded, as that
overwrites the model and the optimizer in place. And where parts may be missing, the others still have to be read.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, final

import torch.distributed as dist

from thinwire.checked import checked
from thinwire.collectives import Group
from thinwire.errors import StateError
from thinwire.integrations.attachment import Attachment
from thinwire.integrations.entries import Header, header_name, named, opened, paths, state_of
from thinwire.integrations.redistribution import noting, redistribute, taken_over
from thinwire.integrations.replicate import Replicas
from thinwire.integrations.storage import Saved, Storage

State = dict[str, Any]
Headers = tuple[dict[int, Header], dict[int, str]]
"""Headers by rank and, for those that cannot be read, why."""
T = TypeVar("T")


@final
@checked
class Checkpoint:
    """A handle as torch.distributed.checkpoint can save it and load it, also for another number of ranks.

    To save, make it of the handle, on every rank:
    `dcp.save({"model": …, "thinwire": thinwire.Checkpoint(handle)}, checkpoint_id=path)`, or `dcp.async_save`. It holds
    copies, so training may go on meanwhile. The handle itself in its place would lose what waits: of the plain tensors
    in its `state_dict`, torch.distributed.checkpoint keeps one rank's.

    To load, say where it is saved, too:
    `dcp.load({"model": …, "thinwire": thinwire.Checkpoint(handle, path)}, checkpoint_id=path)`. `saved` is that path or
    a StorageReader. All that thinwire has saved is read and checked before anything is loaded. `redistribute` says what
    becomes of it where ranks have become more or fewer. Once it has loaded, the object saves.

    `key` says under which key it was saved, if the checkpoint has several. Handles of different groups, such as the
    stages of a pipeline, need different keys. `partial`: whether to go on without ranks whose part is missing or
    unreadable; what waited there is lost.
    """

    def __init__(
        self,
        handle: Attachment | Replicas,
        saved: Saved | None = None,
        *,
        key: str | None = None,
        partial: bool = False,
    ) -> None:
        self._handle, self._saved, self._key, self._partial = handle, saved, key, partial
        self._found: State | None = None

    def state_dict(self) -> State:
        """Return what this rank saves. If there is something to load, read it; then this is a collective.

        It then raises StateError, on every rank, if that cannot be read, is damaged, does not belong together, or does
        not fit the handle, or if ranks are missing; nothing has changed. torch.distributed.checkpoint is left to load
        one small name.
        """
        ranks = dist.get_process_group_ranks(self._handle.group)
        if self._saved is None:
            return dict(named(self._handle.state_dict(), dist.get_rank(), ranks))
        loading = _Loading(self._handle, self._saved, self._key, partial=self._partial)
        self._found = loading.state()
        return loading.one_entry()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the handle resume from what `state_dict` has read. A collective.

        Raises as the handle's own `load_state_dict` does; and ValueError if it is not known where to read.
        """
        if self._found is None:
            raise ValueError("where is it saved? To load, make it thinwire.Checkpoint(handle, saved=checkpoint_id)")
        self._handle.load_state_dict(self._found)
        self._saved = self._found = None


class _Loading:
    """Reading what a handle's ranks need of a checkpoint. Every method is a collective but `one_entry`."""

    def __init__(self, handle: Attachment | Replicas, saved: Saved, key: str | None, *, partial: bool) -> None:
        group = handle.group
        self._handle, self._group, self._partial = handle, group, partial
        self._storage = _together(group, lambda: Storage(saved, key))
        mine = tuple(dist.get_process_group_ranks(group))
        # one rank reads all headers, or each would be read as often as there are ranks
        read = [_together(group, lambda: _headers(self._storage, mine) if group.rank() == 0 else ({}, {}))]
        dist.broadcast_object_list(read, group=group, group_src=0)
        self._headers, self._lost = read[0]

    def state(self) -> State:
        """Return the state with which this rank goes on. Raises StateError if there is none."""
        self._check_lost()
        while True:
            state, lost = _together(self._group, self._attempt)
            everyone: list[dict[int, str]] = [{}] * self._group.size()
            dist.all_gather_object(everyone, lost, group=self._group)
            lost = {rank: reason for each in everyone for rank, reason in each.items()}
            if not lost:
                return state
            self._lost |= lost
            self._check_lost()

    def one_entry(self) -> State:
        """Return an entry for torch.distributed.checkpoint to load."""
        left = min(self._headers.keys() - self._lost.keys())
        return dict(self._storage.blank([header_name(left)]))

    def _check_lost(self) -> None:
        if self._lost and (not self._partial or not self._headers.keys() - self._lost.keys()):
            rank, reason = min(self._lost.items())
            raise StateError(
                f"nothing was loaded, as what rank {rank} saved cannot be read ({reason}): load another checkpoint"
                + ("" if self._partial else ", or go on without what waited there: Checkpoint(..., partial=True)")
            )

    def _attempt(self) -> tuple[State, dict[int, str]]:
        """Return this rank's state from the parts that are left, or else which of them cannot be read, and why."""
        left = {header["rank"]: at for at, header in self._headers.items() if at not in self._lost}
        count = next(iter(self._headers.values()))["world_size"]
        rank, world_size = self._group.rank(), self._group.size()
        taken = taken_over(left, rank, world_size)
        states, lost = [], dict[int, str]()
        for each, at in left.items():
            wanted = paths(self._headers[at], notes_only=each not in taken)
            try:
                states.append(self._state(at, wanted if each in {noting(left, rank, count), *taken} else []))
            except ValueError as error:
                lost[at] = str(error)
        if lost:
            return {}, lost
        dealt = redistribute(states, rank=rank, world_size=world_size, partial=self._partial)
        self._handle.check_state_dict(dealt)
        return dealt, {}

    def _state(self, at: int, wanted: Sequence[str]) -> State:
        """Return what rank `at` has saved, with those tensors that are wanted. Raises ValueError if it is damaged."""
        found = self._storage.read([f"rank {at}/{path}" for path in wanted]) if wanted else {}
        return state_of(self._headers[at], dict(zip(wanted, found.values(), strict=True)))


def _headers(storage: Storage, mine: tuple[int, ...]) -> Headers:
    """Return the headers of the ranks of one group and, for those that cannot be read, why."""
    found, lost = dict[int, Header](), dict[int, str]()
    raw, unreadable = storage.read_each([header_name(rank) for rank in storage.ranks])
    for rank in storage.ranks:
        try:
            found[rank] = opened(raw[header_name(rank)])
        except (KeyError, ValueError) as error:
            lost[rank] = unreadable.get(header_name(rank), str(error))
    if not found:
        raise ValueError(next(iter(lost.values())))
    chosen = _group_of({tuple(header["ranks"]) for header in found.values()}, mine)
    absent = {rank: lost.get(rank, "it is not there") for rank in chosen if rank not in found}
    return {rank: found[rank] for rank in chosen if rank in found}, absent


def _group_of(groups: set[tuple[int, ...]], mine: tuple[int, ...]) -> tuple[int, ...]:
    """Return the group whose state these ranks go on from: their own, or the only one."""
    if mine not in groups and len(groups) > 1:
        raise ValueError(
            f"states of several groups lie under one key, of ranks {sorted(groups)}, and these are {mine}: save the "
            "handles of different groups under different keys"
        )
    return mine if mine in groups else next(iter(groups))


def _together(group: Group, work: Callable[[], T]) -> T:
    """Return what `work` does. A collective: if it raises on any rank, raises on all."""
    done, error = None, None
    try:
        done = work()
    except (ValueError, StateError) as raised:
        error = raised
    everyone: list[str] = [""] * group.size()
    dist.all_gather_object(everyone, str(error or ""), group=group)
    if error is not None:
        raise StateError(f"nothing was loaded: {error}") from error
    for rank, message in enumerate(everyone):
        if message:
            raise StateError(f"nothing was loaded, as rank {rank} cannot: {message}")
    return done  # type: ignore[return-value]  # None only where `work` returns it
