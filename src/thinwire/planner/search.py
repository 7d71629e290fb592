"""The fastest way to exchange a step's gradients."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.checked import checked
from thinwire.planner.candidates import Candidate
from thinwire.planner.profile import Bucket, Gradient, Profile
from thinwire.planner.timeline import State, Work, finished, passed, step_seconds, work

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
    """Return the fastest choice, a candidate's name per parameter; a size that gains nothing stays uncompressed.

    In each bucket, tensors from some size on go to one candidate and the rest to "dense". We follow all such paths
    through the buckets and drop a path if another is at least as good in every respect. If too many paths remain, we
    also drop those that another nearly beats, which may cost 0.2 % of a step.
    """
    slack = _slack(profile, candidates)
    paths = [_Path(State(), ())]
    for bucket in profile.timeline.buckets:
        options = list(_options(bucket, candidates, profile))
        paths = _undominated(
            (
                _Path(passed(path.state, bucket.ready, option.works), (*path.taken, option))
                for path in paths
                for option in options
            ),
            slack,
        )
    best = min(paths, key=lambda path: finished(path.state, profile))
    choice = {name: given for option in best.taken for name, given in option.choice.items()}
    return _relaxed(profile, choice)


def _options(bucket: Bucket, candidates: Sequence[Candidate], profile: Profile) -> Iterator[_Option]:
    yield _option(bucket.gradients, (), "dense", profile)
    for candidate in candidates:
        if candidate.name in profile.costs:
            for size in _thresholds(bucket.gradients):
                small = tuple(g for g in bucket.gradients if g.numel < size)
                yield _option(small, tuple(g for g in bucket.gradients if g.numel >= size), candidate.name, profile)


def _option(small: Sequence[Gradient], large: Sequence[Gradient], name: str, profile: Profile) -> _Option:
    works = [work(who, mine, profile) for who, mine in ((name, large), ("dense", small)) if mine]
    choice = {g.name: name for g in large} | {g.name: "dense" for g in small}
    return _Option(choice=choice, works=tuple(works), compressed=sum(g.numel for g in large))


def _thresholds(gradients: Sequence[Gradient]) -> list[int]:
    sizes = sorted({g.numel for g in gradients})
    step = max(1, -(-len(sizes) // _SIZES))
    return sizes[::step]


def _slack(profile: Profile, candidates: Sequence[Candidate]) -> float:
    """Return the seconds that we may lose at each bucket."""
    names = [candidate.name for candidate in candidates if candidate.name in profile.costs]
    shortest = min(step_seconds(profile, name) for name in ("dense", *names))
    return _SLACK * shortest / max(1, len(profile.timeline.buckets))


def _undominated(paths: Iterable[_Path], slack: float) -> list[_Path]:
    """Drop each path if another is no later in any respect. Of equal ones, the least compressed stays."""
    kept = _kept(paths, 0.0)
    return kept if len(kept) < _MANY else _kept(kept, slack)


def _kept(paths: Iterable[_Path], slack: float) -> list[_Path]:
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
