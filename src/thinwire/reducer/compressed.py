"""The reducer that compresses a bucket's gradients with one memory, one codec and one exchange."""

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import final

import torch
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from thinwire import kernels, trace
from thinwire.checked import checked
from thinwire.codecs import Codec
from thinwire.collectives import Group, Staging, taking, used_here
from thinwire.exchanges import AllGather, Exchange, Exchanged, all_gather
from thinwire.kernels import replay
from thinwire.kernels.parts import Parts
from thinwire.kernels.replay import Piece, Replays
from thinwire.memories import Memory
from thinwire.payloads import Dense, Payload
from thinwire.payloads.base import widening
from thinwire.payloads.numbers import fit_of
from thinwire.reducer.base import Bucket, Mean, Reducer, Round, Seeds, Segment, completed
from thinwire.signals import Signals
from thinwire.waits import Verdict, noting


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Compressed(Reducer):
    """Compress with one memory, codec and exchange: compensate → encode → exchange → decode, and retain the rest.

    It takes one collective per bucket.
    """

    memory: Memory
    codec: Codec
    exchange: Exchange = field(default_factory=AllGather)

    @property
    @override
    def by_library(self) -> bool:
        return self.codec.by_library

    def prepare(self, group: Group, samples: Sequence[Tensor] = ()) -> None:
        """Prepare the exchange, and run one step with a throw-away memory to compile the kernels."""
        self.exchange.prepare(group)
        for x in samples:
            one = Bucket(flat=x.clone(), segments=[Segment(name="", offset=0, length=x.numel())])
            payload = replace(self, memory=self.memory.blank()).encode(one, 0, own=[0], shared=[0])
            self.exchange.check(payload)  # DDP does not survive an error in its backward
            payload.from_buffers(payload.packed[None]).write(torch.empty_like(x))

    def encode(self, bucket: Bucket, step: int, *, own: Sequence[int], shared: Sequence[int]) -> Payload:
        """Compress for a receiver that takes part in no exchange, such as a parameter server, and retain the rest.

        Args:
            bucket: The gradients.
            step: The step's number, from 0.
            own: Seeds of this sender, one for each segment.
            shared: Seeds that the receiver draws alike, one for each segment.

        Returns:
            What to send: all of it is delivered.
        """
        names, codec = bucket.segments.names, self.codec.at(step)
        signals = self.memory.compensate_each(names, bucket.views(), 1.0, own)
        share = 1.0 if self.memory.stateful else None
        payload = encoded(codec, signals, bucket, seeds=shared if codec.shared_seed else own, share=share)
        _ = payload.packed  # first: a payload may be a view of the residual
        self.memory.retain(names, payload)
        return payload

    def reduce(self, bucket: Bucket, at: Round) -> "Future[Mean]":
        """Encode now, decode when the exchange is done."""
        if not bucket.segments:
            return completed(Mean(True, bucket.flat))
        if self.codec.elementwise and not self.memory.stateful:
            bucket = Bucket(flat=bucket.flat, segments=bucket.segments.coalesced)
        # A callback may outlive the group, and the group must not be freed in its own thread: keep no reference to it.
        watch, scale, listeners, staging, verdict = at.watch, at.scale, at.listeners, at.staging, at.verdict
        start = trace.now()
        (payload, carried), captured = self._encode(bucket, at)
        staging.need(self._scratch(bucket, payload, at))
        seeds = Seeds(at, bucket.segments.names, shared=True)
        followed = nullcontext() if captured is None else captured.lane.followed()
        noted = nullcontext() if verdict is None else noting(verdict)
        with followed, noted, taking(staging) as taken:
            if captured is not None:
                used_here(bucket.flat)
                carried = carried.clone() if isinstance(carried, Tensor) else carried  # a replay writes it anew
            if self.exchange.transport == "all_gather":
                _ = payload.packed  # here, so that it counts as encoding
            trace.took("encode", start, listeners)
            start = trace.now()
            for listener in listeners:
                listener.add("values", carried)
            future = self.exchange.start(payload, at.group, keep=self.memory.stateful, seeds=seeds)

        def finish(done: "Future[Exchanged]") -> Mean:
            exchanged = done.value()  # raises what the exchange raised
            trace.took("exchange", start, listeners)
            trace.count("sent_bytes", exchanged.sent_bytes, *listeners)
            begin = trace.now()
            if bucket.flat.is_cuda:
                used_here(bucket.flat, *(exchanged.tensors() if captured is None else ()))
            if verdict is None:
                finite = self._decode(exchanged, bucket, watch=watch, scale=scale)
            else:
                finite = self._decode_unread(exchanged, bucket, scale, verdict, captured, staging)
            trace.took("decode", begin, listeners)
            staging.keep(taken)
            return Mean(finite, bucket.flat)

        return future.then(finish)

    @override
    def memories(self) -> Sequence[Memory]:
        return (self.memory,)

    @override
    def memory_of(self, segment: Segment) -> Memory:
        return self.memory

    def _encode(self, bucket: Bucket, at: Round) -> "tuple[tuple[Payload, int | Tensor], Piece | None]":
        """Return the payload and how many values travel, and what stands for the memory that a replay overwrites."""
        codec, segments = self.codec.at(at.step), bucket.segments
        own = Seeds(at, segments.names, shared=False)
        signals = self.memory.compensate_each(segments.names, bucket.views(), at.scale, own)
        signals.share = at.scale if self.memory.stateful else None
        seeds, counted = Seeds(at, segments.names, shared=True) if codec.shared_seed else own, bool(at.listeners)

        def packed(seeds: Sequence[int]) -> tuple[tuple[Payload, int | Tensor], Signals]:
            computed = signals.again()
            payload = encoded(codec, computed, bucket, seeds=seeds, share=signals.share)
            carried = payload.carried() if counted else 0
            return payload.last(carried, values=self.memory.stateful), computed

        repeats = at.verdict is not None and self._repeats and replay.possible(bucket.flat.device)
        place = signals.place if repeats else None
        if place is None:
            payload = encoded(codec, signals, bucket, seeds=seeds, share=signals.share)
            return (payload, payload.carried() if counted else 0), None
        replays = self._replays(bucket, "encode", at.staging)
        (found, computed), captured = replays.run((codec, counted, place), packed, seeds)
        signals.settle(computed)
        return found, captured

    @property
    def _repeats(self) -> bool:
        """Whether a GPU's work may be captured: not of sums of whole vectors, a launch or two, nor between rounds."""
        summed = self.exchange.transport == "all_reduce" and self.memory.stateful and not self.codec.elementwise
        return summed or self.exchange.transport == "all_gather"

    def _replays(self, bucket: Bucket, name: str, staging: Staging) -> Replays:
        """Return the pieces of this bucket's work that may be repeated."""
        alone, device = name == "encode", bucket.flat.device
        return bucket.segments.once(self, name, lambda: staging.counting(Replays(device, name, alone=alone)))

    def _scratch(self, bucket: Bucket, payload: Payload, at: Round) -> int:
        """Return what this bucket takes. It stays the same for as many values."""
        case = payload.values.numel(), at.group.size(), bucket.flat.dtype
        found: dict[Hashable, int] = bucket.segments.once(self, "scratch", dict)
        if case not in found:
            found.clear()
            found[case] = self.most(bucket, payload, at.step, at.group.size())
        return found[case]

    def most(self, bucket: Bucket, payload: Payload, step: int, ranks: int = 1) -> int:
        """Return an upper bound on the bytes that a bucket takes while it is reduced.

        Args:
            bucket: The gradients.
            payload: What is sent of them.
            step: The step's number, from 0.
            ranks: How many ranks' payloads arrive.
        """
        lengths, values = bucket.segments.cut.lengths, payload.values.numel()
        arriving = self.exchange.arriving(values, ranks)
        rules = (self.codec.at(step).scratch, self.memory.scratch, payload.scratch, self.exchange.scratch)
        own = payload.nbytes if self.memory.stateful else 0  # otherwise it may be a view of the gradients
        most = max(own, *(rule.nbytes(lengths, values, arriving) for rule in rules))
        return most + widening(bucket.flat.dtype, lengths)

    def _decode(self, exchanged: Exchanged, bucket: Bucket, *, watch: bool, scale: float) -> bool:
        total = exchanged.summed
        assert total is not None  # whoever waits reads it at once
        if self.memory.stateful:  # first: payloads may be views of the gradients that the total overwrites
            self.memory.retain(bucket.segments.names, exchanged.delivered)
        total.write(bucket.flat)
        if not watch or total.is_finite(bucket.flat):
            return True
        return self.memory.stateful and bool(self._clamp(total, bucket, scale))

    def _decode_unread(
        self,
        exchanged: Exchanged,
        bucket: Bucket,
        scale: float,
        verdict: Verdict,
        captured: Piece | None,
        staging: Staging,
    ) -> bool:
        """Write the mean, while the host does not wait: it looks at the verdict and at the mean when the step ends."""

        def decoded(_: Sequence[int]) -> Verdict:
            found = Verdict()
            delivered = exchanged.delivered
            if captured is not None:  # said once, not at every replay
                used_here(*exchanged.tensors())
                delivered = replace(delivered)  # type: ignore[type-var]  # a dataclass, without what it has computed
            if exchanged.buffers is None:
                total = exchanged.total
            else:
                total = all_gather.received(delivered, exchanged.buffers, found)
            if self.memory.stateful:
                delivered.settle(partial(self.memory.retain, bucket.segments.names), total, bucket.flat)
                self._clamp(total, bucket, scale)
            else:
                total.write(bucket.flat)
            return found.moved(replay.lasting)

        if captured is None:
            verdict.take_in(decoded(()))
        else:
            arrived = exchanged.total.values if exchanged.buffers is None else exchanged.buffers
            key = captured, scale, arrived.shape, arrived.data_ptr(), bucket.flat.data_ptr()
            verdict.take_in(self._replays(bucket, "decode", staging).run(key, decoded)[0])
        return True

    def _clamp(self, total: Payload, bucket: Bucket, scale: float) -> Tensor | bool:
        """Write a finite sum that exceeds the gradient's range, clamped to it; keep this rank's share of the rest.

        Values of the gradient's dtype never exceed it, but codes and spectra are summed in float32. Does not wait for a
        GPU. Returns whether the sum is finite; False where the gradient's range is as wide, as that of bfloat16 is.
        """
        flat = bucket.flat
        bounded = total.values.dtype == flat.dtype and not total.transformed  # see `payloads.fitted`
        fit = fit_of(None, torch.float32, flat.dtype, 1.0)
        if bounded or fit is None or fit.bound is None:
            return False
        wide, cut = torch.empty_like(flat, dtype=torch.float32), bucket.segments.cut
        total.write(wide)
        finite, minus_overflow = kernels.clamped(Parts(flat, cut), Parts(wide, cut), scale, fit.bound)
        self.memory.retain(bucket.segments.names, Dense(values=minus_overflow, numel=flat.numel(), regions=cut.regions))
        return finite


def encoded(codec: Codec, signals: Signals, bucket: Bucket, *, seeds: Sequence[int], share: float | None) -> Payload:
    """Encode the signals of a bucket. Raises TypeError if the codec never computed one."""
    signals.share, signals.shapes = share, bucket.segments.shapes
    payload = codec.encode_signals(signals, seeds=seeds, cut=bucket.segments.cut, numel=bucket.flat.numel())
    if not signals.computed:  # retain would subtract from unwritten memory
        raise TypeError(f"{codec} never computed its signal; call signal.tensor() or signal.select(...)")
    return payload
