"""Bytes sent and time taken by a handle's steps: `handle.stats()`."""

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor


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
    noted: list[tuple[str, Tensor]] = field(default_factory=list)
    """Amounts on a device, not added up yet: buckets end on streams of their own, and a step waits for all of them."""
    seconds: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))
    flights: list[tuple[float, float]] = field(default_factory=list)
    waiting: Tensor | None = None
    """Sum of squares of the residuals, if it was asked for."""

    def fold_into(self, total: "_Sums") -> None:
        """Add these sums of one step to the total."""
        if self.noted:
            self.add_noted()
        total.steps += self.steps
        for name, amount in self.amounts.items():
            if name != "gradient" or self.waiting is not None:
                total.amounts[name] += amount
        for name, seconds in self.spent().items():
            total.seconds[name] += seconds
        if self.waiting is not None:
            total.waiting = self.waiting if total.waiting is None else total.waiting + self.waiting

    def add_noted(self) -> None:
        """Add up what has been noted."""
        for name in {name for name, _ in self.noted}:
            some = [amount for each, amount in self.noted if each == name]
            self.amounts[name] += torch.stack(some).sum()
        self.noted.clear()

    def spent(self) -> dict[str, float]:
        """Return the seconds spent by name. Exchanges that overlap count once."""
        return self.seconds | ({"exchange": _covered(self.flights)} if self.flights else {})

    def figures(self) -> Figures:
        """Return the figures these sums make."""
        amounts = {name: float(amount) for name, amount in self.amounts.items()}
        sent, dense = amounts.get("sent_bytes", 0.0), amounts.get("dense_bytes", 0.0)
        spent = self.spent()
        waiting = math.nan if self.waiting is None else float(self.waiting)
        return Figures(
            steps=self.steps,
            sent_bytes=sent,
            dense_bytes=dense,
            ratio=_over(sent, dense),
            density=_over(amounts.get("values", math.nan), amounts.get("elements", 0.0)),
            encode_ms=1e3 * spent.get("encode", 0.0),
            exchange_ms=1e3 * spent.get("exchange", math.nan if sent else 0.0),  # others may send what we count
            decode_ms=1e3 * spent.get("decode", 0.0),
            residual_ratio=math.sqrt(_over(waiting, amounts.get("gradient", 0.0))),
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
        self.begin(-1)

    def skip(self) -> None:
        """Note that the step is over and was not taken: what it sent counts, and the step does not."""
        with self._lock:
            self._step.steps = 0
        self.end()

    def begin_next(self) -> None:
        """Note that what follows belongs to the next step."""
        self.begin(self._number + 1)

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
                self._step.seconds[name] += end - start

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
            step = self._step
            step.add_noted()
            # A step that is skipped, as something is not finite, leaves the total as it was.
            if math.isfinite(float(step.amounts.get("gradient", math.nan))):
                step.waiting = squares(waiting())
            total = _Sums()
            self._before.fold_into(total)
            step.fold_into(total)
            return Stats(step.figures(), total.figures())


def ring_bytes(nbytes: int, world_size: int) -> float:
    """Return what each rank sends for a ring all-reduce of `nbytes`."""
    return 2 * (world_size - 1) / world_size * nbytes


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return ‖x‖² over all tensors, as a 0-dim tensor on their device."""
    norms = [torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in tensors]
    return torch.stack(norms).double().square().sum() if norms else torch.zeros(())


def _covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that lie in at least one of the intervals."""
    covered, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _over(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
