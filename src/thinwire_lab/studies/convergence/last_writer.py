"""What papers have and the library has not: slots whose last writer wins, and gradients taken for one tensor."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.futures import Future

from thinwire import kernels
from thinwire.checked import Positive
from thinwire.codecs.base import Codec, kept, side_by_side
from thinwire.codecs.thresholding import PICKS_IN_SAMPLE, draw
from thinwire.collectives import Group
from thinwire.exchanges import AllGather
from thinwire.kernels.parts import Cut
from thinwire.memories import Memory, MomentumCorrection
from thinwire.payloads import Sparse
from thinwire.recipes import dense
from thinwire.reducer import Bucket, Compressed, Mean, MinimumSize, Reducer, Round, Segment
from thinwire.schedules import Density
from thinwire.signals import Signal, Signals

_LAST = 2**31 - 1


@final
@dataclass(frozen=True, kw_only=True)
class LastWriter(Codec):
    """`HashedSlots`, but writers come in an order drawn from the seed, as threads of a GPU come in any."""

    density: Density
    surplus: Positive = 1.0

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Sparse:
        """Return m slots, of which about 63 % are filled where m elements were picked."""
        slots = kept(self.density, signal.numel)
        wanted = min(signal.numel, math.ceil(self.surplus * slots))
        drawn = draw(signal.numel, wanted, 2 * wanted + PICKS_IN_SAMPLE, seed)
        indices, *_ = signal.pick(drawn)
        order = torch.randint(_LAST, indices.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
        alone, cut = Signals([signal]), Cut([0], [signal.numel])
        runs = [drawn.capacity], [slots], [seed], cut.regions
        found = kernels.hashed_slots_of_each([signal.tensor()], indices, order, *runs)
        return side_by_side(alone, found, [slots], None, seeds=[seed], cut=cut, numel=signal.numel, slots=True)


def last_writer(*, density: Density, surplus: float = 1.0) -> Reducer:
    """Return `recipes.dragonn` with these slots."""
    memory = MomentumCorrection()
    codec = LastWriter(density=density, surplus=surplus)
    large = Compressed(memory=memory, codec=codec, exchange=AllGather())
    return MinimumSize(minimum_size=1024, small=dense(memory=memory), large=large)


@final
@dataclass(frozen=True, kw_only=True)
class Whole(Reducer):
    """Give `reducer` each bucket as one vector. `replicate` makes one bucket of a model below its cap."""

    reducer: Reducer

    def prepare(self, group: Group, samples: Sequence[Tensor] = ()) -> None:
        self.reducer.prepare(group, samples)

    def reduce(self, bucket: Bucket, at: Round) -> "Future[Mean]":
        return self.reducer.reduce(Bucket(flat=bucket.flat, segments=bucket.segments.coalesced), at)

    def memories(self) -> Sequence[Memory]:
        return self.reducer.memories()

    def memory_of(self, segment: Segment) -> Memory:
        """Return its memory, in which a bucket has the name of its first segment."""
        return self.reducer.memory_of(segment)
