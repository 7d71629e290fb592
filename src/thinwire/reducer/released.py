"""The way back to uncompressed gradients: what waits goes along with the next of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from torch.futures import Future

from thinwire.codecs import Identity
from thinwire.exchanges import AllReduce
from thinwire.memories import ErrorFeedback, Memory, NoMemory
from thinwire.reducer.base import Bucket, Reducer, Round, Slot
from thinwire.reducer.compressed import Compressed


@final
@dataclass(frozen=True, kw_only=True)
class Released(Reducer):
    """Send gradients as they are, and along with them what waits in the error feedback of another's memories."""

    waiting: tuple[Memory, ...]
    dense: Reducer = field(
        default_factory=lambda: Compressed(memory=NoMemory(), codec=Identity(), exchange=AllReduce())
    )

    def reduce(self, bucket: Bucket, at: Round) -> "Future[bool]":
        """Add what waits, and start."""
        feedback = [part for memory in self.waiting for part in memory.parts if isinstance(part, ErrorFeedback)]
        for slot, gradient in zip(bucket.slots, bucket.views(), strict=True):
            for memory in feedback:
                if memory.waits(slot.name):
                    memory.release(slot.name, gradient, at.scale)
        return self.dense.reduce(bucket, at)

    def memories(self) -> Sequence[Memory]:
        """Return those in which something may wait."""
        return self.waiting

    def memory_of(self, slot: Slot) -> Memory:
        """Return none: nothing waits for long."""
        return self.dense.memory_of(slot)
