"""What a rank contributes to every rank's shard: kept from FSDP's reduce-scatter, and sent through a recipe instead."""

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from typing_extensions import override

from thinwire.collectives import Group, used_here
from thinwire.integrations.training.gradients import local
from thinwire.memories import Memory
from thinwire.reducer import Bucket, Mean, Reducer, Round, Segment
from thinwire.reducer.owners import part_of
from thinwire.trace import ring_bytes


@final
class Contributions(Reducer):
    """A reducer for buckets of shards: it sends through `recipe` what was kept from FSDP's reduce-scatter.

    FSDP calls this in place of its reduce-scatter; see torch's `FSDPModule.set_custom_reduce_scatter`. It keeps what
    would have been sent, and gives zeros; then FSDP says by its hooks, in order, for which parameters that was: `take`.
    With `alone`, FSDP reduces nothing.
    """

    def __init__(self, recipe: Reducer, shapes: Mapping[str, Sequence[int]], *, alone: bool) -> None:
        self.recipe, self._alone = recipe, alone
        self._rows: Tensor | None = None  # what was kept, a row for each rank
        self._used = 0  # of a row
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._taken: dict[str, Tensor] = {}
        self._kept: set[str] = set()

    def __repr__(self) -> str:
        """Return the recipe in words."""
        return repr(self.recipe)

    @property
    @override
    def changes(self) -> bool:
        return self.recipe.changes

    @property
    @override
    def chosen_for(self) -> Set[str]:
        return self.recipe.chosen_for

    @override
    def route(self, segment: Segment, step: float = math.inf) -> Reducer:
        return self.recipe.route(self._of_whole(segment), step)

    @override
    def prepare(self, group: Group, samples: Sequence[Tensor] = ()) -> None:
        self.recipe.prepare(group, samples)

    @override
    def begin(self, at: Round) -> None:
        self.recipe.begin(at)

    def clear(self) -> None:
        """Drop what was kept and taken in a backward that raised."""
        self._rows = None
        self._taken.clear()

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for FSDP to fill."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, op: object, async_op: bool = False
    ) -> None:
        """Keep `input_tensor`, a row for each rank, and give zeros; RuntimeError if not for a mean, or too early."""
        if self._rows is not None:
            raise RuntimeError(
                "the gradients of an earlier backward were not sent, as thinwire.scatter is no longer attached to this "
                "model: call it again"
            )
        if op != dist.ReduceOp.AVG:
            asked = getattr(op, "name", "a sum times a factor")
            raise RuntimeError(
                f"FSDP asks for {asked} of {input_tensor.dtype} gradients; expected the mean, in float32 or bfloat16: "
                "leave out set_gradient_divide_factor and set_force_sum_reduction_for_comms, and choose the dtype with "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )
        self._rows, self._used = input_tensor.view(group.size(), -1), 0
        output_tensor.zero_()

    def take(self, name: str, p: nn.Parameter) -> None:
        """Take, and add up, what was kept for this parameter; RuntimeError if FSDP has reduced it otherwise."""
        rows, *others = self._shapes[name]
        width = torch.Size(others).numel()
        if self._alone or not rows * width:
            return
        if self._rows is None:
            raise RuntimeError(
                "FSDP did not use the reduce-scatter that thinwire.scatter has given it: leave out "
                "set_custom_reduce_scatter, or call scatter after it"
            )
        end = self._used + -(-rows // len(self._rows)) * width
        used_here(self._rows)  # by a copy: FSDP frees it as soon as its reduce-scatter would be done
        whole = self._rows[:, self._used : end].reshape(-1)[: rows * width].to(local(p).dtype)
        self._used = end
        if end == self._rows.shape[1]:
            self._rows = None
        self._taken[name] = self._taken[name] + whole if name in self._taken else whole

    def keep(self, name: str) -> None:
        """Note that autograd has added to this rank's shard of the gradient itself, which nobody else need know."""
        self._kept.add(name)

    def reduce(self, bucket: Bucket, at: Round) -> "Future[Mean]":
        """Send what was taken for these parameters. Afterwards the bucket holds the means of this rank's shards."""
        whole = self._whole(bucket, at.group)
        for listener in at.listeners:  # an attachment has counted an all-reduce of the shards
            listener.add("elements", whole.flat.numel() - bucket.flat.numel())
            sent = ring_bytes(whole.flat.nbytes, at.group.size()) / 2
            listener.add("dense_bytes", sent - ring_bytes(bucket.flat.nbytes, at.group.size()))
        parts = [part_of(segment, at.group.rank(), at.group.size()) for segment in whole.segments]
        own = [whole.flat[part.offset : part.offset + part.length] for part in parts]
        kept = [x for x, name in zip(bucket.views(), bucket.segments.names, strict=True) if name in self._kept]
        added = [x.clone() for x in kept if not self._alone]
        self._kept.difference_update(bucket.segments.names)

        def finish(done: "Future[Mean]") -> Mean:
            mean = done.value()  # raises what the recipe raised
            for shard, part in zip(bucket.views(), own, strict=True):
                shard.copy_(part)
            for shard, x in zip(kept, added, strict=False):
                shard.add_(x)
            return Mean(mean.finite, bucket.flat)

        return self.recipe.reduce(whole, at).then(finish)

    @override
    def memories(self) -> Sequence[Memory]:
        return self.recipe.memories()

    def memory_of(self, segment: Segment) -> Memory:
        """Return that of the whole parameter."""
        return self.recipe.memory_of(self._of_whole(segment))

    @override
    def holding(self, segment: Segment) -> Sequence[Memory]:
        return self.recipe.holding(self._of_whole(segment))

    def waiting_length(self, segment: Segment) -> int:
        """Return how many elements the whole parameter has."""
        return self._of_whole(segment).length

    def _of_whole(self, segment: Segment, offset: int = 0) -> Segment:
        shape = self._shapes[segment.name]
        return Segment(name=segment.name, offset=offset, length=torch.Size(shape).numel(), shape=shape)

    def _whole(self, bucket: Bucket, group: Group) -> Bucket:
        segments: list[Segment] = []
        for segment in bucket.segments:
            segments.append(self._of_whole(segment, sum(each.length for each in segments)))
        flat = bucket.flat.new_zeros(sum(each.length for each in segments))
        whole = Bucket(flat=flat, segments=tuple(segments))
        for segment, part, shard in zip(segments, whole.views(), bucket.views(), strict=True):
            if segment.name in self._taken:
                part.copy_(self._taken.pop(segment.name))
            elif self._alone:
                part.copy_(shard)
        return whole
