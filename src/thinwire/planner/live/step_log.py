"""Steps as a policy sees them: which choice each one uses, and when things happened on this rank."""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeVar, final

import torch

from thinwire.planner.probe.measure import Stamp, stamp
from thinwire.planner.profile import Gradient, Profile
from thinwire.reducer import Bucket, Segment

Choice = Mapping[str, str]
"""The candidate's name for each tensor that is compressed."""

_T = TypeVar("_T")


class Log(NamedTuple):
    """When things happened in a step that is over: from when `since` to when `until` it counts.

    `parts`: the segments that came together, the same on all ranks, and the bytes of an element; when they were
    `ready`, counted from when it `began`.
    """

    since: Stamp
    until: Stamp
    began: Stamp
    ready: Sequence[Stamp]
    parts: Sequence[tuple[Sequence[Segment], int]]

    @property
    def period(self) -> float:
        """Seconds from one step to the next."""
        return self.until.since(self.since)

    @property
    def buckets(self) -> list[tuple[Gradient, ...]]:
        """The gradients of each part."""
        return [tuple(Gradient(name=s.name, numel=s.length, itemsize=size) for s in some) for some, size in self.parts]

    @property
    def offsets(self) -> list[float]:
        """Seconds from the beginning of the step to each part."""
        return [ready.since(self.began) for ready in self.ready]


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


def in_words(choice: Choice) -> str:
    """Return in words how many tensors use which candidate."""
    counts = Counter(choice.values()).items()
    return " and ".join(f"{n} tensor{'s' * (n > 1)} by {name}" for name, n in counts) or "uncompressed"


@final
class StepLog:
    """Notes when things happen in a step that we reduce ourselves. It `began` where the one before ended."""

    def __init__(self, device: torch.device, began: Stamp | None = None) -> None:
        self._device, self._first = device, stamp(device)
        self._began = began or self._first
        self._names: set[str] = set()
        self._ready: list[Stamp] = []
        self._done: list[Stamp] = []
        self.parts: list[tuple[Sequence[Segment], int]] = []

    def add(self, bucket: Bucket) -> None:
        """Note that a bucket has arrived."""
        self._ready.append(stamp(self._device))
        self.parts.append((bucket.segments, bucket.flat.element_size()))
        self._names.update(segment.name for segment in bucket.segments)

    def finish(self) -> None:
        """Note that a bucket has been exchanged."""
        self._done.append(stamp(self._device))

    def close(self) -> Log:
        """Return what was noted, now that the next step's first bucket has arrived."""
        return Log(self._first, stamp(self._device), self._began, self._ready, self.parts)

    def next(self) -> "StepLog":
        """Return the log of the step that begins where this one ended."""
        return StepLog(self._device, self._done[-1] if self._done else None)

    def holds(self, segments: tuple[Segment, ...]) -> bool:
        """Whether any of these has arrived in this step."""
        return any(segment.name in self._names for segment in segments)


def median_period(logs: Sequence[Log]) -> float:
    """Return the median of the steps' periods."""
    return median(log.period for log in logs)
