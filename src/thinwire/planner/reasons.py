"""The reasons behind a plan, in words."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from thinwire.exchanges import Link
from thinwire.planner.candidates import DENSE, Budget, candidate
from thinwire.planner.losses import measured
from thinwire.planner.profile import Curve, Gradient, Profile
from thinwire.planner.search import fastest
from thinwire.planner.timeline import Work, step_seconds, work

_WORTH = 0.05  # of a step, below which advice is not worth a line
_NOTHING = Curve(((1.0, 0.0),))


def reason(gradient: Gradient, choice: Mapping[str, str], profile: Profile) -> str:
    """Why does this tensor get this candidate? Answer in terms of T_comp < T_full − T_spr (DRAGONN, Eq. 1)."""
    full = work(DENSE.name, [gradient], profile)
    name = choice[gradient.name]
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
    if set(choice.values()) == {DENSE.name}:
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
    yield from ((text, profile, choice) for text, choice in _dearer(profile, budget))
    nothing = dict.fromkeys(("encode", "decode", "each", "exchange"), _NOTHING)
    free = {name: replace(cost, **nothing) for name, cost in profile.costs.items()}
    yield "if compression itself took no time (faster cores or a GPU come near)", replace(profile, costs=free), choice


def _dearer(profile: Profile, budget: Budget) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield what each candidate would bring that costs this optimizer more loss than the budget allows."""
    candidates, optimizer = budget.candidates(), budget.optimizer
    for name in profile.costs.keys() - {each.name for each in candidates}:
        if optimizer is not None and (row := measured(name, optimizer)) is not None:
            text = f"{name}, if you ask for it: it ended at {row.ratio:.2f} times uncompressed training's loss"
            yield text, fastest(profile, [*candidates, candidate(name)])


def _total(part: Work) -> float:
    return part.encode + part.exchange + part.decode


def _own(part: Work) -> str:
    return ms(part.encode + part.decode)


def ms(seconds: float) -> str:
    """Return seconds as ``0.48 ms`` or ``15 ms``."""
    return f"{1e3 * seconds:.{2 if seconds < 0.01 else 0}f} ms"
