"""Deciding what to compress: does it pay, and if so, with which candidate?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from thinwire.checked import Fraction, checked
from thinwire.exchanges import Link
from thinwire.planner.candidates import DENSE, Budget
from thinwire.planner.plan import Plan, Row
from thinwire.planner.profile import Gradient, Profile
from thinwire.planner.reasons import advice, reason
from thinwire.planner.search import fastest
from thinwire.planner.timeline import step_seconds, work

_SLOWEST, _FASTEST = 1e2, 1e13  # bytes per second, within which the break-even is sought
_HALVINGS = 15  # of some 36 octaves


@checked
def decide(profile: Profile, budget: Budget | None = None, *, tolerance: Fraction = 0.03) -> Plan:
    """Return the plan with the fastest predicted step.

    Args:
        profile: What was measured.
        budget: What may be chosen.
        tolerance: Within this share of the fastest step, the plan less harmful to the loss wins. So a plan does not
            compress a tensor for less than that, nor sparsify where narrowing is enough.

    Raises:
        ValueError: For links without bandwidth.
    """
    if math.isinf(step_seconds(profile)):
        raise ValueError(f"the links of this profile have no bandwidth: {profile.links}; expected more than 0")
    asked, budget = budget, budget or Budget()
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
    """Return a candidate for each parameter: within `tolerance` of the fastest, the one least harmful to the loss."""
    candidates = budget.candidates()
    if profile.world_size == 1:
        return {g.name: DENSE.name for g in profile.timeline.gradients}
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
    """Return a row for each tensor. `choice` names a candidate for each."""
    return tuple(_row(gradient, choice, profile) for gradient in profile.timeline.gradients)


def _row(gradient: Gradient, choice: Mapping[str, str], profile: Profile) -> Row:
    name = choice[gradient.name]
    saves = 0.0
    if name != DENSE.name:
        saves = step_seconds(profile, {**choice, gradient.name: DENSE.name}) - step_seconds(profile, choice)
    return Row(
        name=gradient.name,
        numel=gradient.numel,
        dense_bytes=gradient.nbytes,
        choice=name,
        nbytes=work(name, [gradient], profile).nbytes,
        saves=saves,
        reason=reason(gradient, choice, profile),
    )
