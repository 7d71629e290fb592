"""The fastest way to exchange a step's gradients."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.planner.candidates import Candidate
from thinwire.planner.profile import Bucket, Gradient, Profile
from thinwire.planner.timeline import State, Work, finished, passed, step_seconds, work

_SIZES = 8  # how many thresholds on a tensor's size are tried in a bucket


@dataclass(frozen=True, kw_only=True)
class _Option:
    """One way to treat a bucket."""

    choice: Mapping[str, str]
    works: tuple[Work, ...]
    compressed: int  # elements


class _Path(NamedTuple):
    state: State
    taken: tuple[_Option, ...]


def fastest(profile: Profile, candidates: Sequence[Candidate]) -> dict[str, str]:
    """Return the fastest choice of a candidate's name per parameter; equal ones go uncompressed.

    Exact over all ways to give each bucket's tensors from some size on to one candidate and the rest to "dense": paths
    through the buckets that another beats in every respect are dropped, and those alone.
    """
    paths = [_Path(State(), ())]
    for bucket in profile.timeline.buckets:
        options = list(_options(bucket, candidates, profile))
        paths = _undominated(
            _Path(passed(path.state, bucket.ready, profile.timeline.computed, option.works), (*path.taken, option))
            for path in paths
            for option in options
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


def _undominated(paths: Iterator[_Path]) -> list[_Path]:
    """Drop every path that another one equals or beats in all of its state; of equals, the least compressed stays."""
    kept: list[_Path] = []
    for path in sorted(paths, key=lambda path: (path.state, sum(option.compressed for option in path.taken))):
        if not any(all(a <= b for a, b in zip(other.state, path.state, strict=True)) for other in kept):
            kept.append(path)
    return kept


def _relaxed(profile: Profile, choice: dict[str, str]) -> dict[str, str]:
    """Return the choice without what does not make it faster: candidates one by one, the smallest tensors first."""
    limit = step_seconds(profile, choice)
    for bucket in profile.timeline.buckets:
        mine = [g for g in bucket.gradients if choice[g.name] != "dense"]
        whole = choice | {g.name: "dense" for g in mine}
        if mine and step_seconds(profile, whole) <= limit:
            choice = whole
            continue
        for gradient in sorted(mine, key=lambda g: g.numel):
            tried = choice | {gradient.name: "dense"}
            if step_seconds(profile, tried) > limit:
                break
            choice = tried
    return choice
