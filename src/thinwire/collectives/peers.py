"""Messages from one rank to another."""

from collections.abc import Iterable, Mapping
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.groups import Group
from thinwire.trace import ring_bytes, span


@final
class Peers:
    """Sends uint8 buffers within a group, and counts what it sends in `sent_bytes`."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self.rank, self.world_size = group, group.rank(), group.size()
        # Gloo sends from main memory only.
        self._device, self._carrier = device, torch.device("cpu") if dist.get_backend(group) == "gloo" else device
        self.sent_bytes = 0.0

    def send(self, message: Tensor, to: int) -> None:
        """Send to a rank that already knows the length."""
        with span(f"send to {to}"):
            self.cross({to: message}, {})

    def receive(self, nbytes: int, source: int) -> Tensor:
        """Receive a message of `nbytes` bytes."""
        with span(f"receive from {source}"):
            return self.cross({}, {source: nbytes})[source]

    def swap(self, outgoing: Mapping[int, Tensor], sources: Iterable[int]) -> dict[int, Tensor]:
        """Send each rank its message and return what the `sources` send. Lengths travel first, 8 bytes each."""
        lengths = {
            rank: torch.tensor([message.numel()], device="cpu").view(torch.uint8) for rank, message in outgoing.items()
        }
        theirs = self.cross(lengths, dict.fromkeys(sources, 8))
        return self.cross(outgoing, {rank: int(length.cpu().view(torch.int64)) for rank, length in theirs.items()})

    def all_reduce(self, x: Tensor) -> None:
        """Sum `x` over the ranks, in place."""
        dist.all_reduce(x, group=self._group)
        self.count_ring(x.nbytes)

    def count_ring(self, nbytes: int) -> None:
        """Count what this rank sends in a ring all-reduce of `nbytes` bytes."""
        self.sent_bytes += ring_bytes(nbytes, self.world_size)

    def cross(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int]) -> dict[int, Tensor]:
        """Send messages (by rank) and receive others, whose lengths in bytes are known (by rank), all at once."""
        inbox = {rank: torch.empty(n, dtype=torch.uint8, device=self._carrier) for rank, n in incoming.items()}
        outbox = {rank: message.to(self._carrier) for rank, message in outgoing.items()}
        self.sent_bytes += sum(message.nbytes for message in outbox.values())
        group = self._group
        # Who sends first, before the other one is ready to receive, has Gloo send one way at a time.
        calls = [dist.P2POp(dist.irecv, message, group=group, group_peer=rank) for rank, message in inbox.items()]
        calls += [dist.P2POp(dist.isend, message, group=group, group_peer=rank) for rank, message in outbox.items()]
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
        return {rank: message.to(self._device) for rank, message in inbox.items()}
