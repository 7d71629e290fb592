"""When an update is applied, and when its trainer gets the answer."""

import math
import time
from collections.abc import Mapping
from typing import final

from thinwire.server.central import Central, Update


@final
class Rule:
    """Decides over the updates of all trainers, of which so many must have joined before the first is applied.

    At a `staleness` of 0, the mean of one update of each live trainer is applied in one step; who was away catches up
    alone. Otherwise updates are applied as they come, and no trainer is over `staleness` ahead (stale-synchronous
    parallel, Ho et al. 2013).

    A trainer has one update here at a time. The caller holds the server's lock, and calls `release` after each call.
    `timeout`: how long a rule that keeps trainers in step waits, after a restart, for those that were there; how long
    a trainer that vanished has to come back.
    """

    def __init__(self, central: Central, *, trainers: int, timeout: float, staleness: int | None) -> None:
        self.central, self._wanted, self._staleness, self.live = central, trainers, staleness, dict[str, int]()
        self.patience, now = timeout, time.monotonic()
        self._goodbyes, self._begun = set[str](), bool(central.applied)
        self._lost = {"": now} if central.applied else dict[str, float]()
        """When each trainer left that has not said BYE or come back, and when the server itself came back."""
        self._held, self._applied = dict[str, Update](), dict[str, bool]()
        """Updates that are not applied yet, and of those that are and are not answered, whether they were dropped."""
        self._returning, self._until = set[str](() if staleness is None else central.present), now + timeout

    @property
    def complete(self) -> bool:
        """Whether as many trainers as are wanted have been there at one time, and are back after a restart."""
        return self._begun and (not self._returning or time.monotonic() > self._until)

    @property
    def ended(self) -> bool:
        """Whether something was trained, and all have left for good."""
        trained = self._goodbyes or self.central.applied
        away = time.monotonic() - max(self._lost.values(), default=-math.inf)
        return bool(self.complete and trained and not self.live and away > self.patience)

    def joined(self, trainer: str, ahead: int | None) -> int:
        """Count a trainer in, at the pace of the slowest, unless it has one on other servers.

        A pace is the number of the trainer's latest update, and by how much it was `ahead` of that when it joined.
        Returned is that: servers of which each had one of its own would wait for trainers that wait for each other.
        """
        number = self.central.applied.get(trainer, 0)
        ahead = min(self.live.values(), default=number) - number if ahead is None else ahead
        self.live[trainer] = ahead + number
        self._begun |= len(self._goodbyes | self.live.keys()) >= self._wanted
        self._returning.discard(trainer)
        self._lost.pop(trainer, None)
        self.central.present = {*self.live, *self._returning}
        return ahead

    def left(self, trainer: str, *, goodbye: bool) -> None:
        """Wait for this trainer no longer. If it did not say BYE it may come back, perhaps under another number.

        What it has sent counts, unless training has not begun.
        """
        for each in (self.live, self._applied, *(() if self.complete else (self._held,))):
            each.pop(trainer, None)
        self._goodbyes |= {trainer} if goodbye else set()
        self._lost |= {} if goodbye else {trainer: time.monotonic()}
        self.central.present = {*self.live, *self._returning}

    def submit(self, update: Update) -> None:
        """Take an update, which is the next of its trainer."""
        self._held[update.trainer] = update

    def release(self) -> dict[str, bool]:
        """Apply what may be applied. Return whose update can be answered, and whether it was dropped as not finite.

        Raises ServerError if a step fails.
        """
        if self.complete and self._staleness == 0:
            least = min(self.live.values(), default=0)
            due = [each for who, each in self._held.items() if self.live.get(who, least) == least]
            if due and self._held.keys() >= {who for who, pace in self.live.items() if pace == least}:
                self._apply(due)
        elif self.complete:
            for update in list(self._held.values()):
                self._apply([update])
        least, bound = min(self.live.values(), default=0), self._staleness or math.inf
        found = {who: dropped for who, dropped in self._applied.items() if self.live[who] - least < bound}
        for who in found:
            del self._applied[who]
        return found

    def _apply(self, updates: list[Update]) -> None:
        who = [each.trainer for each in updates]
        for each in who:
            del self._held[each]
        dropped = self.central.apply(updates)
        for each in self.live.keys() & who:
            self.live[each] += 1
            self._applied[each] = each in dropped

    def late(self, hosts: Mapping[str, str]) -> str:
        """Return in words who is waited for; `hosts`: where each is."""
        if not self._begun:
            more = self._wanted - len(self._goodbyes | self.live.keys())
            return f"{more} more to join: serve has trainers={self._wanted}"
        if not self.complete:
            return f"{len(self._returning)} to return, which were connected when this server was saved"
        least, applied = min(self.live.values(), default=0), self.central.applied
        late = sorted(who for who, count in self.live.items() if count == least and who not in self._held)
        names = (f"{each[:8]} at {hosts.get(each)} (latest update {applied.get(each, 0)})" for each in late)
        return f"{', '.join(names)}: slow, or its gradients are not finite and it skips them"
