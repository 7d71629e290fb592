"""Timing in turn: a disturbance of the machine then affects all alike."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from thinwire_lab.studies.kernels.work import Work

Clock = Callable[[Callable[[], object]], float]
LEAST = 3
_QUICK = 0.1  # below so many seconds, the first call of a torch expression does not count


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of the work and of its floor, pair by pair."""

    ours: list[float]
    floor: list[float]

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios."""
        return median(ours / floor for ours, floor in zip(self.ours, self.floor, strict=True))


def clock(device: torch.device) -> Clock:
    """Return a function that times a call on this device."""
    return _on_gpu if device.type == "cuda" else _on_cpu


def _on_cpu(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _on_gpu(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def interleave(work: Work, measure: Clock, *, repeats: int, budget: float) -> Times:
    """Time the work and its floor in turn, up to `repeats` times each, but for at most about `budget` seconds."""
    measure(work.run)
    measure(work.floor)
    ours: list[float] = []
    floor: list[float] = []
    end = time.perf_counter() + budget
    while len(ours) < repeats and (len(ours) < LEAST or time.perf_counter() < end):
        ours.append(measure(work.run))
        floor.append(work.passes * measure(work.floor))
    return Times(ours=ours, floor=floor)


def baseline(call: Callable[[], object], measure: Clock, budget: float) -> float:
    """Return the median seconds of up to three calls, fewer where they take `budget`; quick ones warm up first."""
    first = measure(call)
    times = [] if first < _QUICK else [first]
    while not times or (len(times) < LEAST and sum(times) < budget):
        times.append(measure(call))
    return median(times)
