"""When does "auto" do what? Observe, race the plan against uncompressed steps, watch the links, and begin again."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Never, final

from thinwire.collectives import backend_of
from thinwire.exchanges import Link
from thinwire.planner.candidates import DENSE, Budget
from thinwire.planner.decide import TOLERANCE, chosen, fastest, winner
from thinwire.planner.live.step_log import Choice, Decided, Log, Policy, in_words, median_period, steps
from thinwire.planner.probe import ping, probe_candidates, probe_links
from thinwire.planner.probe.links import contention
from thinwire.planner.probe.measure import Ranks
from thinwire.planner.profile import Bucket, Profile, Timeline
from thinwire.planner.timeline import step_seconds

_LAPS, _LAP = 2, 4  # the first step of a lap does not count
_ARMS = 4  # at most
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
    plan = chosen(profile, budget, TOLERANCE)
    if not plan and not now:
        return [{}]
    rivals = [fastest(profile, [each]) for each in candidates]
    sizes = {g.name: g.numel for g in profile.timeline.gradients}
    larger = sorted(plan, key=sizes.__getitem__)[len(plan) // 2 :]
    rivals = sorted([*rivals, {name: plan[name] for name in larger}], key=lambda choice: step_seconds(profile, choice))
    limit = (1 + 2 * TOLERANCE) * step_seconds(profile, rivals[0])
    arms: list[Choice] = []
    for choice in ({}, now, plan, *(rival for rival in rivals if step_seconds(profile, rival) <= limit)):
        if choice not in arms:
            arms.append(choice)
    order = [candidate.name for candidate in candidates]
    return sorted(arms[:_ARMS], key=lambda arm: (max(map(order.index, arm.values()), default=-1), len(arm)))


def _race(arms: Sequence[Choice], known: Mapping[int, float], ranks: Ranks) -> Policy[list[float]]:
    logs: dict[int, list[Log]] = {place: [] for place in range(len(arms)) if place not in known}
    for _ in range(_LAPS):
        for place in logs:
            lap = yield from steps(Decided(arms[place]), _LAP)
            logs[place] += lap[1:]
    mine = [known[place] if place in known else median_period(logs[place]) for place in range(len(arms))]
    return ranks.mean(mine)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


_SETTLE, _OBSERVE = 3, 6  # steps; DDP cuts its buckets anew after the first
_FEWEST, _WATCHING = 2, 6.0  # steps to settle and to observe where steps are long; seconds to observe for
_MISSED, _FAR_SLOWER = 2.0, 1e6  # times as long as predicted: links may be to blame; but not that far off
_LOOK_EVERY = 8  # steps between two looks, at least
_SHARE = 0.005  # of the time goes to looking, at most
_PING_SECONDS, _PINGS = 1e-3, 4
_LEAST, _MOST = 1 << 12, 1 << 24  # bytes of a ping
_PROBE_SECONDS = 1.0
_MAX_FACTOR = 5.0  # that an alarm's grows to


def policy(budget: Budget, sizes: Sequence[int], ranks: Ranks, caps: Sequence[int] | None = None) -> Policy[Never]:
    """Observe uncompressed steps and decide, alike on all ranks, again whenever links change; never ends."""
    group, device = ranks.group, ranks.device
    links, busy, unseen = probe_links(group, device, most=4 * sum(sizes))
    costs = probe_candidates(budget.candidates(), group, device, links, sizes)
    slowdown = contention(group, device)
    settling, watching = _spans(DENSE.exchange.seconds(4.0 * sum(sizes), group.size(), links["all_reduce"]))
    yield from steps(Decided({}), settling)
    logs = yield from steps(Decided({}), watching)
    timeline = observed(logs, ranks)
    profile = Profile(
        world_size=group.size(),
        timeline=timeline if caps is None else timeline.cut(caps),
        links=links,
        busy=busy,
        unseen=unseen,
        costs=costs,
        slowdown=slowdown,
        made={"world_size": group.size(), "backend": backend_of(group)},
    )
    (seconds,) = ranks.mean([median_period(logs)])
    suspected = _with_slower_links(profile, seconds) if seconds > _MISSED * step_seconds(profile) else None
    profile, why = _with_rest(profile, seconds), "first plan"
    decided = yield from decision(profile, budget, {}, why, ranks, dense_seconds=seconds, suspected=suspected)
    while True:
        before = profile = decided.profile or profile
        profile = yield from until_changed(decided, profile, budget, ranks)
        decided = yield from decision(profile, budget, decided.choice, _change(before, profile), ranks)


def observed(logs: Sequence[Log], ranks: Ranks) -> Timeline:
    """Return the median step on the slowest rank. The optimizer's time lies at the beginning of the next step."""
    alike = [log for log in logs if log.buckets == logs[-1].buckets]
    ready = ranks.most([median(column) for column in zip(*(log.offsets for log in alike), strict=True)])
    buckets = (Bucket(ready=when, gradients=what) for when, what in zip(ready, logs[-1].buckets, strict=True))
    return Timeline(buckets=tuple(buckets), computed=max(ready))


