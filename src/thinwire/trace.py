"""Where the time and the bytes of a step go: who listens is told, and `handle.stats()` adds it up for one handle."""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Listener(Protocol):
    """Takes in what happens. It may be told from any thread."""

    def took(self, name: str, start: float, end: float) -> None:
        """Take in a span, in `time.perf_counter` seconds."""

    def add(self, name: str, amount: float | Tensor) -> None:
        """Take in an amount. A tensor, 0-dim, is read when it is wanted, so that a GPU need not be waited for."""


@dataclass(eq=False)  # two that have recorded the same are still two
class Recorder:
    """What was recorded: spans as (name, start, end) in `time.perf_counter` seconds, and totals by name."""

    spans: list[tuple[str, float, float]] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)

    def took(self, name: str, start: float, end: float) -> None:
        """Keep the span."""
        self.spans.append((name, start, end))

    def add(self, name: str, amount: float | Tensor) -> None:
        """Add to the total."""
        with _counting:
            self.totals[name] = self.totals.get(name, 0.0) + float(amount)

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self.spans.clear()
        self.totals.clear()

    def seconds(self, name: str, since: float = 0.0) -> float:
        """Return the seconds spent in spans called `name`, counting only what lies after `since`."""
        return sum(end - max(start, since) for label, start, end in self.spans if label == name and end > since)


now = time.perf_counter
"""What time is it, in seconds?"""

_listeners: list[Listener] = []
_counting = threading.Lock()  # collectives end in threads of their own


@contextmanager
def listen(recorder: Recorder) -> Iterator[Recorder]:
    """Record what this process does while the context is open."""
    _listeners.append(recorder)
    try:
        yield recorder
    finally:
        _listeners.remove(recorder)


@contextmanager
def span(name: str, *own: Listener) -> Iterator[None]:
    """Time the enclosed block under `name`, for all registered listeners and the caller's `own`."""
    start = now()
    try:
        yield
    finally:
        took(name, start, own)


def took(name: str, start: float, own: Sequence[Listener] = ()) -> None:
    """End a span called `name` that began when it was `now`, in this or another thread."""
    end = now()
    for listener in (*_listeners, *own):
        listener.took(name, start, end)


def count(name: str, amount: float, *own: Listener) -> None:
    """Add `amount` to the total called `name`, for all registered listeners and the caller's `own`."""
    for listener in (*_listeners, *own):
        listener.add(name, amount)


@final
@dataclass(frozen=True, kw_only=True)
class Figures:
    """What this rank sent in some steps, and how long that took; NaN means unknown.

    Args:
        steps: How many steps these are.
        sent_bytes: Bytes sent, without the transport's headers.
        dense_bytes: Bytes that uncompressed gradients would have taken.
        ratio: `sent_bytes` over `dense_bytes`.
        density: Values sent, over elements of gradients. Padding does not count.
        encode_ms, decode_ms: Milliseconds of work, added up over threads; on a GPU, the host's.
        exchange_ms: Milliseconds during which at least one exchange was running. It overlaps with backward.
        residual_ratio: ‖residual‖ / ‖gradient‖, both of this rank. Gradients are measured from the first call of
            `stats()` on. Over several steps it is √(Σ‖residual‖² / Σ‖gradient‖²), over the steps after which `stats()`
            was called. If a step has several reductions, its ‖gradient‖² is the sum of theirs.
    """

    steps: int = 0
    sent_bytes: float = 0.0
    dense_bytes: float = 0.0
    ratio: float = math.nan
    density: float = math.nan
    encode_ms: float = 0.0
    exchange_ms: float = 0.0
    decode_ms: float = 0.0
    residual_ratio: float = math.nan

    def __repr__(self) -> str:
        """Return the figures in words, and only that nothing was exchanged if so: most are not known then."""
        if math.isnan(self.density) and not self.dense_bytes:
            return f"Figures(steps={self.steps}, nothing exchanged)"
        return f"Figures({', '.join(f'{each.name}={getattr(self, each.name)!r}' for each in fields(self))})"


class Stats(NamedTuple):
    """The figures of the latest step, and those of all steps so far."""

    step: Figures
    total: Figures


