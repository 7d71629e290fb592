"""What is in a parameter's .grad? A mean that was reduced before, and what this rank has added since.

A gradient that accumulates over several reductions holds both. Only the second part must still be sent. Where DDP
makes no buckets, `buckets` does.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives import Group
from thinwire.reducer import Bucket, Segment


@final
class Gradients:
    """Keeps track of every .grad: `reduced` names those that hold a mean, `added` those that this rank has added to.

    `means` has copies of those means that it has added to.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self.added: set[str] = set()
        self.reduced: set[str] = set()
        self._sent: dict[str, _Sent] = {}
        self._arrived: list[_Sent] = []
        self._closed: list[_Sent] = []  # of a reduction that is done, and nothing has been added since
        self.means: dict[str, Tensor] = {}

    def gone(self, name: str) -> bool:
        """Before backward adds to this .grad: return whether its mean is gone (None or zeros), else copy it."""
        if name not in self.reduced:
            return False
        held, there = self._parameters[name].grad, False
        if held is not None:
            values = held._values() if held.is_sparse else local(held)
            without_rows = not held.is_sparse and not values.numel()  # a shard without rows is zero for ever
            there = bool(values.any()) or without_rows or self._arrived_as_zeros(name, held)
        if held is None or not there:
            self.forget([name])
            return True
        if name not in self.means and not held.is_sparse:
            self.means[name] = in_memory_order(held, self._parameters[name]).clone()
        return False

    @property
    def there(self) -> set[str]:
        """The names of those that had a gradient when their mean arrived."""
        return {name for name, sent in self._sent.items() if name in sent.written}

    def take_out(self, bucket: Bucket) -> list[tuple[Tensor, Tensor]]:
        """Subtract the means from the gradients in this bucket. Return (gradient, mean) pairs to add back later."""
        pairs = zip(bucket.segments.names, bucket.views(), strict=True)
        found = [(gradient, self.means[name]) for name, gradient in pairs if name in self.means]
        for gradient, mean in found:
            gradient.sub_(mean)
        return found

    def arrived(self, bucket: Bucket, *, idle: bool = False) -> None:
        """Note that a bucket has means, which are yet to be written to each .grad.

        `idle`: this rank has not used all of the parameters. What no rank has used, DDP does not write to.
        """
        written, gradient = {}, None
        for name in bucket.segments.names:
            if (found := self._parameters[name].grad) is not None:
                written[name], gradient = found._version, found
        memory = bucket.flat.untyped_storage()._cdata
        views = gradient is not None and gradient.untyped_storage()._cdata == memory
        unused = {}
        if idle:
            means = zip(bucket.segments.names, bucket.views(), strict=True)
            unused = {name: mean.any() for name, mean in means if name in written and name not in self.added}
        sent = _Sent(bucket.flat, bucket.flat._version, written, views, unused)
        self._sent.update(dict.fromkeys(bucket.segments.names, sent))
        self._arrived.append(sent)

    def note_reduced(self, names: Collection[str]) -> None:
        """Note that each of these .grad now holds exactly a mean."""
        if self.means:
            self.forget(names)
        self.reduced.update(names)
        self.added.difference_update(names)
        self._closed, self._arrived = self._arrived, []

    def settle_views(self) -> None:
        """Note what has been written to by now: backward is about to add to gradients that are views of buckets."""
        for sent in self._closed:
            sent.intact = sent.flat._version == sent.version
        self._closed.clear()

    def forget(self, names: Iterable[str]) -> None:
        """Forget these means: an optimizer has taken them, or they are gone."""
        self.reduced.difference_update(names)
        for name in self.means.keys() & names:
            del self.means[name]

    def _arrived_as_zeros(self, name: str, held: Tensor) -> bool:
        """Whether a .grad of zeros was not zeroed, but its mean was zeros: the mean is written once at most."""
        sent = self._sent.get(name)
        if sent is None or name not in sent.written:
            return False
        if name in sent.unused:
            return not sent.unused[name]
        if sent.views:
            return sent.flat._version == sent.version if sent.intact is None else sent.intact
        return 0 <= held._version - sent.written[name] <= (not is_dtensor(held))

    def changed(self, name: str) -> bool:
        """Whether a mean was written to after it arrived, but by DDP, once. A GradScaler leaves no trace."""
        sent, held = self._sent.get(name), self._parameters[name].grad
        if sent is None or held is None or name not in sent.written:
            return False
        return held._version - sent.written[name] > (not is_dtensor(held) and not sent.views)


