"""When each gradient is there."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from thinwire.exchanges.compat import Group
from thinwire.planner.probe.agreed import gathered, longest
from thinwire.planner.probe.clock import Stamp, stamp

_WARMUP, _REPEATS = 2, 7


class Backward(NamedTuple):
    """Seconds from the start of a step: of each gradient, of the end of backward; and what the update takes."""

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
    repeats: int = _REPEATS,
) -> Backward:
    """Run `step` (forward; returns the loss), backward and, if given, `update` a few times, and time them.

    Ranks start together and the slowest counts; the median is taken over repeats. Nothing may be exchanged in between.
    Gradients, buffers and the generators of random numbers are put back afterwards; what `update` changes is not.
    """
    with _untouched(list(parameters.values()), buffers):
        marks = [_once(step, parameters, group, update) for _ in range(_WARMUP + repeats)][_WARMUP:]
    device = next(iter(parameters.values())).device
    names = [name for name in parameters if name in marks[0].ready]
    rows = [[*(mark.ready[name] for name in names), mark.computed, mark.rest] for mark in marks]
    slowest = torch.stack([gathered(row, group, device).max(dim=0).values for row in rows]).median(dim=0).values
    *ready, computed, rest = slowest.tolist()
    return Backward(dict(zip(names, ready, strict=True)), computed, rest)


def _once(
    step: Callable[[], Tensor],
    parameters: Mapping[str, nn.Parameter],
    group: Group,
    update: Callable[[], object] | None,
) -> Backward:
    device = next(iter(parameters.values())).device
    longest(0.0, group, device)
    order, times = list[str](), list[Stamp]()

    def note(name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            order.append(name)
            times.append(stamp(device))

        return hook

    handles = [p.register_post_accumulate_grad_hook(note(name)) for name, p in parameters.items()]
    try:
        times.append(stamp(device))
        for p in parameters.values():
            p.grad = None
        step().backward()
        times.append(stamp(device))
    finally:
        for handle in handles:
            handle.remove()
    if update is not None:
        update()
    times.append(stamp(device))
    *ready, computed, end = (time.since(times[0]) for time in times[1:])
    return Backward(dict(zip(order, ready, strict=True)), computed, end - computed)


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