@dataclass
class _Sums:
    """What is added up. Tensors stay on their device until somebody asks, so counting never makes the host wait."""

    steps: int = 0
    amounts: defaultdict[str, Any] = field(default_factory=partial(defaultdict, float))
    """By name, seconds of spans among them; "waiting": the sum of squares of the residuals, if it was asked for."""
    noted: list[tuple[str, Tensor]] = field(default_factory=list)
    """Amounts on a device, not added up yet: buckets end on streams of their own, and a step waits for all of them."""
    flights: list[tuple[float, float]] = field(default_factory=list)
    """When exchanges began and ended. Those that overlap count once."""

    def fold_into(self, total: "_Sums") -> None:
        if self.noted:
            self.add_noted()
        total.steps += self.steps
        for name, amount in self.amounts.items():
            if name != "gradient" or "waiting" in self.amounts:
                total.amounts[name] = total.amounts[name] + amount
        if self.flights:
            total.amounts["exchange"] += _covered(self.flights)

    def add_noted(self) -> None:
        by_name: defaultdict[str, list[Tensor]] = defaultdict(list)
        for name, amount in self.noted:
            by_name[name].append(amount)
        for name, some in by_name.items():
            self.amounts[name] += torch.stack(some).sum()
        self.noted.clear()

    def figures(self) -> Figures:
        amounts = {name: float(amount) for name, amount in self.amounts.items()}
        sent, dense = amounts.get("sent_bytes", 0.0), amounts.get("dense_bytes", 0.0)
        return Figures(
            steps=self.steps,
            sent_bytes=sent,
            dense_bytes=dense,
            ratio=_over(sent, dense),
            density=_over(amounts.get("values", math.nan), amounts.get("elements", 0.0)),
            encode_ms=1e3 * amounts.get("encode", 0.0),
            exchange_ms=1e3 * amounts.get("exchange", math.nan if sent else 0.0),  # others may send what we count
            decode_ms=1e3 * amounts.get("decode", 0.0),
            residual_ratio=math.sqrt(_over(amounts.get("waiting", math.nan), amounts.get("gradient", 0.0))),
        )


@final
class Meter:
    """Adds up what the reducers and boundaries of one handle report. A `trace.Listener`.

    `watched`: whether somebody has asked, so that norms are worth taking.
    """

    def __init__(self) -> None:
        self.watched = False
        self._lock = threading.Lock()  # collectives end in threads of their own
        self._number = 0
        self._step, self._before = _Sums(), _Sums()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model starts from zero."""
        return Meter, ()

    def begin(self, number: int) -> None:
        """Note that what follows belongs to step `number`."""
        with self._lock:
            if number != self._number:
                self._step.fold_into(self._before)
                self._step, self._number = _Sums(), number

    def end(self) -> None:
        """Note that the step is over, so that the next is another one even if it has the same number."""
        self.begin(self._number + 1)

    def skip(self) -> None:
        """Note that the step is over and was not taken: what it sent counts, and the step does not."""
        with self._lock:
            self._step.steps = 0
        self.end()

    def gradient(self, flat: Tensor, world_size: int, scale: float) -> None:
        """Note this rank's gradient (flat) before it is reduced, and `scale`, by which it enters the memory."""
        with self._lock:
            self._step.steps, amounts = 1, self._step.amounts
            amounts["elements"] += flat.numel()
            amounts["dense_bytes"] += ring_bytes(flat.nbytes, world_size)
        if self.watched:
            self.add("gradient", squares([flat]) * scale**2)

    def took(self, name: str, start: float, end: float) -> None:
        """Note what took from `start` to `end`, in `time.perf_counter` seconds."""
        with self._lock:
            if name == "exchange":
                self._step.flights.append((start, end))
            else:
                self._step.amounts[name] += end - start

    def add(self, name: str, amount: float | Tensor) -> None:
        """Add to what this step has of `name`. It counts as a step from the first amount on."""
        with self._lock:
            self._step.steps = 1
            if isinstance(amount, Tensor):
                self._step.noted.append((name, amount))
            else:
                self._step.amounts[name] += amount

    def stats(self, waiting: Callable[[], Sequence[Tensor]] = tuple) -> Stats:
        """Return the figures so far; `waiting` gives the residuals now."""
        self.watched = True
        with self._lock:
            self._step.add_noted()
            # A step that is skipped, as something is not finite, leaves the total as it was.
            if math.isfinite(float(self._step.amounts.get("gradient", math.nan))):
                self._step.amounts["waiting"] = squares(waiting())
            step, total = _Sums(), _Sums()
            self._step.fold_into(step)
            self._before.fold_into(total)
            step.fold_into(total)
            return Stats(step.figures(), total.figures())


def ring_bytes(nbytes: int, world_size: int) -> float:
    """Return what each rank sends for a ring all-reduce of `nbytes`."""
    return 2 * (world_size - 1) / world_size * nbytes


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return ‖x‖² over all tensors, as a 0-dim tensor on their device."""
    norms = [torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in tensors]
    return torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64, device="cpu")


def _covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that lie in at least one of the intervals."""
    covered, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _over(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