@final
@dataclass(kw_only=True)
class Alarm:
    """Trips when something is `factor` times slower or faster than at first, twice in a row."""

    factor: float = 2.0
    _usual: float | None = field(default=None, init=False)
    _strikes: int = field(default=0, init=False)

    @property
    def suspicious(self) -> bool:
        """Whether the last measurement was off the baseline."""
        return self._strikes > 0

    def trips(self, seconds: float) -> bool:
        """Return whether this measurement trips the alarm. The first one is the baseline."""
        usual = self._usual = seconds if self._usual is None else self._usual
        self._strikes = 0 if usual / self.factor < seconds < usual * self.factor else self._strikes + 1
        return self._strikes >= 2


def until_changed(decided: Decided, profile: Profile, budget: Budget, ranks: Ranks) -> Policy[Profile]:
    """Keep to the decision until the links have changed enough to call for another. Return the new profile."""
    alarm, told, count = Alarm(), decided, _LOOK_EVERY
    while True:
        logs = yield from steps(told, count)
        told, link = Decided(decided.choice), profile.links["all_reduce"]
        # so long that bandwidth counts for more than latency
        size = int(max(_PING_SECONDS, 2 * profile.world_size * link.latency) * link.bandwidth)
        size = min(_MOST, max(_LEAST, size))
        seconds = ping(size, ranks.group, ranks.device)
        (period,) = ranks.mean([median_period(logs)])
        tripped = alarm.trips(seconds)
        # if a look was unusual, look again at once
        count = _LOOK_EVERY if alarm.suspicious else max(_LOOK_EVERY, math.ceil(_PINGS * seconds / (_SHARE * period)))
        if tripped:
            alarm = Alarm(factor=min(_MAX_FACTOR, 1.5 * alarm.factor))  # the alarm may be false, and probing is costly
            most = sum(g.nbytes for g in profile.timeline.gradients)
            found = probe_links(ranks.group, ranks.device, seconds=_PROBE_SECONDS, most=most)
            now = replace(profile, links=found.links, unseen=found.unseen)
            if chosen(now, budget, TOLERANCE) != decided.choice:
                return now
            profile = now


def _with_rest(profile: Profile, seconds: float) -> Profile:
    """Did uncompressed steps take longer than predicted? Count that as rest: optimizer, loader and so on."""
    rest = max(0.0, seconds - step_seconds(profile))
    return replace(profile, timeline=replace(profile.timeline, rest=rest))


def _with_slower_links(profile: Profile, seconds: float) -> Profile:
    """Did uncompressed steps take longer than predicted? Count that as bytes on links slower than measured."""

    def on(factor: float) -> Profile:
        slower = {t: Link(latency=link.latency, bandwidth=link.bandwidth / factor) for t, link in profile.links.items()}
        return replace(profile, links=slower)

    factor = 1.0
    while step_seconds(on(factor)) < seconds and factor < _FAR_SLOWER:
        factor *= 1.1
    return on(factor)


def _spans(exchange: float) -> tuple[int, int]:
    """Return how many steps to let settle and how many to observe, if an uncompressed exchange takes so long."""
    if exchange * _OBSERVE <= _WATCHING:
        return _SETTLE, _OBSERVE
    return _FEWEST, max(_FEWEST, int(_WATCHING / exchange))


def _change(before: Profile, after: Profile) -> str:
    was, now = (profile.links["all_reduce"] for profile in (before, after))
    return (
        f"the link has changed from {8e-6 * was.bandwidth:.0f} to {8e-6 * now.bandwidth:.0f} Mbit/s "
        f"and from {1e3 * was.latency:.2f} to {1e3 * now.latency:.2f} ms"
    )
