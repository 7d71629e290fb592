"""Steps as a policy sees them: which choice each one uses, and when things happened on this rank."""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from statistics import median
from typing import NamedTuple, Protocol, TypeVar, final

import torch

from thinwire.planner.candidates import DENSE
from thinwire.planner.probe.measure import Stamp, stamp
from thinwire.planner.profile import Gradient, Profile
from thinwire.reducer import Bucket, Segment

Choice = Mapping[str, str]
"""The candidate's name for each tensor that is compressed."""

_T = TypeVar("_T")


class Log(Protocol):
    """What a policy asks of a step that is over."""

    @property
    def period(self) -> float:
        """Seconds from one step to the next."""

    @property
    def buckets(self) -> Sequence[tuple[Gradient, ...]]:
        """Gradients that came together, the same on all ranks."""

    @property
    def offsets(self) -> Sequence[float]:
        """Seconds from the beginning of the step to each bucket."""


class Decided(NamedTuple):
    """The choice for the next step; if it is a new decision, the reason, and the profile that it rests on."""

    choice: Choice
    reason: str = ""
    profile: Profile | None = None


Policy = Generator[Decided, Log, _T]
"""A generator: it yields each step's choice, is sent that step's log, and returns its findings."""


def steps(decided: Decided, count: int) -> Policy[list[Log]]:
    """Go through `count` steps by this choice, and return their logs. Only the first step brings the reason."""
    logs = []
    for index in range(count):
        logs.append((yield Decided(decided.choice) if index else decided))
    return logs


def compressed(choice: Choice) -> Choice:
    """Return the choice without uncompressed tensors."""
    return {name: given for name, given in choice.items() if given != DENSE.name}


def in_words(choice: Choice) -> str:
    """Return in words how many tensors use which candidate."""
    counts = Counter(choice.values()).items()
    return " and ".join(f"{n} tensor{'s' * (n > 1)} by {name}" for name, n in counts) or "uncompressed"


@final
class StepLog:
    """When things happened in a step that we reduce ourselves. It begins where the one `before` ended."""

    def __init__(self, device: torch.device, before: "StepLog | None") -> None:
        self._device = device
        self._first, self._began = stamp(device), before._done[-1] if before and before._done else None
        self._names: set[str] = set()
        self._ready: list[Stamp] = []
        self._done: list[Stamp] = []
        self._next: Stamp | None = None
        self._buckets: list[tuple[tuple[Segment, ...], int]] = []

    def add(self, bucket: Bucket) -> None:
        """Note that a bucket has arrived."""
        self._ready.append(stamp(self._device))
        self._buckets.append((bucket.segments, bucket.flat.element_size()))
        self._names.update(segment.name for segment in bucket.segments)

    def finish(self) -> None:
        """Note that a bucket has been exchanged."""
        self._done.append(stamp(self._device))

    def close(self) -> None:
        """Note that the next step's first bucket has arrived."""
        self._next = stamp(self._device)

    def next(self) -> "StepLog":
        """Return the log of the step that begins where this one ended."""
        return StepLog(self._device, self)

    def holds(self, segments: tuple[Segment, ...]) -> bool:
        """Whether any of these has arrived in this step."""
        return any(segment.name in self._names for segment in segments)

    @property
    def buckets(self) -> list[tuple[Gradient, ...]]:
        """The gradients of each bucket."""
        return [
            tuple(Gradient(name=segment.name, numel=segment.length, itemsize=size) for segment in segments)
            for segments, size in self._buckets
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


def median_period(logs: Sequence[Log]) -> float:
    """Return the median of the steps' periods."""
    return median(log.period for log in logs)
