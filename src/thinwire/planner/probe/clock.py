"""When things happen on a device."""

import time
from typing import Any, Protocol, final

import torch


class Stamp(Protocol):
    """A moment in a device's work; taking one does not wait for the device, reading one does."""

    def since(self, earlier: Any) -> float:
        """Return the seconds from an earlier stamp of the same device to this one."""


def stamp(device: torch.device) -> Stamp:
    """Return the moment at which the device has done what it has been told on the current stream."""
    return _Event(device) if device.type == "cuda" else _Now()


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
