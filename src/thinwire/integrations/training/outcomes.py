"""What became of a bucket's means? The host looks at once; on a GPU, before the optimizer steps: one read for all."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
    """The outcome of one bucket on a GPU, where `found` (flat, float64) holds it until somebody reads.

    It has a 1 for each failed check of the verdict; then each mean's largest magnitude, which is not finite if the mean
    is not; then for each witness its place in the mean, and the parameter's value there.
    """

    found: Tensor
    verdict: Verdict
    names: tuple[str, ...]
    witnesses: Mapping[str, nn.Parameter]
    watch: bool

    def understood(self, numbers: Sequence[float]) -> Reduced:
        """Return the outcome that these numbers of `found` mean."""
        checks, first = len(self.verdict.errors), len(self.verdict.errors) + len(self.names)
        for failed, error in zip(numbers[:checks], self.verdict.errors, strict=True):
            if failed:
                return Reduced(error=error())
        peaks = dict(zip(self.names, numbers[checks:first], strict=True))
        bad = frozenset(name for name, peak in peaks.items() if self.watch and not math.isfinite(peak))
        if bad:
            return Reduced(bad=bad)
        places = zip(self.witnesses.items(), numbers[first::2], numbers[first + 1 :: 2], strict=True)
        return Reduced(
            nothing=bool(peaks) and not any(peaks.values()),
            witnesses=tuple(Witness(name, p, int(i), value) for (name, p), i, value in places if peaks[name]),
        )


def read(bucket: Bucket, parameters: Mapping[str, nn.Parameter], questions: Questions, *, finite: bool) -> Reduced:
    """Return the outcome of a bucket that holds means now."""
    if finite and not any(questions):
        return Reduced()
    means = {segment.name: mean for segment, mean in zip(bucket.segments, bucket.views(), strict=True)}
    if not finite:
        return Reduced(
            bad=frozenset(name for name, mean in means.items() if not mean.isfinite().all()) or frozenset(means)
        )
    found = (_witness(name, means[name], parameters[name]) for name in means.keys() & questions.witnesses)
    witnesses = tuple(witness for witness in found if witness is not None)
    flat = bucket.flat  # of a shard without rows, empty; usually a sample is enough
    nothing = questions.nothing and flat.numel() > 0 and not (flat[:: flat.numel() // 4096 + 1].any() or flat.any())
    return Reduced(nothing=nothing, witnesses=witnesses)


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
    """Return what `read` does, without waiting. With `watch`, find out too which means are not finite."""
    flags, means = verdict.flags, {s.name: x for s, x in zip(bucket.segments, bucket.views(), strict=True) if s.length}
    names = tuple(means) if watch or questions.witnesses else ()
    found = [] if flags is None else [flags.double()]
    if names:  # in one launch, and NaN is the largest of all
        found.append(torch.stack(torch._foreach_norm(list(means.values()), math.inf)).double())
    witnesses = {name: parameters[name] for name in names if name in questions.witnesses}
    for name, p in witnesses.items():
        place = means[name].abs().argmax().view(1)
        found.append(torch.cat([place.double(), in_memory_order(p, p).index_select(0, place).double()]))
    return Unread(torch.cat(found), verdict, names, witnesses, watch) if found else Reduced()


def settled(outcomes: Sequence[Reduced | Unread]) -> list[Reduced]:
    """Read what is not read yet. The host waits once, for all of it."""
    unread = [outcome for outcome in outcomes if isinstance(outcome, Unread)]
    if not unread:
        return list(outcomes)  # type: ignore[arg-type]  # none is Unread
    numbers = iter(_numbers([outcome.found for outcome in unread]))
    return [o.understood(next(numbers)) if isinstance(o, Unread) else o for o in outcomes]


def _numbers(found: Sequence[Tensor]) -> Sequence[Sequence[float]]:
    joined = torch.cat([x.to(found[0].device, non_blocking=True) for x in found]).cpu()
    return [x.tolist() for x in joined.split([x.numel() for x in found])]
