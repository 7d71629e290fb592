"""Messages between two ranks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.exchanges.compat import Group


@final
class Post:
    """Sends uint8 buffers within a group, and counts what it sends in `sent_bytes`."""

    def __init__(self, group: Group) -> None:
        self._group, self.rank, self.world_size = group, group.rank(), group.size()
        self.sent_bytes = 0.0

    def send(self, message: Tensor, to: int) -> None:
        """Send to a rank that knows the length."""
        self._wait([self._sending(message, to)])

    def receive(self, like: Tensor, source: int) -> Tensor:
        """Receive a message as long as `like`."""
        out = torch.empty_like(like)
        self._wait([self._receiving(out, source)])
        return out

    def swap(self, outgoing: Mapping[int, Tensor], sources: Iterable[int], device: torch.device) -> dict[int, Tensor]:
        """Send to each rank its message and return what the `sources` send; lengths, of 8 bytes, travel first."""
        lengths = {rank: torch.empty(1, dtype=torch.int64, device=device) for rank in sources}
        self._cross({rank: torch.tensor([m.numel()], device=device) for rank, m in outgoing.items()}, lengths)
        inbox = {rank: torch.empty(int(n), dtype=torch.uint8, device=device) for rank, n in lengths.items()}
        self._cross(outgoing, inbox)
        return inbox

    def all_reduce(self, x: Tensor) -> None:
        """Sum `x` over the ranks, in place."""
        dist.all_reduce(x, group=self._group)
        self.count_ring(x.nbytes)

    def count_ring(self, nbytes: float) -> None:
        """Count a ring all-reduce of so many bytes."""
        self.sent_bytes += 2 * (self.world_size - 1) / self.world_size * nbytes

    def _cross(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        works = [self._receiving(message, rank) for rank, message in incoming.items()]
        self._wait(works + [self._sending(message, rank) for rank, message in outgoing.items()])

    def _sending(self, message: Tensor, to: int) -> dist.Work | None:
        self.sent_bytes += message.nbytes
        return dist.isend(message, group=self._group, group_dst=to)

    def _receiving(self, out: Tensor, source: int) -> dist.Work | None:
        return dist.irecv(out, group=self._group, group_src=source)

    def _wait(self, works: Sequence[dist.Work | None]) -> None:
        for work in works:
            if work is not None:
                work.wait()
