"""What happened when in a step, on this rank."""

from collections.abc import Sequence
from statistics import median
from typing import Protocol, final

import torch

from thinwire.planner.probe.clock import Stamp, stamp
from thinwire.planner.profile import Gradient
from thinwire.reducer import Bucket, Slot


class Log(Protocol):
    """What a life asks of a step that is over."""

    @property
    def period(self) -> float:
        """Seconds from one moment of the step to the same of the next."""

    @property
    def buckets(self) -> Sequence[tuple[Gradient, ...]]:
        """Gradients that came together, alike on all ranks."""

    @property
    def offsets(self) -> Sequence[float]:
        """Seconds from the step's beginning to each of these."""


@final
class StepLog:
    """Moments of one step of our own, which begins where the one `before` was over."""

    def __init__(self, device: torch.device, before: "StepLog | None") -> None:
        self._device = device
        self._first, self._began = stamp(device), before and before._last
        self._names: set[str] = set()
        self._ready: list[Stamp] = []
        self._done: list[Stamp] = []
        self._next: Stamp | None = None
        self._buckets: list[tuple[tuple[Slot, ...], int]] = []

    def add(self, bucket: Bucket) -> None:
        """Note that a bucket is there."""
        self._ready.append(stamp(self._device))
        self._buckets.append((bucket.slots, bucket.flat.element_size()))
        self._names.update(slot.name for slot in bucket.slots)

    def finish(self) -> None:
        """Note that a bucket has been exchanged."""
        self._done.append(stamp(self._device))

    def close(self) -> None:
        """Note that the next step's first bucket is there."""
        self._next = stamp(self._device)

    def holds(self, slots: tuple[Slot, ...]) -> bool:
        """Whether any of these has been seen."""
        return any(slot.name in self._names for slot in slots)

    @property
    def buckets(self) -> list[tuple[Gradient, ...]]:
        """The gradients of each bucket."""
        return [
            tuple(Gradient(name=slot.name, numel=slot.length, itemsize=size) for slot in slots)
            for slots, size in self._buckets
        ]

    @property
    def period(self) -> float:
        """Seconds from the first bucket to that of the next step."""
        assert self._next is not None
        return self._next.since(self._first)

    @property
    def offsets(self) -> list[float]:
        """Seconds from the beginning to each bucket."""
        return [ready.since(self._began or self._first) for ready in self._ready]

    @property
    def _last(self) -> Stamp | None:
        return self._done[-1] if self._done else None


def median_period(logs: Sequence[Log]) -> float:
    """Return the median of the steps' periods."""
    return median(log.period for log in logs)
