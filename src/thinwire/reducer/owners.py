"""A compressed reduce-scatter, for ranks that each own a part of every gradient, as in FSDP2."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from thinwire import trace
from thinwire.checked import checked
from thinwire.codecs import Codec
from thinwire.collectives import Group, all_to_all, queued, room, taking, used_here
from thinwire.exchanges import AllGather, AllReduce
from thinwire.exchanges.all_gather import places, received
from thinwire.memories import Memory
from thinwire.payloads import Dense, Payload, Scratch
from thinwire.payloads.base import widening
from thinwire.reducer.base import Bucket, Mean, Reducer, Round, Segment, Segments, completed, note_values
from thinwire.reducer.compressed import Compressed
from thinwire.signals import Plain, Signals
from thinwire.waits import noting

_RETAINING = Scratch(element=8)  # what was delivered, and its regions side by side


@final
@checked
@dataclass(frozen=True, kw_only=True)
class ToOwners(Reducer):
    """Reduce-scatter compressed gradients: compensate → cut → encode → all-to-all → decode the own part.

    One collective per bucket. Each rank owns the rows of every gradient that `part_of` names. A bucket holds what this
    rank contributes to all of them, and afterwards the mean in its own part; the other parts are then undefined. The
    memory holds what this rank has not delivered to any owner, so it is as large as the whole gradient.
    """

    memory: Memory
    codec: Codec

    @property
    @override
    def by_library(self) -> bool:
        return self.codec.by_library

    def prepare(self, group: Group, samples: Sequence[Tensor] = ()) -> None:
        """Run one step with a throw-away memory to compile the kernels."""
        Compressed(memory=self.memory, codec=self.codec).prepare(group, samples)

    def reduce(self, bucket: Bucket, at: Round) -> "Future[Mean]":
        """Encode now, decode when the exchange is done."""
        if not bucket.segments:
            return completed(Mean(True, bucket.flat))
        # A callback may outlive the group, and the group must not be freed in its own thread: keep no reference to it.
        rank, ranks, listeners, verdict = at.group.rank(), at.group.size(), at.listeners, at.verdict
        watch, staging = at.watch and verdict is None, at.staging  # with a verdict, the caller looks himself
        with taking(staging) as taken, trace.span("encode", *listeners):
            payloads = self._encode(bucket, at)
            buffers = [payload.packed for payload in payloads.values()]
            sizes = [payloads[owner].nbytes if owner in payloads else 0 for owner in range(ranks)]
            leaving = torch.cat(buffers, out=room(sum(sizes), bucket.flat.device))
            arriving = places(ranks, sizes[rank], bucket.flat.device)
        staging.need(self._scratch(bucket, payloads, at))
        for payload in payloads.values():
            note_values(payload, listeners)
        mine = payloads.get(rank)
        start = trace.now()
        with noting(verdict):
            swapped = queued(all_to_all(arriving.view(-1), leaving, sizes, at.group), bucket.flat)

        def finish(done: "Future[object]") -> Mean:
            done.value()  # raises what the collective raised
            trace.took("exchange", start, listeners)
            used_here(arriving, bucket.flat, *(x for payload in payloads.values() for x in payload.tensors()))
            trace.count("sent_bytes", sum(sizes) - sizes[rank], *listeners)
            with trace.span("decode", *listeners):
                self._retain(bucket, list(payloads.values()))
                total = None if mine is None else received(mine, arriving, verdict)
                if total is not None:
                    total.write(bucket.flat)
                finite = total is None or not watch or total.is_finite(bucket.flat)
            staging.keep(taken)
            return Mean(finite, bucket.flat)

        return swapped.then(finish)

    @override
    def memories(self) -> Sequence[Memory]:
        return (self.memory,)

    @override
    def memory_of(self, segment: Segment) -> Memory:
        return self.memory

    def _scratch(self, bucket: Bucket, payloads: Mapping[int, Payload], at: Round) -> int:
        """Return what this bucket takes: all payloads and their buffers, and the whole of what was delivered."""
        lengths, mine = bucket.segments.cut.lengths, payloads.get(at.group.rank())
        values = sum(payload.values.numel() for payload in payloads.values())
        encoding = self.codec.at(at.step).scratch.nbytes(lengths, values) + widening(bucket.flat.dtype, lengths)
        if mine is None:
            return encoding + _RETAINING.nbytes(lengths, values)
        arriving = mine.values.numel() * at.group.size()
        return encoding + max(_RETAINING.nbytes(lengths, values), mine.scratch.nbytes(lengths, values, arriving))

    def _encode(self, bucket: Bucket, at: Round) -> Mapping[int, Payload]:
        """Return a payload for each rank that owns any row."""
        codec, segments = self.codec.at(at.step), bucket.segments
        corrected = [
            self.memory.compensate(s.name, g, at.scale, seed=at.seed(s.name, shared=False)).tensor()
            for s, g in zip(segments, bucket.views(), strict=True)
        ]
        payloads = {}
        for owner in range(at.group.size()):
            parts = [part_of(segment, owner, at.group.size()) for segment in segments]
            owned = [(s, part, x) for s, part, x in zip(segments, parts, corrected, strict=True) if part.length]
            if owned:
                own = [x[part.offset - s.offset :][: part.length] for s, part, x in owned]
                signals = Signals([Plain(x, bucket.flat.dtype) for x in own])
                signals.share = at.scale if self.memory.stateful else None
                signals.shapes = [part.shape for _, part, _ in owned]
                seeds = [at.seed(f"{part.name}/{owner}", shared=codec.shared_seed) for _, part, _ in owned]
                cut = Segments(part for _, part, _ in owned).cut
                numel = bucket.flat.numel()
                payloads[owner] = codec.encode_signals(signals, seeds=seeds, cut=cut, numel=numel)
        return payloads

    def _retain(self, bucket: Bucket, payloads: Sequence[Payload]) -> None:
        """Subtract what each owner got from the residuals of whole parameters."""
        if not self.memory.stateful:
            return
        delivered = torch.zeros_like(bucket.flat, dtype=torch.promote_types(bucket.flat.dtype, torch.float32))
        for payload in payloads:
            payload.write(delivered)
        regions = tuple((segment.offset, segment.length) for segment in bucket.segments)
        values = torch.cat([delivered[offset : offset + length] for offset, length in regions])
        whole = Dense(values=values, numel=bucket.flat.numel(), regions=regions)
        self.memory.retain(bucket.segments.names, whole)


def rows_of(rows: int, owner: int, ranks: int) -> range:
    """Return which of so many rows a rank owns, as `torch.chunk` cuts them: the last may own fewer, or none."""
    each = -(-rows // ranks)
    return range(min(owner * each, rows), min((owner + 1) * each, rows))


def part_of(segment: Segment, owner: int, ranks: int) -> Segment:
    """Return the rows that a rank owns."""
    rows, *others = segment.shape
    mine, width = rows_of(rows, owner, ranks), segment.length // max(rows, 1)
    start, length = segment.offset + mine.start * width, len(mine) * width
    return replace(segment, offset=start, length=length, shape=(len(mine), *others))


def to_owners(recipe: Reducer) -> Reducer:
    """Return a recipe that sends to owners what this one sends to all, with the same memories, or raise TypeError."""
    return recipe.rebuilt(_to_owners)


def _to_owners(line: Reducer) -> Reducer:
    if not isinstance(line, Compressed):
        raise TypeError(
            f"{type(line).__name__} computes the whole mean on every rank, and here each rank needs only the part "
            "that it owns: choose a recipe that encodes and gathers, such as recipes.qsgd()"
        )
    if not isinstance(line.exchange, AllGather | AllReduce):
        raise TypeError(
            f"{type(line.exchange).__name__} merges payloads for all ranks, and here each rank needs only the part "
            "that it owns: choose a recipe with AllGather or AllReduce, such as recipes.qsgd()"
        )
    if line.memory.free or not line.memory.fields <= {"residual"}:
        raise TypeError(
            f"{type(line.memory).__name__} keeps {sorted(line.memory.fields)}, which every rank would need for the "
            "whole model, while the optimizer has only a shard: choose a recipe with error feedback alone or "
            "no memory, such as recipes.qsgd()"
        )
    return ToOwners(memory=line.memory, codec=line.codec)
