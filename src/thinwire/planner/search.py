"""The fastest way to exchange a step's gradients."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.checked import checked
from thinwire.planner.candidates import Candidate
from thinwire.planner.profile import Bucket, Profile
from thinwire.planner.timeline import State, Work, finished, passed, step_seconds, works

_SIZES = 8  # how many thresholds on a tensor's size are tried in a bucket
_MANY = 64  # paths; beyond this we drop paths hardly better than another, because every bucket multiplies them
_SLACK = 2e-3  # of a step: the most that dropping them may cost


@dataclass(frozen=True, kw_only=True)
class _Option:
    choice: Mapping[str, str]
    works: tuple[Work, ...]
    compressed: int  # elements


class _Path(NamedTuple):
    state: State
    taken: tuple[_Option, ...]


@checked
def fastest(profile: Profile, candidates: Sequence[Candidate]) -> dict[str, str]:
    """Return the fastest choice.

    In each bucket, tensors from some size on go to one candidate and the rest to "dense". All such paths through the
    buckets are followed, and a path is dropped if another is at least as good in every respect. If too many remain,
    those that another nearly beats are dropped too, which may cost 0.2 % of a step.

    Args:
        profile: What was measured.
        candidates: What may be chosen.

    Returns:
        A candidate's name per parameter. Parameters that gain nothing are left out, and stay uncompressed.
    """
    names = [candidate.name for candidate in candidates if candidate.name in profile.costs]
    shortest = min(step_seconds(profile, name) for name in ("dense", *names))
    slack = _SLACK * shortest / max(1, len(profile.timeline.buckets))
    paths = [_Path(State(), ())]
    for bucket in profile.timeline.buckets:
        options = list(_options(bucket, names, profile))
        grown = [
            _Path(passed(path.state, bucket.ready, option.works), (*path.taken, option))
            for path in paths
            for option in options
        ]
        paths = _kept(grown, 0.0)
        paths = paths if len(paths) < _MANY else _kept(paths, slack)
    best = min(paths, key=lambda path: finished(path.state, profile))
    choice = {name: given for option in best.taken for name, given in option.choice.items()}
    return _relaxed(profile, choice)


def _options(bucket: Bucket, names: Sequence[str], profile: Profile) -> Iterator[_Option]:
    sizes = sorted({g.numel for g in bucket.gradients})
    sizes = sizes[:: max(1, -(-len(sizes) // _SIZES))]
    for name, size in (("dense", 0), *((name, size) for name in names for size in sizes)):
        choice = {g.name: name if g.numel >= size else "dense" for g in bucket.gradients}
        large = sum(g.numel for g in bucket.gradients if choice[g.name] != "dense")
        yield _Option(choice=choice, works=tuple(works(bucket, choice, profile)), compressed=large)


def _kept(paths: Iterable[_Path], slack: float) -> list[_Path]:
    """Drop each path if another is no later by more than `slack`. Of equal ones, the least compressed stays."""
    kept: list[_Path] = []
    for path in sorted(paths, key=lambda path: (path.state, sum(option.compressed for option in path.taken))):
        wire, decoded = path.state.wire + slack, path.state.decoded + slack  # those before it are no later
        if not any(other.state.wire <= wire and other.state.decoded <= decoded for other in kept):
            kept.append(path)
    return kept


def _relaxed(profile: Profile, choice: dict[str, str]) -> dict[str, str]:
    """Return the choice without compressing sizes (all tensors of one together) that gain nothing; smallest first."""
    limit = step_seconds(profile, choice)
    for bucket in profile.timeline.buckets:
        mine = [g for g in bucket.gradients if choice[g.name] != "dense"]
        whole = choice | {g.name: "dense" for g in mine}
        if mine and step_seconds(profile, whole) <= limit:
            choice = whole
            continue
        for size in sorted({g.numel for g in mine}):
            tried = choice | {g.name: "dense" for g in mine if g.numel == size}
            if step_seconds(profile, tried) > limit:
                break
            choice = tried
    return choice
