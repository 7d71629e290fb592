"""What a codec does: it takes a vector and returns a payload."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Self, cast, final

from torch import Tensor
from typing_extensions import override

from thinwire import schedules
from thinwire.kernels import Found
from thinwire.kernels.parts import Cut, Fit
from thinwire.payloads import Narrow, Payload, Scratch, Sparse
from thinwire.payloads.numbers import fit_of, narrowed_each
from thinwire.signals import Plain, Signal, Signals


class Codec(ABC):
    """Turns a vector into a payload, frozen and stateless.

    The same vector and seed give the same payload on every rank. If the vector has a NaN or an infinity, the payload
    decodes to something that is not finite either.
    """

    shared_seed: ClassVar[bool] = False
    """Whether all ranks must draw alike. If not, each rank draws for itself, and the errors average out."""

    by_library: ClassVar[bool] = False
    """Whether a GPU decodes by a library's sums, whose bits hang on its model."""

    @property
    def scratch(self) -> Scratch:
        """Memory that encoding needs, payload included. The default is more than most codecs need."""
        return Scratch(longest=8, value=64)

    @property
    def elementwise(self) -> bool:
        """Whether each element is encoded by itself. If so, adjacent tensors may be encoded as one."""
        return False

    @abstractmethod
    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Payload:
        """Encode a vector that may not have been computed yet.

        Args:
            signal: The vector, flat; `signal.tensor()` computes it.
            seed: As in `encode`.

        Returns:
            A payload on the vector's device and of its dtype.
        """

    def encode_signals(self, signals: Signals, *, seeds: Sequence[int], cut: Cut, numel: int) -> Payload:
        """Encode vectors that travel together, each as `encode_signal` does.

        Args:
            signals: The vectors.
            seeds: One for each.
            cut: Where each lies in the whole: its offset and length.
            numel: Elements of the whole.

        Returns:
            One payload of all, with a region for each.
        """
        parts = [self._whole(signal, seed) for signal, seed in zip(signals, seeds, strict=True)]
        return type(parts[0]).assemble(parts, cut.offsets, numel)

    @final
    def encode(self, x: Tensor, *, seed: int = 0) -> Payload:
        """Encode a tensor of any shape and floating-point dtype.

        Args:
            x: The tensor.
            seed: Seed of random choices. With `shared_seed` all ranks need the same.

        Returns:
            A payload of the flat tensor, on its device and of its dtype.
        """
        signal = Plain(x.detach().reshape(-1))
        signal.shape = tuple(x.shape)
        return self._whole(signal, seed)

    def _whole(self, signal: Signal, seed: int) -> Payload:
        """Return what encodes a vector. Raises TypeError if it stands for another one: it would be written past it."""
        found: Any = self.encode_signal(signal, seed=seed)
        if (numel := getattr(found, "numel", None)) != signal.numel:
            got = f"{type(found).__name__} with numel={numel}"
            raise TypeError(f"{self} encoded {signal.numel} elements as {got}; expected numel={signal.numel}")
        return cast(Payload, found)

    @final
    def at(self, step: int) -> Self:
        """Return this codec with each schedule replaced by its value at `step`, which counts from 0."""
        if not self._scheduled:
            return self
        now = {name: schedules.resolve(getattr(self, name), step) for name in self._scheduled}
        return replace(self, **now)  # type: ignore[type-var]

    @cached_property
    def _scheduled(self) -> list[str]:
        """The names of the settings that are schedules."""
        names = (f.name for f in fields(self))  # type: ignore[arg-type]  # every concrete codec is a dataclass
        return [name for name in names if isinstance(getattr(self, name), schedules.Schedule)]


class BucketCodec(Codec):
    """A codec that takes all vectors of a bucket in a few calls."""

    @abstractmethod
    def encode_signals(self, signals: Signals, *, seeds: Sequence[int], cut: Cut, numel: int) -> Payload:
        """Encode vectors that travel together, each at its place in `numel` elements."""

    @override
    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Any:
        return self.encode_signals(Signals([signal]), seeds=[seed], cut=Cut([0], [signal.numel]), numel=signal.numel)


@lru_cache(maxsize=4096)
def kept(density: schedules.Density, numel: int) -> int:
    """Return how many of `numel` elements a density keeps: the nearest whole number, and at least one of any."""
    if isinstance(density, schedules.Schedule):
        raise TypeError("the density is a schedule; resolve it first with codec.at(step)")
    return min(numel, max(1, round(density * numel)))


def fit(signals: Signals, narrow: Narrow) -> Fit | None:
    """Return how a kernel is to write values for `side_by_side`."""
    return fit_of(narrow, signals.wide, signals.dtype, signals.share)


def side_by_side(
    signals: Signals,
    found: Found,
    runs: Sequence[int],
    narrow: Narrow,
    *,
    seeds: Sequence[int],
    cut: Cut,
    numel: int,
    slots: bool = False,
) -> Sparse:
    """Return the payload of several signals at their offsets. `runs` says how many of what was found are each one's.

    Indices are those in the whole vector; padding is a region's last one. `slots`: they are in slot order by the seeds.
    """
    counts, regions = tuple(runs), cut.regions
    values, coded = narrowed_each(found.values, counts, narrow, signals.dtype, seeds, signals.share)
    return Sparse(
        indices=found.indices,
        values=values,
        numel=numel,
        regions=regions,
        runs=counts,
        ascending=not slots,
        seeds=seeds if slots else (),
        coded=coded,
        counted=found.carried if values is found.values else None,  # narrowed, some may be 0
    )
