"""What became of a bucket's means? The host looks at once; on a GPU, when the next step begins: one read for all."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from thinwire.integrations.training.gradients import in_memory_order
from thinwire.reducer import Bucket
from thinwire.waits import Verdict


class Witness(NamedTuple):
    """One element of a parameter, where its gradient is largest (flat), and its value before any step."""

    name: str
    parameter: nn.Parameter
    place: int
    value: float

    @property
    def moved(self) -> bool:
        """Whether the parameter has changed since."""
        return float(in_memory_order(self.parameter, self.parameter)[self.place]) != self.value


class Reduced(NamedTuple):
    """The outcome of a bucket: which means are not finite, whether all were zeros, and `error`, if not raised yet."""

    bad: frozenset[str] = frozenset()
    nothing: bool = False
    witnesses: tuple[Witness, ...] = ()
    error: Exception | None = None


class Questions(NamedTuple):
    """What to find out about means: whether all are zeros, where nobody waits for that; which need a witness."""

    nothing: bool
    witnesses: frozenset[str]


class Unread(NamedTuple):
    """The outcome of one bucket on a GPU, where `found` (flat) holds it until somebody reads.

    It has a 1 for each failed check of the verdict; then the largest magnitude of all means, which is not finite if one
    of them is not; then for each witness its place in the mean, the parameter's value and the mean's there.
    """

    found: Tensor
    verdict: Verdict
    bucket: Bucket
    witnesses: Mapping[str, nn.Parameter]
    watch: bool

    def understood(self, numbers: Sequence[float]) -> Reduced:
        """Return the outcome that these numbers of `found` mean. Means are looked at again if one is not finite."""
        errors = self.verdict.errors
        for failed, error in zip(numbers, errors, strict=False):
            if failed:
                return Reduced(error=error())
        peaks, rest = numbers[len(errors) :][:1], numbers[len(errors) + 1 :]  # a bucket without elements has none
        if self.watch and not all(map(math.isfinite, peaks)):
            return Reduced(bad=_not_finite(self.bucket))
        each = zip(self.witnesses.items(), rest[::3], rest[1::3], rest[2::3], strict=True)
        return Reduced(
            nothing=peaks == [0],
            witnesses=tuple(Witness(name, p, int(i), value) for (name, p), i, value, mean in each if mean),
        )


def read(bucket: Bucket, parameters: Mapping[str, nn.Parameter], questions: Questions, *, finite: bool) -> Reduced:
    """Return the outcome of a bucket that holds means now."""
    if not finite:
        return Reduced(bad=_not_finite(bucket))
    means = dict(zip(bucket.segments.names, bucket.views(), strict=True))
    found = (_witness(name, means[name], parameters[name]) for name in means.keys() & questions.witnesses)
    witnesses = tuple(witness for witness in found if witness is not None)
    flat = bucket.flat  # of a shard without rows, empty; usually a sample is enough
    nothing = questions.nothing and flat.numel() > 0 and not (flat[:: flat.numel() // 4096 + 1].any() or flat.any())
    return Reduced(nothing=nothing, witnesses=witnesses)


def _not_finite(bucket: Bucket) -> frozenset[str]:
    """Return which means are not finite; all of them if they have been overwritten since."""
    names = bucket.segments.names
    return frozenset(n for n, x in zip(names, bucket.views(), strict=True) if not x.isfinite().all()) or frozenset(
        names
    )


def _witness(name: str, mean: Tensor, parameter: nn.Parameter) -> Witness | None:
    place = int(mean.abs().argmax()) if mean.numel() else 0
    if not mean.numel() or not bool(mean[place]):
        return None
    return Witness(name, parameter, place, float(in_memory_order(parameter, parameter)[place]))


def look(
    bucket: Bucket,
    parameters: Mapping[str, nn.Parameter],
    questions: Questions,
    verdict: Verdict,
    *,
    watch: bool,
) -> Reduced | Unread:
    """Return what `read` does, without waiting. With `watch`, find out too whether all means are finite."""
    flags, found = verdict.flags, []
    if flags is not None:
        found.append(flags)
    if bucket.flat.numel() and (watch or questions.witnesses):  # NaN is the largest of all
        found.append(torch.linalg.vector_norm(bucket.flat, math.inf).view(1))
    witnesses = {}
    for name, mean in zip(bucket.segments.names, bucket.views(), strict=True) if questions.witnesses else ():
        if name in questions.witnesses and mean.numel():
            witnesses[name] = p = parameters[name]
            place = mean.abs().argmax().view(1)
            value, peak = in_memory_order(p, p).index_select(0, place), mean.index_select(0, place)
            found += [x.double() for x in (place, value, peak)]
    return Unread(torch.cat(found), verdict, bucket, witnesses, watch) if found else Reduced()


@final
class Sent:
    """What was found, on its way to the host, which then waits for that alone, and not for what is queued later."""

    def __init__(self, outcomes: Sequence[Reduced | Unread]) -> None:
        self.outcomes = list(outcomes)
        found = [outcome.found for outcome in outcomes if isinstance(outcome, Unread)]
        self._lengths = [x.numel() for x in found]
        joined = torch.cat([x.to(found[0].device, non_blocking=True) for x in found])
        self._there, self._ready = to_host(joined)

    def read(self) -> list[Reduced]:
        """Return the outcomes."""
        self._ready()
        numbers = iter(x.tolist() for x in self._there.split(self._lengths))
        return [o.understood(next(numbers)) if isinstance(o, Unread) else o for o in self.outcomes]


def to_host(x: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Return a tensor in main memory that will hold `x`, and what waits for that."""
    if not x.is_cuda:
        return x, lambda: None
    there, copied = torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu"), torch.cuda.Event()
    there.copy_(x, non_blocking=True)
    copied.record(torch.cuda.current_stream(x.device))
    return there, copied.synchronize
