"""PowerSGD: a matrix as the product of two thin factors, multiplied out by `outer_sums` of kernels/exact."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from thinwire import kernels, trace
from thinwire.checked import Count, Size, checked
from thinwire.codecs import Codec, Identity
from thinwire.collectives import Group, communication_thread, used_here
from thinwire.exchanges import AllReduce, Exchange, Exchanged
from thinwire.memories import Memory, Noted
from thinwire.payloads import Dense, Payload, Scratch, fitted
from thinwire.reducer.base import Bucket, Mean, Reducer, Round, Segment, Segments, completed, joined, note_values
from thinwire.signals import Plain
from thinwire.trace import Listener
from thinwire.waits import all_finite, on_host


@final
@checked
@dataclass(frozen=True, kw_only=True)
class PowerSGD(Reducer):
    """Sum P = M·Q over the ranks and orthonormalise it, then sum Q = Mᵀ·P; the sum is P·Qᵀ (Vogels et al. 2019).

    M is a parameter's vector as a matrix: its first dimension by all others. This rank's share of the sum is P·(Mᵀ·P)ᵀ.
    Both rounds run on the communication thread, so any number of buckets may be in flight. Between them the host looks
    whether sums are finite, so nothing is captured as a CUDA graph.

    Args:
        rank: Columns of P and Q.
        memory: Its note keeps Q from step to step.
        small: Reduces parameters below `minimum_size`, and those whose two factors would not be smaller.
        codec, exchange: How to send the factors.
        minimum_size: In elements.
    """

    rank: Count
    memory: Noted
    small: Reducer
    codec: Codec = field(default_factory=Identity)
    exchange: Exchange = field(default_factory=AllReduce)
    minimum_size: Size = 0

    @property
    @override
    def by_library(self) -> bool:
        return True

    def prepare(self, group: Group, samples: Sequence[Tensor] = ()) -> None:
        """Start the communication thread, and compile the kernels that decode."""
        communication_thread(group)
        self.small.prepare(group, samples)
        for x in samples:
            one = x.new_zeros(1, 1, dtype=torch.promote_types(x.dtype, torch.float32))
            kernels.outer_sums(one, kernels.orthonormal(one), one.clone())

    def reduce(self, bucket: Bucket, at: Round) -> "Future[Mean]":
        """Multiply now, exchange and decode on the communication thread."""
        low, rest = bucket.segments.once(self, "low rank", lambda: self._divided(bucket.segments))
        low_rank = self._low_rank(Bucket(flat=bucket.flat, segments=low), at)
        return joined([low_rank, self.small.reduce(Bucket(flat=bucket.flat, segments=rest), at)], bucket.flat)

    @override
    def memories(self) -> Sequence[Memory]:
        return tuple({id(m): m for m in (*self.small.memories(), self.memory)}.values())

    def memory_of(self, segment: Segment) -> Memory:
        """Return the memory, or for a small parameter that of `small`."""
        return self.memory if self._pays(segment) else self.small.memory_of(segment)

    @override
    def route(self, segment: Segment, step: float = math.inf) -> Reducer:
        return self if self._pays(segment) else self.small.route(segment, step)

    def _divided(self, segments: Segments) -> tuple[Segments, Segments]:
        """Return the segments for matrices of low rank, and the others."""
        low = Segments(segment for segment in segments if self._pays(segment))
        return low, Segments(segment for segment in segments if not self._pays(segment))

    def _pays(self, segment: Segment) -> bool:
        rows, columns = _matrix(segment)
        return segment.length >= self.minimum_size and self.rank * (rows + columns) < rows * columns

    def _low_rank(self, bucket: Bucket, at: Round) -> "Future[Mean]":
        if not bucket.segments:
            return completed(Mean(True, bucket.flat))
        with trace.span("encode", *at.listeners):
            work = [self._multiply(segment, g, at) for segment, g in zip(bucket.segments, bucket.views(), strict=True)]
        at.staging.need(self._scratch(work))
        told, flat = _Told(at.watch, at.scale, at.listeners), bucket.flat
        return communication_thread(at.group).submit(lambda own: Mean(self._rounds(work, own, told), flat), flat.device)

    def _scratch(self, work: Sequence["_Work"]) -> int:
        """Return what this bucket takes: copies of the factors, and one matrix after another as they reproduce it."""
        values = sum(self.rank * sum(item.matrix.shape) for item in work)
        return Scratch(longest=4.1, value=32).nbytes([item.matrix.numel() for item in work], values)

    def _multiply(self, segment: Segment, gradient: Tensor, at: Round) -> "_Work":
        own = at.seed(segment.name, shared=False)  # ranks that round alike would err alike
        x = self.memory.compensate(segment.name, gradient, at.scale, seed=own).tensor()
        matrix = x.to(torch.promote_types(x.dtype, torch.float32)).view(_matrix(segment))
        basis = self._basis(segment, matrix, at.seed(segment.name))
        seed = at.seed(segment.name, shared=self.codec.shared_seed)
        return _Work(segment.name, gradient, matrix, matrix @ basis, seed)

    def _basis(self, segment: Segment, matrix: Tensor, seed: int) -> Tensor:
        """Return the Q of the previous step, or a random one if there is none of this size."""
        note = self.memory.note(segment.name).read()
        shape = (matrix.shape[1], self.rank)
        known = None if note is None or note.numel() != shape[0] * shape[1] else note.to(matrix.dtype).view(shape)
        if known is not None and on_host(known) and bool(known.any()):
            return known
        generator = torch.Generator(device=matrix.device).manual_seed(seed)
        random = torch.randn(shape, generator=generator, dtype=matrix.dtype, device=matrix.device)
        return random if known is None or on_host(known) else torch.where(known.any(), known, random)

    def _rounds(self, work: Sequence["_Work"], group: Group, told: "_Told") -> bool:
        used_here(*(x for item in work for x in (item.gradient, item.matrix, item.product)))
        seeds = [item.seed for item in work]
        _, sums = self._sum([item.product for item in work], seeds, group, told)
        if not all(bool(product.isfinite().all()) for product in sums):
            for item in work:
                item.gradient.fill_(torch.nan)
            return not told.watch
        with trace.span("encode", *told.listeners):
            bases = [kernels.orthonormal(product) for product in sums]
            shares = [item.matrix.T @ basis for item, basis in zip(work, bases, strict=True)]
        mine, factors = self._sum(shares, [seed + 1 for seed in seeds], group, told)
        with trace.span("decode", *told.listeners):
            for item, basis, share, factor in zip(work, bases, mine, factors, strict=True):
                self._finish(item, basis, share, factor, told.scale)
            return not told.watch or all_finite(i.gradient for i in work)

    def _finish(self, item: "_Work", basis: Tensor, share: Tensor, factor: Tensor, scale: float) -> None:
        rest, own = self._write(item, basis, factor), torch.empty_like(item.matrix)
        kernels.outer_sums(own, basis, share)
        self.memory.retain([item.name], Dense(values=own.view(-1)))
        if rest is not None:  # this rank's share of it waits
            self.memory.retain([item.name], Dense(values=rest.view(-1) * -scale))
        if bool(factor.any()):
            self.memory.note(item.name).write(factor.reshape(-1).clone())

    def _write(self, item: "_Work", basis: Tensor, factor: Tensor) -> Tensor | None:
        """Write P·Qᵀ, bit-identical on every rank. Return the part that exceeds the gradient's range, or None."""
        out = item.gradient.view_as(item.matrix)
        wide = out if out.dtype == basis.dtype else torch.empty_like(item.matrix)
        kernels.outer_sums(wide, basis, factor)
        if wide is out:
            return None
        out.copy_(wide)
        if bool(out.isfinite().all()) or not bool(wide.isfinite().all()):
            return None
        out.copy_(fitted(wide, out.dtype))
        return wide - out

    def _encoded(self, matrix: Tensor, seed: int, scale: float) -> Payload:
        """Return a factor as it travels. What narrowing cuts off waits, like everything that P·Qᵀ misses."""
        signal = Plain(matrix.reshape(-1))
        signal.share = scale
        return self.codec.encode_signal(signal, seed=seed)

    def _sum(
        self, matrices: Sequence[Tensor], seeds: Sequence[int], group: Group, told: "_Told"
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the matrices as this rank sent them, and their sums over all ranks."""
        parts = [self._encoded(matrix, seed, told.scale) for matrix, seed in zip(matrices, seeds, strict=True)]
        sizes = [matrix.numel() for matrix in matrices]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        payload = type(parts[0]).assemble(parts, offsets, sum(sizes))
        note_values(payload, told.listeners)
        with trace.span("exchange", *told.listeners):
            exchanged: Exchanged = self.exchange.start(payload, group).wait()
        trace.count("sent_bytes", exchanged.sent_bytes, *told.listeners)
        like = matrices[0].new_empty
        flat = [like(sum(sizes)), like(sum(sizes))]
        exchanged.delivered.write(flat[0])
        exchanged.total.write(flat[1])
        mine, total = ([x.view_as(m) for x, m in zip(f.split(sizes), matrices, strict=True)] for f in flat)
        return mine, total


class _Told(NamedTuple):
    """What the rounds need to know. The group is the communication thread's own."""

    watch: bool
    scale: float
    listeners: Sequence[Listener]


class _Work(NamedTuple):
    """One parameter between the two rounds: its vector as a matrix M, and M·Q."""

    name: str
    gradient: Tensor
    matrix: Tensor
    product: Tensor
    seed: int


def _matrix(segment: Segment) -> tuple[int, int]:
    rows = segment.shape[0] if len(segment.shape) > 1 else 1
    return rows, segment.length // max(1, rows)
