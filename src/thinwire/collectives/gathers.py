"""All-gather, all-to-all and all-reduce, as torch's backends have them or better; and several gathers as one message.

Why not Gloo's gather? It passes tensors around a ring: with K ranks a gather takes K - 1 trips, one after the other,
and two ranks send one way at a time. We send directly to every rank at once, which takes one trip and the link's full
rate both ways. Receives are posted before sends: a sender whose peer is not ready would have it wait.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from thinwire.collectives.exit import lend
from thinwire.collectives.groups import Group
from thinwire.collectives.thread import Worker

_TAG = 0x7417  # nobody else's, so that messages of our users never mix with ours
_DIRECT = 16  # ranks up to which everybody sends to everybody
# 2.13 renamed all_gather_into_tensor to all_gather_single and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(out: Tensor, mine: Tensor, group: Group) -> "Future[Any]":
    """Start gathering every rank's dense `mine` into `out`, world size times as long: the one all-gather of tensors."""
    if not _sends_directly(mine, group):
        work = _all_gather(lend(out), lend(mine), group=group, async_op=True)
        return _ordered(work, out, group) if out.is_cuda else work.get_future()
    return _crossed(out, out.view(group.size(), -1).unbind(), [mine] * group.size(), group)


def all_to_all(out: Tensor, mine: Tensor, sizes: Sequence[int], group: Group) -> "Future[Any]":
    """Start sending `sizes[r]` elements of `mine` to each rank r; `out` takes an equal share from each."""
    shares = [out.numel() // group.size()] * group.size()
    if _sends_directly(mine, group):
        return _crossed(out, out.split(shares), mine.split(list(sizes)), group)
    work = dist.all_to_all_single(lend(out), lend(mine), shares, list(sizes), group=group, async_op=True)
    return _ordered(work, out, group) if out.is_cuda else work.get_future()


def all_reduce(x: Tensor, group: Group) -> "Future[Any]":
    """Start summing `x` over the ranks, in place. If it is sparse, only the future's value holds the sum."""
    work = dist.all_reduce(lend(x), group=group, async_op=True)
    return _ordered(work, x, group) if x.is_cuda else work.get_future()


def _ordered(work: dist.Work, out: Tensor, group: Group) -> "Future[Any]":
    """Return the future of a GPU's collective. Gloo's is done before its result is copied back, so a thread waits."""
    future: Future[Any] = work.get_future()
    if group.name() != "gloo":
        return future

    def arrived() -> Any:
        work.wait()
        return future.value()

    return _waiting(group).submit(arrived, out.device)


def _sends_directly(x: Tensor, group: Group) -> bool:
    return 1 < group.size() <= _DIRECT and x.device.type == "cpu" and group.name() == "gloo"


def _crossed(out: Tensor, arriving: Sequence[Tensor], leaving: Sequence[Tensor], group: Group) -> "Future[Any]":
    """Start sending `leaving[r]` to each rank r, and receiving `arriving[r]` of `out` from it."""
    own, size = group.rank(), group.size()
    order = [(own + step) % size for step in range(1, size)]  # so that not all send to the same rank first
    arriving[own].copy_(leaving[own])
    try:
        works = [dist.irecv(arriving[rank], group=group, group_src=rank, tag=_TAG) for rank in reversed(order)]
        works += [dist.isend(leaving[rank], group=group, group_dst=rank, tag=_TAG) for rank in order]
    except RuntimeError as error:  # a peer is gone; whoever waits learns it
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed

    def arrived() -> Tensor:
        for work in works:
            if work is not None:  # as torch has it for ranks outside the group
                work.wait()
        return out

    return _waiting(group).submit(arrived, out.device)


def _waiting(group: Group) -> Worker:
    """Return the thread that waits for this group's messages: torch has no futures of messages between two ranks."""
    if (found := _workers.get(group)) is None:
        found = _workers[group] = Worker("thinwire-messages")
    return found


_workers: weakref.WeakKeyDictionary[Group, Worker] = weakref.WeakKeyDictionary()


@final
class Pool:
    """What a rank wants gathered: `message` is all of it, `deliver` hands out what everybody sent.

    Of what could be summed instead, it takes at most `summed` bytes at once.
    """

    def __init__(self, summed: float) -> None:
        self.summed = summed
        self._parts: list[tuple[Tensor, Future[Tensor], Any]] = []

    def gather(self, mine: Tensor) -> "Future[Tensor]":
        """Have a tensor travel with the others. The future holds everybody's, a row each."""
        future: Future[Tensor] = Future(devices=[mine.device] if mine.is_cuda else [])
        # Whoever asks for the message may do so in a stream that does not wait for this one.
        written = torch.cuda.current_stream(mine.get_device()).record_event() if mine.is_cuda else None
        self._parts.append((mine, future, written))
        return future

    def message(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the bytes to send."""
        for mine, _, written in self._parts:
            if written is not None:
                torch.cuda.current_stream(mine.get_device()).wait_event(written)
        parts = [mine.detach().contiguous().view(-1).view(torch.uint8).to(device) for mine, _, _ in self._parts]
        return torch.cat(parts)

    def deliver(self, rows: Tensor) -> None:
        """Take the messages of some ranks, a row each. Whoever waits for a part of them goes on."""
        rows = rows.view(len(rows), -1)
        for row in rows.split([mine.nbytes for mine, _, _ in self._parts], dim=1):
            mine, future, _ = self._parts.pop(0)
            whole = row.to(mine.device, copy=True, memory_format=torch.contiguous_format)
            future.set_result(whole.view(mine.dtype).view(len(rows), *mine.shape))

    def fail(self, error: Exception) -> None:
        """Tell whoever waits that nothing comes."""
        parts, self._parts = self._parts, []
        for _, future, _ in parts:
            future.set_exception(error)  # type: ignore[arg-type]  # torch has it for a result


_open: ContextVar[Pool | None] = ContextVar("thinwire.pool", default=None)


@contextmanager
def pooling(summed: float = 1 << 16) -> Iterator[Pool]:
    """Within, what can be gathered in one message is put into the pool. Its owner sends it.

    By default, up to 64 kB rather travel with the others, to all ranks, than take the trips of a ring.
    """
    pool = Pool(summed)
    token = _open.set(pool)
    try:
        yield pool
    finally:
        _open.reset(token)


def pooled() -> Pool | None:
    """Return the pool that is open, if any."""
    return _open.get()
