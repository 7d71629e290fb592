"""From the first step to the last: observe, decide, keep watch, decide again."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Never

from thinwire.planner.candidates import Budget
from thinwire.planner.live.log import Log, median_period
from thinwire.planner.live.race import decision
from thinwire.planner.live.steps import Life, steps
from thinwire.planner.live.watch import until_changed
from thinwire.planner.probe import probe_candidates, probe_links
from thinwire.planner.probe.agreed import Ranks
from thinwire.planner.probe.load import contention
from thinwire.planner.profile import Bucket, Profile, Timeline
from thinwire.planner.timeline import step_seconds

_SETTLE, _OBSERVE = 3, 6  # steps; DDP cuts its buckets anew after the first


def live(budget: Budget, sizes: Sequence[int], ranks: Ranks, caps: Sequence[int] | None = None) -> Life[Never]:
    """Go on for ever, alike on all ranks, as every figure that counts is exchanged first.

    `caps`: of DDP's buckets, where the first logs tell of single gradients.
    """
    group, device = ranks.group, ranks.device
    links, busy = probe_links(group, device)
    costs = probe_candidates(budget.candidates(), group, device, links, sizes)
    slowdown = contention(group, device)
    yield from steps({}, _SETTLE)
    logs = yield from steps({}, _OBSERVE)
    timeline = observed(logs, ranks)
    profile = Profile(
        world_size=group.size(),
        timeline=timeline if caps is None else timeline.cut(caps),
        links=links,
        busy=busy,
        costs=costs,
        slowdown=slowdown,
        made={"world_size": group.size()},
    )
    (seconds,) = ranks.mean([median_period(logs)])
    profile = _with_rest(profile, seconds)
    decided = yield from decision(profile, budget, {}, "first plan", ranks, dense_seconds=seconds)
    while True:
        before = profile
        profile = yield from until_changed(decided, profile, budget, ranks)
        decided = yield from decision(profile, budget, decided.choice, _change(before, profile), ranks)


def observed(logs: Sequence[Log], ranks: Ranks) -> Timeline:
    """Return the median step on the slowest rank. What an optimizer takes lies at the beginning of the next step."""
    alike = [log for log in logs if log.buckets == logs[-1].buckets]
    ready = ranks.most([median(column) for column in zip(*(log.offsets for log in alike), strict=True)])
    buckets = (Bucket(ready=when, gradients=what) for when, what in zip(ready, logs[-1].buckets, strict=True))
    return Timeline(buckets=tuple(buckets), computed=max(ready))


def _with_rest(profile: Profile, seconds: float) -> Profile:
    """Count as rest, such as the optimizer or the loader, what uncompressed steps took beyond what is known of."""
    rest = max(0.0, seconds - step_seconds(profile))
    return replace(profile, timeline=replace(profile.timeline, rest=rest))


def _change(before: Profile, after: Profile) -> str:
    was, now = (profile.links["all_reduce"] for profile in (before, after))
    return (
        f"the link has changed from {8e-6 * was.bandwidth:.0f} to {8e-6 * now.bandwidth:.0f} Mbit/s "
        f"and from {1e3 * was.latency:.2f} to {1e3 * now.latency:.2f} ms"
    )
