"""Gradients taken for one tensor, as papers that choose from the whole model take them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor
from torch.futures import Future

from thinwire.collectives import Group
from thinwire.memories import Memory
from thinwire.reducer import Bucket, Mean, Reducer, Round, Segment


@final
@dataclass(frozen=True, kw_only=True)
class Whole(Reducer):
    """Give `reducer` each bucket as one vector. `replicate` makes one bucket of a model below its cap."""

    reducer: Reducer

    def prepare(self, group: Group, samples: Sequence[Tensor] = ()) -> None:
        """Prepare it."""
        self.reducer.prepare(group, samples)

    def reduce(self, bucket: Bucket, at: Round) -> "Future[Mean]":
        """Join the bucket's segments."""
        return self.reducer.reduce(Bucket(flat=bucket.flat, segments=bucket.segments.coalesced), at)

    def memories(self) -> Sequence[Memory]:
        """Return its memories."""
        return self.reducer.memories()

    def memory_of(self, segment: Segment) -> Memory:
        """Return its memory, in which a bucket has the name of its first segment."""
        return self.reducer.memory_of(segment)
