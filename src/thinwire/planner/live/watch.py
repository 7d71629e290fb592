"""Has the link changed?"""

import math
from dataclasses import dataclass, field, replace
from typing import final

from thinwire.planner.candidates import Budget
from thinwire.planner.decide import chosen
from thinwire.planner.live.log import median_period
from thinwire.planner.live.race import TOLERANCE
from thinwire.planner.live.steps import Decided, Life, compressed, steps
from thinwire.planner.probe import ping, probe_links
from thinwire.planner.probe.agreed import Ranks
from thinwire.planner.profile import Profile

_LOOK = 8  # steps between two looks, at least
_SHARE = 0.005  # of the time goes to looking, at most
_PING_SECONDS, _PINGS = 1e-3, 4
_LEAST, _MOST = 1 << 12, 1 << 24  # bytes of a ping
_PROBE_SECONDS = 1.0
_LAX = 5.0  # the factor at most


@final
@dataclass(kw_only=True)
class Alarm:
    """Rings when something takes `factor` times as long as at first, or as short, `times` running."""

    factor: float = 2.0
    times: int = 2
    _usual: float | None = field(default=None, init=False)
    _strikes: int = field(default=0, init=False)

    @property
    def struck(self) -> bool:
        """Whether the last look was unusual."""
        return self._strikes > 0

    def rings(self, seconds: float) -> bool:
        """Look; the first look shows what is usual."""
        usual = self._usual = seconds if self._usual is None else self._usual
        self._strikes = 0 if usual / self.factor < seconds < usual * self.factor else self._strikes + 1
        return self._strikes >= self.times


def until_changed(decided: Decided, profile: Profile, budget: Budget, ranks: Ranks) -> Life[Profile]:
    """Go by what was decided until links have changed so that another choice is due; return them as they are now."""
    alarm, reason, count = Alarm(), decided.reason, _LOOK
    while True:
        logs = yield from steps(decided.choice, count, reason)
        reason = ""
        seconds = ping(_size(profile), ranks.group, ranks.device)
        (period,) = ranks.mean([median_period(logs)])
        rings = alarm.rings(seconds)
        # what is unusual is looked at again at once
        count = _LOOK if alarm.struck else max(_LOOK, math.ceil(_PINGS * seconds / (_SHARE * period)))
        if rings:
            alarm = Alarm(factor=min(_LAX, 1.5 * alarm.factor))  # it may be false, and probing costs
            links = probe_links(ranks.group, ranks.device, seconds=_PROBE_SECONDS).links
            now = replace(profile, links=links)
            if compressed(chosen(now, budget, TOLERANCE)) != decided.choice:
                return now
            profile = now


def _size(profile: Profile) -> int:
    """Return how much to send for its bytes to weigh more than its latency: what a link carries in that time."""
    link = profile.links["all_reduce"]
    seconds = max(_PING_SECONDS, 2 * profile.world_size * link.latency)
    return min(_MOST, max(_LEAST, int(seconds * link.bandwidth)))
