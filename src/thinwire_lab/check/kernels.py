"""Does a kernel do on this device what its reference does, at every size?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from thinwire import kernels
from thinwire.kernels import Kernel
from thinwire_lab.check.cases import CASES, Case
from thinwire_lab.check.findings import first_line
from thinwire_lab.check.material import Kit, Near, Trial, difference

KERNELS: Mapping[str, Kernel[..., Any]] = MappingProxyType(
    {name: found for name, found in vars(kernels).items() if isinstance(found, Kernel)}
)
"""Every kernel, by name."""
_SMALL = 10_000  # up to which every content is tried, and the CPU asked as well
_EVERY_DTYPE = (63, 1000)  # a GPU compiles for each dtype
QUICK = (1, 2, 63, 1000, 8209, (1 << 17) + 1)
SIZES = (*QUICK, (1 << 20) + 7, 1 << 24, 1 << 27)
_CPU = torch.device("cpu")
_CERTAIN = (1 << 17) + 1  # up to which time does not matter
_ACROSS = Near(relative=1e-3, absolute=1e-4)  # of the reference on a GPU to that on the CPU


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far to go. seconds: what a size may take, judging by the one before it. share: of memory, for one process."""

    sizes: tuple[int, ...]
    seconds: float = 20.0
    share: float = 1.0


@dataclass
class _Run:
    """One kernel's check under way: which implementations ran, whether any was compared, and how far."""

    kernel: Kernel[..., Any]
    case: Case
    device: torch.device
    ran: set[str] = field(default_factory=set)
    compared: bool = False
    largest: int = 0
    stopped: str = ""

    def wrong(self, limits: Limits) -> str:
        """Return what is wrong at the first size where something is; empty if nothing is."""
        before = 0
        for size in limits.sizes:
            self.stopped = self._obstacle(size, before, limits)
            if not self.stopped and (found := self._wrong_at(size)):
                return found
            if self.stopped:
                break
            before = self.largest = size
        return ""

    def _obstacle(self, size: int, before: int, limits: Limits) -> str:
        """Return why a size is left out, if it is; judged by another run of the one before, which need not compile."""
        if size * self.case.nbytes > limits.share * _free_bytes(self.device):
            return f"{size:,} may take more memory than there is"
        if size <= _CERTAIN or not before:
            return ""
        start = time.perf_counter()
        self._wrong_at(before)
        seconds = (time.perf_counter() - start) * size / before
        return f"{size:,} would take long" if seconds > limits.seconds else ""

    def _wrong_at(self, size: int) -> str:
        for kit in self._kits(size):
            where = f"at {size} of {str(kit.dtype).removeprefix('torch.')}, {kit.content}"
            try:
                for trial in self.case.make(kit, size):
                    if found := self._differs(trial, across=size < _SMALL):
                        return f"{where}: {found}"
            except torch.OutOfMemoryError:
                self.stopped = f"{size:,} took more memory than there is"
                return ""
            except Exception as error:
                return f"{where}: {first_line(error)}"
        return ""

    def _kits(self, size: int) -> Iterator[Kit]:
        for dtype in self.case.dtypes if size in _EVERY_DTYPE else self.case.dtypes[:1]:
            for content in self.case.contents if size < _SMALL else self.case.contents[:1]:
                yield Kit(self.device, dtype, content)

    def _differs(self, trial: Trial, *, across: bool) -> str:
        found, expected = (trial.run(call, self.device) for call in (self._called, self.kernel.reference))
        if said := self._compare(trial, found, expected, self.case.bound(self.device)):
            return said
        if not across or self.device == _CPU:
            return ""
        self.compared = True
        there = trial.run(self.kernel.reference, _CPU)
        said = self._compare(trial, expected, there, _ACROSS)
        return said and f"the reference on {self.device.type} is not that on the CPU: {said}"

    def _compare(self, trial: Trial, found: list[Any], expected: list[Any], near: Near) -> str:
        return self.case.alike(trial, found, expected) if self.case.alike else difference(found, expected, near)

    def _called(self, *args: Any) -> Any:
        self.ran.add(implementation(self.kernel, *args))
        self.compared |= self.kernel.on(self.kernel.backend(*args)) is not self.kernel.reference
        return self.kernel(*args)


def implementation(kernel: Kernel[..., Any], *args: Any) -> str:
    """Return what runs for these arguments: triton, numba or torch."""
    chosen: Callable[..., Any] = kernel.on(kernel.backend(*args))
    module = chosen.__module__.rpartition(".")[2]
    return {"triton": "triton", "cpu": "numba"}.get(module, "torch")


def check_kernel(name: str, device: torch.device, limits: Limits, figures: dict[str, Any]) -> tuple[bool | None, str]:
    """Compare a kernel with its reference on this device, from one element on."""
    run = _Run(KERNELS[name], CASES[name], device)
    wrong = run.wrong(limits)
    figures |= {"ran": sorted(run.ran), "largest": run.largest, "stopped": run.stopped}
    reach = f"1 to {run.largest:,} elements" + (f"; {run.stopped}" if run.stopped else "")
    alone = "" if run.compared else "the reference itself runs here, and did not fail: "
    return False if wrong else True if run.compared else None, wrong or alone + reach


def _free_bytes(device: torch.device) -> int:
    """Return how much memory may be used."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what earlier sizes took is free too
        return int(0.8 * torch.cuda.mem_get_info(device)[0])
    return int(0.4 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
