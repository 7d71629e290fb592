"""Measuring together: times on a device, and figures shared by all ranks, and when gradients are ready."""

import socket
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn

from thinwire.collectives import Group, all_gather, all_gather_plain, all_reduce
from thinwire.waits import refuse_captured


class Stamp(Protocol):
    """A moment in a device's work. Taking a stamp does not wait for the device; reading it does."""

    def since(self, earlier: Any) -> float:
        """Return the seconds since an earlier stamp of the same device."""


def stamp(device: torch.device) -> Stamp:
    """Return the moment at which the device will have done what the current stream holds now."""
    return _Event(device) if device.type == "cuda" else _Now()


def refuse_measuring() -> None:
    """Raise RuntimeError while a CUDA graph is captured."""
    refuse_captured(
        "steps and links are measured", "attach or plan before the capture", "what is captured does not run"
    )


def synchronize(device: torch.device) -> None:
    """Wait for the device. Raises RuntimeError while a CUDA graph is captured."""
    refuse_measuring()
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


@contextmanager
def together(group: Group, device: torch.device) -> Iterator[None]:
    """Within, ranks begin together. If it fails on some ranks, raises RuntimeError on the others; a collective."""
    longest(0.0, group, device)
    failed: list[Exception] = []
    try:
        yield
    except Exception as error:  # the user's, so it may be of any kind
        failed.append(error)
    told = all_gather_plain([f"{type(error).__name__}: {error}" for error in failed], group)
    if failed:
        raise failed[0]
    for rank, errors in enumerate(told):
        if errors:
            raise RuntimeError(f"a step to be measured has failed on rank {rank}: {errors[0]}")


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


_WARMUP, _REPEATS, _UPDATES = 2, 7, 3


class Backward(NamedTuple):
    """Seconds from the start of a step to each gradient and to the end of backward, and those of the update."""

    ready: dict[str, float]
    computed: float
    rest: float


def probe_backward(
    step: Callable[[], Tensor],
    parameters: Mapping[str, nn.Parameter],
    buffers: Sequence[Tensor],
    group: Group,
    *,
    update: Callable[[], object] | None = None,
) -> Backward:
    """Time `step` (forward; returns the loss), backward and `update`; a collective, which restores all but its changes.

    Ranks start together, the slowest counts, and we take the fastest repeat: whatever else runs on the machine only
    ever adds. `step` must exchange nothing. `update` gets the mean gradient of all ranks, so replicas stay alike. A
    parameter without a gradient counts as ready at the end.
    """
    device = next(iter(parameters.values())).device
    with _untouched(list(parameters.values()), buffers):
        marks = [_once(step, parameters, group) for _ in range(_WARMUP + _REPEATS)][_WARMUP:]
        rest = 0.0 if update is None else _updating(update, parameters.values(), group, device)
    rows = [[*(ready.get(name, computed) for name in parameters), computed] for ready, computed in marks]
    every = gathered([seconds for row in rows for seconds in row], group, device).view(group.size(), _REPEATS, -1)
    slowest = every.max(dim=0).values
    *ready, computed = slowest[slowest[:, -1].argmin()].tolist()
    return Backward(dict(zip(parameters, ready, strict=True)), computed, rest)


def _updating(
    update: Callable[[], object], parameters: Collection[nn.Parameter], group: Group, device: torch.device
) -> float:
    """Return the seconds of the fastest of a few updates, on the slowest rank."""
    dense = [float(p.grad is not None and not p.grad.is_sparse) for p in parameters]
    there = gathered(dense, group, device).any(dim=0).tolist()  # other ranks may have used other parameters
    for p, somewhere in zip(parameters, there, strict=True):
        if not somewhere:
            p.grad = None
            continue
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        all_reduce(p.grad.div_(group.size()), group).wait()
    with together(group, device):
        took = min(timed(update, device) for _ in range(_UPDATES))
    return longest(took, group, device)


def _once(
    step: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter], group: Group
) -> tuple[dict[str, float], float]:
    """Return the seconds from the start of a step to each gradient, and to the end of backward."""
    device = next(iter(parameters.values())).device
    order, times = list[str](), list[Stamp]()

    def note(name: str, _: Tensor) -> None:
        order.append(name)
        times.append(stamp(device))

    handles = [p.register_post_accumulate_grad_hook(partial(note, name)) for name, p in parameters.items()]
    try:
        with together(group, device):
            times.append(stamp(device))
            for p in parameters.values():
                p.grad = None
            _loss(step()).backward()
            times.append(stamp(device))
    finally:
        for handle in handles:
            handle.remove()
    *ready, computed = (time.since(times[0]) for time in times[1:])
    return dict(zip(order, ready, strict=True)), computed


def _loss(returned: object) -> Tensor:
    if not (isinstance(returned, Tensor) and returned.numel() == 1 and returned.requires_grad):
        got = f"a tensor of {tuple(returned.shape)}" if isinstance(returned, Tensor) else type(returned).__name__
        raise TypeError(f"step returned {got}; expected the loss: one number, with a gradient")
    return returned


@contextmanager
def _untouched(parameters: Sequence[nn.Parameter], buffers: Sequence[Tensor]) -> Iterator[None]:
    gradients, values = [p.grad for p in parameters], [b.detach().clone() for b in buffers]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient
            for buffer, value in zip(buffers, values, strict=True):
                buffer.detach().copy_(value)