@final
@dataclass(eq=False)
class _Sent:
    """A bucket of means, and how often it and each gradient were written to by then.

    `views`: whether gradients are views of it, as with `gradient_as_bucket_view`, until DDP lays them out anew.
    `unused`: whether means that this rank had no part in have anything but zeros. `intact`: whether nothing else wrote
    to it before backward added to a gradient; None until then.
    """

    flat: Tensor
    version: int
    written: Mapping[str, int]
    views: bool
    unused: Mapping[str, Tensor]
    intact: bool | None = None


FSDP1 = "FullyShardedDataParallel (FSDP1) has its gradients in flat parameters: shard with fully_shard (FSDP2) instead"


def is_fsdp1(model: nn.Module) -> bool:
    """Whether any module of a model is FSDP1's. To import the class would take seconds."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    return any(kind.__name__ == "FullyShardedDataParallel" for kind in kinds)


def islands(parameters: Iterable[Any]) -> list[Group]:
    """Return the groups of ranks that hold the DTensors among these, one for each dimension of their meshes."""
    meshes = {p.device_mesh: None for p in parameters if is_dtensor(p)}
    groups = {tuple(dist.get_process_group_ranks(g)): g for mesh in meshes for g in mesh.get_all_groups()}
    return [group for ranks, group in groups.items() if len(ranks) > 1]


def reshard(model: nn.Module) -> None:
    """Have FSDP2 hold shards alone: an evaluation leaves some parameters whole, which do not follow them."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # who has not imported it has no such modules
    for module in model.modules() if fsdp else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def is_dtensor(x: object) -> bool:
    """Whether this is a DTensor, as `fully_shard` makes of parameters. To import the class would take a second."""
    return hasattr(x, "to_local")


