"""Deciding what to compress: does it pay, if so, with which candidate, and why?"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from thinwire.checked import Fraction, checked
from thinwire.exchanges import Link
from thinwire.planner.candidates import DENSE, Budget, Candidate, candidate, measured
from thinwire.planner.plan import Plan, Row
from thinwire.planner.profile import Bucket, Curve, Gradient, Profile
from thinwire.planner.timeline import State, Work, check_finite, finished, passed, step_seconds, work, works

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
    shortest = min(step_seconds(profile, name) for name in (DENSE.name, *names))
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
    for name, size in ((DENSE.name, math.inf), *((name, size) for name in names for size in sizes)):
        large = {g.name: g.numel for g in bucket.gradients if g.numel >= size}
        choice = dict.fromkeys(large, name)
        yield _Option(choice=choice, works=tuple(works(bucket, choice, profile)), compressed=sum(large.values()))


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
        mine = {g.name: g.numel for g in bucket.gradients if g.name in choice}
        without = _without(choice, mine)
        if mine and step_seconds(profile, without) <= limit:
            choice = without
            continue
        for size in sorted({*mine.values()}):
            tried = _without(choice, [name for name, numel in mine.items() if numel == size])
            if step_seconds(profile, tried) > limit:
                break
            choice = tried
    return choice


def _without(choice: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    return {name: given for name, given in choice.items() if name not in names}


TOLERANCE = 0.03
"""The share of a step that a choice must save to beat one that is kinder to the loss, unless another is asked for."""
_SLOWEST, _FASTEST = 1e2, 1e13  # bytes per second, within which the break-even is sought
_HALVINGS = 15  # of some 36 octaves


@checked
def decide(profile: Profile, budget: Budget | None = None, *, tolerance: Fraction = TOLERANCE) -> Plan:
    """Return the plan with the fastest predicted step.

    Args:
        profile: What was measured.
        budget: What may be chosen; by default what was measured and leaves the optimizer's momentum alone.
        tolerance: Within this share of the fastest step, the plan less harmful to the loss wins. So a plan does not
            compress a tensor for less than that, nor sparsify where narrowing is enough.

    Raises:
        ValueError: For a profile by which a step would never end.
    """
    for each in (DENSE.name, *profile.costs):
        check_finite(step_seconds(profile, each), each)
    asked, usable = budget, [name for name in profile.costs if not candidate(name).momentum]
    budget = budget or Budget(names=usable)
    names = [each.name for each in budget.candidates()]
    # a reason names only what might have been chosen
    among = replace(profile, costs={name: cost for name, cost in profile.costs.items() if name in names})
    exchanges = asked is not None and profile.world_size > 1 and bool(profile.timeline.gradients)
    choice = chosen(profile, budget, tolerance)
    dense, planned = step_seconds(profile), step_seconds(profile, choice)
    return Plan(
        profile=profile,
        rows=rows(choice, among),
        dense_seconds=dense,
        seconds=planned,
        break_even=break_even(profile, budget, tolerance),
        advice=tuple(advice(profile, budget, choice)),
        optimizer=budget.optimizer,
        unmeasured=tuple(each for each in names if exchanges and each not in {DENSE.name, *profile.costs}),
    )


def chosen(profile: Profile, budget: Budget, tolerance: float) -> dict[str, str]:
    """Return a choice as `fastest` does: within `tolerance` of the fastest, the one least harmful to the loss."""
    candidates = budget.candidates()
    if profile.world_size == 1:
        return {}
    tried = [fastest(profile, candidates[: count + 1]) for count in range(len(candidates))]
    seconds = [step_seconds(profile, choice) for choice in tried]
    return tried[winner(seconds, tolerance)]  # each uses only so many candidates, least harm to the loss first


def winner(seconds: Sequence[float], tolerance: float) -> int:
    """Return the index of the first that is within tolerance of the fastest."""
    limit = min(seconds) * (1 + tolerance)
    return next(place for place, took in enumerate(seconds) if took <= limit)


@checked
def break_even(profile: Profile, budget: Budget, tolerance: Fraction) -> float:
    """Return the bandwidth above which compression stops paying, in bytes per second; 0 if it never pays.

    Args:
        profile: What was measured.
        budget: What may be chosen.
        tolerance: The share of a step that compression must save to be worth it.
    """

    candidates = budget.candidates()

    def pays(bandwidth: float) -> bool:
        there = profile.on(Link(latency=0.0, bandwidth=bandwidth))
        # as `chosen` would decide, without finding out which candidates
        return step_seconds(there) > (1 + tolerance) * step_seconds(there, fastest(there, candidates))

    if profile.world_size == 1 or not pays(_SLOWEST):
        return 0.0
    if pays(_FASTEST):
        return math.inf
    low, high = _SLOWEST, _FASTEST
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def rows(choice: Mapping[str, str], profile: Profile) -> tuple[Row, ...]:
    """Return a row for each tensor; those without a candidate in `choice` are uncompressed."""
    found, now = [], step_seconds(profile, choice)
    for each in profile.timeline.gradients:
        name = choice.get(each.name, DENSE.name)
        saves = 0.0
        if name != DENSE.name:
            saves = step_seconds(profile, {**choice, each.name: DENSE.name}) - now
        row = Row(
            name=each.name,
            numel=each.numel,
            dense_bytes=each.nbytes,
            choice=name,
            nbytes=work(name, [each], profile).nbytes,
            saves=saves,
            reason=reason(each, choice, profile),
        )
        found.append(row)
    return tuple(found)


_WORTH = 0.05  # of a step, below which advice is not worth a line
_NOTHING = Curve(((1.0, 0.0),))


def reason(gradient: Gradient, choice: Mapping[str, str], profile: Profile) -> str:
    """Why does this tensor get this candidate? Answer in terms of T_comp < T_full − T_spr (DRAGONN, Eq. 1)."""
    full = work(DENSE.name, [gradient], profile)
    name = choice.get(gradient.name, DENSE.name)
    if name != DENSE.name:
        less = work(name, [gradient], profile)
        took = f"its exchange takes {ms(less.exchange)} instead of {ms(full.exchange)}"
        return f"{took}; encoding and decoding take {_own(less)}"
    best = min((work(other, [gradient], profile) for other in profile.costs), key=_total, default=None)
    if profile.world_size == 1:
        return "only one worker: nothing to exchange"
    if best is None or _total(best) >= full.exchange:
        spent = "" if best is None else f"; {best.name} takes {ms(best.exchange)}, and {_own(best)} to compute"
        return f"its exchange takes {ms(full.exchange)}{spent}"
    if not choice:
        return f"{best.name} would save {ms(full.exchange - _total(best))} of its exchange, too little of the step"
    return "its exchange is hidden behind backward, or shared with others in the bucket"


def advice(profile: Profile, budget: Budget, choice: Mapping[str, str]) -> Iterator[str]:
    """Yield what else would shorten a step, the most effective first."""
    now = step_seconds(profile, choice)
    found = [
        (step_seconds(other, again), text)
        for text, other, again in _changes(profile, budget, choice)
        if now - step_seconds(other, again) > _WORTH * now
    ]
    for seconds, text in sorted(found):
        yield f"{text}: {1e3 * seconds:.1f} ms a step instead of {1e3 * now:.1f}"
    floor = profile.timeline.computed + profile.timeline.rest
    if now <= (1 + _WORTH) * floor:
        yield f"computing alone takes {1e3 * floor:.1f} ms of the step: a faster network or compression cannot help"


def _changes(
    profile: Profile, budget: Budget, choice: Mapping[str, str]
) -> Iterator[tuple[str, Profile, Mapping[str, str]]]:
    everywhere = profile.links.items()
    faster = {t: Link(latency=link.latency, bandwidth=10 * link.bandwidth) for t, link in everywhere}
    nearer = {t: Link(latency=link.latency / 10, bandwidth=link.bandwidth) for t, link in everywhere}
    candidates = budget.candidates()
    for text, links in (("a link of ten times the bandwidth", faster), ("a tenth of the latency", nearer)):
        other = replace(profile, links=links)
        yield text, other, fastest(other, candidates)
    for name in profile.costs.keys() - {each.name for each in candidates}:  # which may cost too much loss
        if row := measured(name, budget.optimizer):
            text = f"{name}, if you ask for it: it ended at {row.ratio:.2f} times uncompressed training's loss"
            yield text, profile, fastest(profile, [*candidates, candidate(name)])
    nothing = dict.fromkeys(("encode", "decode", "each", "exchange"), _NOTHING)
    free = {name: replace(cost, **nothing) for name, cost in profile.costs.items()}
    yield "if compression itself took no time (faster cores or a GPU come near)", replace(profile, costs=free), choice


def _total(part: Work) -> float:
    return part.encode + part.exchange + part.decode


def _own(part: Work) -> str:
    return ms(part.encode + part.decode)


def ms(seconds: float) -> str:
    """Return seconds as ``0.48 ms`` or ``15 ms``."""
    return f"{1e3 * seconds:.{2 if seconds < 0.01 else 0}f} ms"
