"""Measuring together: times on a device, and figures shared by all ranks, so that all decide the same."""

import socket
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor

from thinwire.collectives import Group, all_gather


class Stamp(Protocol):
    """A moment in a device's work. Taking a stamp does not wait for the device; reading it does."""

    def since(self, earlier: Any) -> float:
        """Return the seconds since an earlier stamp of the same device."""


def stamp(device: torch.device) -> Stamp:
    """Return the moment at which the device will have done what the current stream holds now."""
    return _Event(device) if device.type == "cuda" else _Now()


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds in which a device does what `run` asks of it."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def gathered(figures: Sequence[float], group: Group, device: torch.device | None = None) -> Tensor:
    """Return every rank's figures, a row (len(figures),) per rank, in float64 on the CPU. A collective."""
    mine = torch.tensor(list(figures), dtype=torch.float64, device=device).view(torch.uint8)
    rows = mine.new_empty(group.size() * mine.numel())
    all_gather(rows, mine, group).wait()
    return rows.cpu().view(torch.float64).view(group.size(), len(figures))


def hosts(group: Group, device: torch.device) -> list[float]:
    """Return a number for each rank's host. A collective."""
    mine = float(zlib.crc32(socket.gethostname().encode()))
    return gathered([mine], group, device)[:, 0].tolist()


def longest(seconds: float, group: Group, device: torch.device | None = None) -> float:
    """Return the largest value of all ranks. A collective, and so also a way to start together."""
    return float(gathered([seconds], group, device).max())


@final
@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Ranks that measure the same things, and the device of their tensors."""

    group: Group
    device: torch.device

    def mean(self, figures: Sequence[float]) -> list[float]:
        """Return the means over ranks."""
        return gathered(figures, self.group, self.device).mean(dim=0).tolist()

    def most(self, figures: Sequence[float]) -> list[float]:
        """Return the largest of all ranks."""
        return gathered(figures, self.group, self.device).max(dim=0).values.tolist()


@final
class _Now:
    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def since(self, earlier: "_Now") -> float:
        return self.seconds - earlier.seconds


@final
class _Event:
    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))

    def since(self, earlier: "_Event") -> float:
        self._event.synchronize()
        return 1e-3 * earlier._event.elapsed_time(self._event)
