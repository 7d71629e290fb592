"""Whole steps of a worker: encode with a memory, decode what all workers sent."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.codecs import Codec, HashedSlots, SampledThreshold
from thinwire.memories import ErrorFeedback, Memory, MomentumCorrection
from thinwire.payloads import Sparse
from thinwire_lab.studies.kernels.by_torch import MOMENTUM, compensated, exact, masked
from thinwire_lab.studies.kernels.scattering import runs_of
from thinwire_lab.studies.kernels.work import Case, Place, Work


@dataclass
class Encoding:
    """The steps of one parameter, each with a new gradient."""

    place: Place
    memory: Memory
    codec: Codec
    step: int = field(default=0, init=False)

    def __call__(self) -> Tensor:
        """Take a step and return the payload."""
        signal = self.memory.compensate("weight", self.place.gradient(self.step), 1.0, seed=self.step)
        payload = self.codec.encode_signal(signal, seed=self.step)
        buffer = payload.to_buffer()
        self.memory.retain(["weight"], payload)
        self.memory.commit()
        self.step += 1
        return buffer

    def kept(self) -> tuple[Tensor, ...]:
        """Return the memory's content."""
        return tuple(tensor for fields in self.memory.state().values() for tensor in fields.values())


def _encode(memory: Callable[[], Memory], codec: Callable[[float], Codec], passes: int) -> Callable[[Place], Work]:
    """Return a function that measures steps; they must read and write at least `passes` float32 vectors."""

    def make(place: Place) -> Work:
        def fresh() -> Encoding:
            return Encoding(place, memory(), codec(place.density))

        def outcome() -> tuple[object, ...]:
            steps = fresh()
            return steps(), steps(), *(tensor.clone() for tensor in steps.kept())

        residual, gradient = place.gradient(1).clone(), place.gradient()
        velocity = torch.zeros_like(residual) if passes > 3 else None
        on_gpu = place.device.type == "cuda"

        def floor() -> None:
            if passes == 2 or on_gpu:
                residual.copy_(gradient)
            else:
                residual.add_(gradient)
            if velocity is not None and not on_gpu:
                velocity.copy_(gradient)

        return Work(
            run=fresh(),
            floor=floor,
            passes=passes / 2 if on_gpu else 1.0,  # a copy makes two
            outcome=outcome,
            others={
                "torch": lambda: exact(compensated(residual, gradient, velocity), place.picks),
                "mask": lambda: masked(compensated(residual, gradient, velocity), place.picks),
            },
            moved=passes * residual.nbytes + 8 * place.picks,
        )

    return make


def _decode(place: Place) -> Work:
    indices, values, runs = runs_of(place)
    parts = zip(indices.split(runs), values.split(runs), strict=True)
    payloads = [Sparse(indices=index, values=value, numel=place.numel) for index, value in parts]
    rows = torch.stack([payload.to_buffer() for payload in payloads])
    mine, out = payloads[0], torch.empty(place.numel, device=place.device)
    del payloads, parts

    def run() -> Tensor:
        mine.from_buffers(rows).write(out)
        return out

    def by_torch() -> Tensor:
        out.zero_()
        for index, value in zip(indices.split(runs), values.split(runs), strict=True):
            out.index_add_(0, index, value)
        return out

    return Work(
        run=run,
        floor=out.zero_,
        reset=lambda: out.fill_(torch.nan),
        others={"torch": by_torch},
        moved=rows.nbytes + out.nbytes,
    )


def _momentum() -> Memory:
    return MomentumCorrection(momentum=MOMENTUM)


def _halved() -> Memory:
    return ErrorFeedback(dtype=torch.bfloat16)


def _threshold(density: float) -> Codec:
    return SampledThreshold(density=density)


def _halved_threshold(density: float) -> Codec:
    return SampledThreshold(density=density, values=torch.bfloat16)


def _slots(density: float) -> Codec:
    return HashedSlots(density=density)


_TOPK = "exact topk with error feedback"

CASES = {
    "encode_ef": Case(
        make=_encode(ErrorFeedback, _threshold, 3), group="steps", floor="residual.add_(g)", baseline=_TOPK, sweep=True
    ),
    "encode_ef_dragonn": Case(
        make=_encode(ErrorFeedback, _slots, 3),
        most=1 << 24,
        group="steps",
        floor="residual.add_(g)",
        baseline=_TOPK,
        sweep=True,
    ),
    "encode_ef_bf16": Case(
        make=_encode(_halved, _halved_threshold, 2),
        most=1 << 24,
        group="steps",
        floor="copy_(g)",
        baseline=_TOPK,
        sweep=True,
    ),
    "encode_ef_momentum": Case(
        make=_encode(_momentum, _threshold, 5),
        most=1 << 24,
        group="steps",
        floor="residual.add_(g) and copy_(u)",
        baseline=_TOPK,
        sweep=True,
    ),
    "decode": Case(
        make=_decode, group="scatter", floor="zero_()", baseline="zero_, index_add_ per rank", sweep=True, workers=True
    ),
}
