"""Measuring backward: when each gradient is ready, and what the optimizer takes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from thinwire.collectives import Group, all_reduce
from thinwire.planner.probe.measure import Stamp, gathered, longest, stamp, timed

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
    repeats: int = _REPEATS,
) -> Backward:
    """Time `step` (forward; returns the loss), backward and `update`; a collective, which restores all but its changes.

    Ranks start together, the slowest counts, and we take the fastest repeat: whatever else runs on the machine only
    ever adds. `step` must exchange nothing. `update` gets the mean gradient of all ranks, so replicas stay alike. A
    parameter without a gradient counts as ready at the end.
    """
    device = next(iter(parameters.values())).device
    with _untouched(list(parameters.values()), buffers):
        marks = [_once(step, parameters, group) for _ in range(_WARMUP + repeats)][_WARMUP:]
        rest = 0.0 if update is None else _updating(update, parameters.values(), group, device)
    rows = [[*(ready.get(name, computed) for name in parameters), computed] for ready, computed in marks]
    every = gathered([seconds for row in rows for seconds in row], group, device).view(group.size(), repeats, -1)
    slowest = every.max(dim=0).values
    *ready, computed = slowest[slowest[:, -1].argmin()].tolist()
    return Backward(dict(zip(parameters, ready, strict=True)), computed, rest)


def _updating(
    update: Callable[[], object], parameters: Iterable[nn.Parameter], group: Group, device: torch.device
) -> float:
    """Return the seconds of the fastest of a few updates, on the slowest rank."""
    for p in parameters:
        if p.grad is None or p.grad.is_sparse:
            p.grad = None
        else:
            all_reduce(p.grad.div_(group.size()), group).wait()
    return longest(min(timed(update, device) for _ in range(_UPDATES)), group, device)


def _once(
    step: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter], group: Group
) -> tuple[dict[str, float], float]:
    """Return the seconds from the start of a step to each gradient, and to the end of backward."""
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
