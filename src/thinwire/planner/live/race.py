"""Racing choices against each other: prediction proposes, measured steps decide."""

from collections.abc import Mapping, Sequence

from thinwire.planner.candidates import DENSE, Budget
from thinwire.planner.decide import chosen, winner
from thinwire.planner.live.step_log import Choice, Decided, Log, Policy, compressed, in_words, median_period, steps
from thinwire.planner.probe.measure import Ranks
from thinwire.planner.profile import Profile
from thinwire.planner.search import fastest
from thinwire.planner.timeline import step_seconds

TOLERANCE = 0.03
"""A faster choice must save this share of a step to beat one that is kinder to the loss."""
_LAPS, _LAP = 2, 4  # the first step of a lap does not count
_MOST = 4  # arms
_OBVIOUS = 1.5  # times slower than the best prediction: not worth a lap


def decision(
    profile: Profile,
    budget: Budget,
    now: Choice,
    why: str,
    ranks: Ranks,
    *,
    dense_seconds: float | None = None,
    suspected: Profile | None = None,
) -> Policy[Decided]:
    """Race the plan's proposals against the choice in use `now`, and return the winner.

    `dense_seconds`: the seconds of an uncompressed step, if they have just been observed. `suspected`: what the profile
    would be if they took longer than predicted because of the links. If nothing pays by prediction alone, its plan
    races too.
    """
    measured, arms = profile, proposals(profile, budget, now)
    if suspected is not None and arms == [{}]:
        profile, arms = suspected, proposals(suspected, budget, now)
    predicted = [step_seconds(profile, arm) for arm in arms]
    slow = {} in arms and predicted[arms.index({})] > _OBVIOUS * min(predicted)
    if slow and dense_seconds is None:  # predictions and measurements cannot be compared
        arms = [arm for arm in arms if arm]
        predicted = [step_seconds(profile, arm) for arm in arms]
    known = {arms.index({}): dense_seconds} if dense_seconds is not None and (slow or arms == [{}]) else {}
    seconds = (yield from _race(arms, known, ranks)) if len(arms) > 1 else [known.get(0, predicted[0])]
    best = winner(seconds, TOLERANCE)
    text = f"{why}: {in_words(arms[best])}, {_ms(seconds[best])} a step, predicted {_ms(predicted[best])}"
    others = ", ".join(f"{in_words(arms[i])} {_ms(took)}" for i, took in enumerate(seconds) if i != best)
    told = f"{text}; against {others}" if others else text
    return Decided(arms[best], told, profile if arms[best] else measured)


def proposals(profile: Profile, budget: Budget, now: Choice) -> list[Choice]:
    """Return the choices worth racing, least harm to the loss first: uncompressed, the one in use, the plan, others.

    Others are nearly as fast: other candidates, and the plan with its smaller tensors uncompressed. If nothing is
    compressed and nothing pays, the only choice is uncompressed.
    """
    candidates = budget.candidates()
    plan = compressed(chosen(profile, budget, TOLERANCE))
    if not plan and not now:
        return [{}]
    rivals = [compressed(fastest(profile, [DENSE, other])) for other in candidates]
    rivals = sorted([*rivals, _larger_half(plan, profile)], key=lambda choice: step_seconds(profile, choice))
    limit = (1 + 2 * TOLERANCE) * step_seconds(profile, rivals[0])
    arms: list[Choice] = []
    for choice in ({}, now, plan, *(rival for rival in rivals if step_seconds(profile, rival) <= limit)):
        if choice not in arms:
            arms.append(choice)
    order = [candidate.name for candidate in candidates]
    return sorted(arms[:_MOST], key=lambda arm: (max(map(order.index, arm.values()), default=-1), len(arm)))


def _race(arms: Sequence[Choice], known: Mapping[int, float], ranks: Ranks) -> Policy[list[float]]:
    logs: dict[int, list[Log]] = {place: [] for place in range(len(arms)) if place not in known}
    for _ in range(_LAPS):
        for place in logs:
            lap = yield from steps(Decided(arms[place]), _LAP)
            logs[place] += lap[1:]
    mine = [known[place] if place in known else median_period(logs[place]) for place in range(len(arms))]
    return ranks.mean(mine)


def _larger_half(choice: Choice, profile: Profile) -> Choice:
    sizes = {g.name: g.numel for g in profile.timeline.gradients}
    ordered = sorted(choice, key=lambda name: sizes[name])
    return {name: choice[name] for name in ordered[len(ordered) // 2 :]}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
