"""The gradients of shards as FSDP delivers them: gathered in buckets, and exchanged while backward goes on or after it.

FSDP reduces gradients within the island as always. Then each rank holds its shard of the island's gradient, and the
ranks that hold the same shard in other islands put it through the recipe.
"""

from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from thinwire.collectives import Group, broadcast_state
from thinwire.integrations.attachments.attachment import Attachment
from thinwire.integrations.training.gradients import buckets, own_length, used_anywhere


@final
class Arrivals:
    """The gradients of one backward after another, in buckets, exchanged while backward goes on if they `may_overlap`.

    `island`: the groups of ranks that hold the parameters together. `length`: how many elements an exchange takes for a
    parameter, alike on all ranks of the attachment. Collectives are those of the mesh.
    """

    def __init__(
        self,
        attachment: Attachment,
        island: Sequence[Group],
        *,
        may_overlap: bool,
        length: Callable[[nn.Parameter], int] = own_length,
    ) -> None:
        self._attachment, self._island, self._may_overlap = attachment, list(island), may_overlap
        self._length = length
        self._arranged = self.overlaps = False
        self._arrange(list(attachment.parameters))
        self._arrived: Counter[nn.Parameter] = Counter()
        self.started: list[Future[Tensor]] = []
        self._reduced: list[Any] = []  # on a GPU, when FSDP had reduced

    @property
    def some(self) -> bool:
        """Whether there are any in this backward."""
        return bool(self._arrived)

    @property
    def nbytes(self) -> int:
        """Bytes of the buckets."""
        return sum(bucket.flat.nbytes for bucket in self.buckets)

    def clear(self) -> None:
        """Get ready for a backward. There may be some left of one that raised."""
        self.started.clear()
        self._arrived.clear()

    def note(self, name: str, p: nn.Parameter, *, now: bool) -> None:
        """Note that FSDP has added to the gradient of this shard. `now`: start the buckets that are complete."""
        if self._bucket_of[p] < len(self.started):
            raise RuntimeError(
                f"FSDP reduced the gradient of {name!r} again after its exchange had started, unlike in the first "
                "backward: pass overlap=False"
            )
        self._attachment.steps.gradients.added.add(name)
        self._arrived[p] += 1
        if p.is_cuda:
            self._reduced.append(torch.cuda.current_stream(p.device).record_event())
        if self.overlaps and now:
            for bucket in self.buckets[len(self.started) :]:
                if not all(each in self._arrived for each in bucket.parameters):
                    break
                self._start_next()

    @torch.no_grad()
    def exchange(self) -> None:
        """Replace every shard of the gradient by its mean over the replicas."""
        while self._reduced:
            self._reduced.pop().wait()
        if not self._arranged:
            self._arrange_as_arrived()
        error, used = None, set[Tensor]()
        try:
            used |= self._means()
        except Exception as raised:
            error = raised
        self._all_reduce_failures(error)
        for bucket in self.buckets:
            bucket.hand_back(used)
        parameters = self._attachment.parameters
        self._attachment.steps.drop_idle([name for name, p in parameters.items() if p not in used])

    def _start_next(self) -> None:
        bucket = self.buckets[len(self.started)]
        bucket.fill()
        self.started.append(self._attachment.reduce(bucket.flat, bucket.parameters))

    def _means(self) -> Set[Tensor]:
        """Start what has not started, wait for all of it, and return the parameters that any replica has used."""
        while len(self.started) < len(self.buckets):
            self._start_next()
        used = used_anywhere(list(self._attachment.parameters.values()), self._attachment.group)
        for future in self.started:
            future.wait()
        self.started.clear()
        return used

    def _arrange(self, names: Sequence[str]) -> None:
        parameters = [self._attachment.parameters[name] for name in reversed(names)]
        self.buckets = list(buckets(parameters, length=self._length))
        self._bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket.parameters}

    def _arrange_as_arrived(self) -> None:
        """After the first backward, agree on overlap, if each came once, and on the order in the first replica."""
        self._arranged = True
        names, group = self._attachment.names, self._attachment.group
        order = [*dict.fromkeys([names[p] for p in self._arrived] + list(names.values()))]
        self._arrange(broadcast_state(order, group, 0))
        several = torch.tensor([int(max(self._arrived.values()) > 1)], device=self.buckets[0].flat.device)
        dist.all_reduce(several, dist.ReduceOp.MAX, group)
        self.overlaps = self._may_overlap and not several

    def _all_reduce_failures(self, error: Exception | None) -> None:
        """Make every mean NaN if any shard's is not finite, and raise on every rank what an exchange raised on one."""
        steps = self._attachment.steps
        error = error or steps.failure()
        watched = any(memory.stateful for memory in self._attachment.recipe.memories())
        news = [int(error is not None), int(watched and steps.spoilt), steps.step]
        told = torch.tensor(news, device=self.buckets[0].flat.device)
        for group in self._island:
            dist.all_reduce(told, dist.ReduceOp.MAX, group)
        failed, bad, step = told.tolist()
        if failed:
            self.started.clear()
            raise error or RuntimeError("an exchange has failed between other ranks of this mesh: see their errors")
        steps.catch_up(step)
        if bad:
            steps.spoil()
            for bucket in self.buckets:
                bucket.flat.fill_(torch.nan)