def local(x: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, detached and in the same memory. Any other tensor stays as it is."""
    if not is_dtensor(x):
        return x
    held: Any = x
    with torch.no_grad():  # or DTensor would record how to differentiate this, which takes five times as long
        shard: Tensor = held.to_local().detach()
    return shard


def in_memory_order(x: Tensor, p: nn.Parameter) -> Tensor:
    """Flatten `x`, shaped like `p`, in the memory order of `p`, which is also that of its gradient in a bucket."""
    x, part = local(x.detach()), local(p)
    stride = _stride_in_memory(part)
    if x.stride() != stride:
        x = torch.empty_strided(part.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
    return x.as_strided((part.numel(),), (1,), x.storage_offset())


def shape_in_memory(p: Tensor) -> tuple[int, ...]:
    """Return the sizes of `p` in memory order, the outermost first: a transposed matrix has those of what is stored."""
    part = local(p)
    if part.is_contiguous():
        return tuple(part.shape)
    strides = _stride_in_memory(part)
    return tuple(size for _, size in sorted(zip(strides, part.shape, strict=True), key=itemgetter(0), reverse=True))


def segment_of(p: nn.Parameter, name: str) -> Segment:
    """Return the segment of a parameter, or of this rank's shard of it, in a bucket of its own."""
    return Segment(name=name, offset=0, length=local(p).numel(), shape=shape_in_memory(p))


def shaped_like(p: Tensor, flat: Tensor) -> Tensor:
    """Undo `in_memory_order`, as a view."""
    part = local(p)
    return flat.as_strided(part.shape, _stride_in_memory(part), flat.storage_offset())


def _stride_in_memory(x: Tensor) -> tuple[int, ...]:
    """Return the strides of this parameter's gradient: its own where it has no gaps, and else row by row."""
    gapless = x.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(x)
    return x.stride() if gapless else torch.empty(x.shape, dtype=x.dtype, device="meta").stride()


def put_in_place(bucket: Bucket, parameters: Mapping[str, nn.Parameter]) -> None:
    """Write the means in this bucket to each dense .grad that is there."""
    for segment, mean in zip(bucket.segments, bucket.views(), strict=True):
        p = parameters[segment.name]
        if p.grad is not None and not p.grad.is_sparse:
            local(p.grad).copy_(shaped_like(p, mean))


def accumulator(p: nn.Parameter) -> Any:
    """Return autograd's node that adds to `p.grad`. Unlike hooks on `p`, torch.autograd.grad does not run it."""
    with torch.enable_grad():
        node = p.view_as(p).grad_fn
    assert node is not None
    return node.next_functions[0][0]


BYTES = 25 << 20
"""Of a bucket, as in DDP."""


@final
@dataclass(frozen=True)
class GradientBucket:
    """One flat tensor for the gradients of some parameters, one after another; of a DTensor, for this rank's shard."""

    flat: Tensor
    parameters: list[nn.Parameter]
    views: list[Tensor]

    @classmethod
    def of(cls, parameters: list[nn.Parameter]) -> Self:
        """Return a bucket for parameters of one dtype and device."""
        parts = [local(p).detach() for p in parameters]
        flat = parts[0].new_empty(sum(part.numel() for part in parts))
        pieces = zip(flat.split([part.numel() for part in parts]), parts, strict=True)
        views = [shaped_like(part, piece) for piece, part in pieces]
        return cls(flat, parameters, views)

    def fill(self) -> None:
        """Copy the gradients in; a missing one is zeros."""
        for p, view in zip(self.parameters, self.views, strict=True):
            view.zero_() if p.grad is None else view.copy_(local(p.grad))

    def hand_back(self, used: Set[Tensor]) -> None:
        """Copy the means to where gradients are. Among the `used`, make those that are missing."""
        for p, view in zip(self.parameters, self.views, strict=True):
            if p.grad is None and p in used:
                p.grad = torch.empty_like(p).detach()
            if p.grad is not None:
                local(p.grad).copy_(view)


def own_length(p: nn.Parameter) -> int:
    """Return how many elements this rank holds: of a DTensor, those of its shard."""
    return local(p).numel()


def buckets(
    parameters: Sequence[nn.Parameter], nbytes: int = 0, length: Callable[[nn.Parameter], int] = own_length
) -> Iterator[GradientBucket]:
    """Group parameters of one dtype and device, last first, up to `nbytes` (25 MiB) of `length` elements each."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for p in reversed(parameters):
        held = kinds.setdefault((p.dtype, p.device), [])
        held.append(p)
        if sum(length(p) * p.element_size() for p in held) >= (nbytes or BYTES):
            yield GradientBucket.of(kinds.pop((p.dtype, p.device)))
    yield from (GradientBucket.of(held) for held in kinds.values())


def used_anywhere(parameters: Sequence[nn.Parameter], group: Group, error: Exception | None = None) -> Set[Tensor]:
    """Return those for which any rank has a gradient. A collective. The mean cannot tell, because it may be zero.

    Raises this rank's `error`, or RuntimeError if another rank has one.
    """
    found = [error is not None, *(p.grad is not None for p in parameters)]
    if parameters:
        flags = torch.tensor(found, dtype=torch.int32, device=parameters[0].device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group)
        found = flags.tolist()
    if found[0]:
        raise error or RuntimeError("another rank has refused to reduce gradients: see its error")
    return {p for p, flag in zip(parameters, found[1:], strict=True) if flag}
