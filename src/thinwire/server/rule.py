"""When are updates applied? At once, or not before others' are there."""

import math
import time
from collections.abc import Mapping
from typing import final

from thinwire.server.central import Central, Update

_BACK = 1.0  # seconds in which a trainer whose connection broke joins again


@final
class Rule:
    """Decides over the updates of all trainers, of which so many must have joined before the first is applied.

    At a `staleness` of 0, the mean of one update of each live trainer, and of who vanished just now, is applied in one
    step; one that was away for longer catches up alone. Otherwise updates are applied as they come, and no trainer is
    over `staleness` ahead (stale-synchronous parallel, Ho et al. 2013).

    A trainer has one update here at a time. The caller holds the server's lock, and calls `release` after each call.
    `timeout`: how long a rule that keeps trainers in step waits, after a restart, for those that were there; how long
    a trainer that vanished has to come back.
    """

    def __init__(self, central: Central, *, trainers: int, timeout: float, staleness: int | None) -> None:
        self.central, self._wanted, self.live = central, trainers, dict[str, int]()
        self._together, self._bound = staleness == 0, math.inf if staleness is None else max(1, staleness)
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
        return self._begun and not self._returning

    @property
    def ended(self) -> bool:
        """Whether something was trained, and all have left for good."""
        trained = self._goodbyes or self.central.applied
        away = time.monotonic() - max(self._lost.values(), default=-math.inf)
        return bool(self.complete and trained and not self.live and away > self.patience)

    def joined(self, trainer: str, ahead: int | None, sent: int, slack: int) -> int:
        """Count a trainer in at the pace that it has, or the slowest's, if it has none or is below that by `slack`.

        Where nobody is, as after a restart, that is the last one: others come back with theirs, and would wait.
        A pace is the number of the trainer's latest update, and by how much it is `ahead` of that. What it has `sent`
        will come again where it is not applied, and counts: a server that started again may not know the trainer.
        Returned is that: servers of which each had one of its own would wait for trainers that wait for each other.
        """
        number = self.central.applied.get(trainer, 0)
        slowest = min(self.live.values(), default=self.central.pace) - max(sent, number)
        if ahead is None or slowest > ahead + slack:
            ahead = slowest
        self.live[trainer] = ahead + number
        self._begun |= len(self._goodbyes | self.live.keys()) >= self._wanted
        self._returning.discard(trainer)
        self._lost.pop(trainer, None)
        return ahead

    def left(self, trainer: str, *, goodbye: bool) -> None:
        """Wait for this trainer no longer. If it did not say BYE it may come back, and send what was not applied."""
        for each in (self.live, self._applied, self._held):
            each.pop(trainer, None)
        self._goodbyes |= {trainer} if goodbye else set()
        self._lost |= {} if goodbye else {trainer: time.monotonic()}

    def submit(self, update: Update) -> None:
        """Take an update, which is the next of its trainer."""
        self._held[update.trainer] = update

    def release(self) -> dict[str, bool]:
        """Apply what may be applied. Return whose update can be answered, and whether it was dropped as not finite.

        Raises ServerError if a step fails.
        """
        if self._returning and time.monotonic() > self._until:
            self._returning.clear()  # the next restart does not wait for them either
        self.central.present = {*self.live, *self._returning}
        least = min(self.live.values(), default=0)
        due = [each for who, each in self._held.items() if self.live[who] - least < self._bound]
        if self.complete and not self._together:
            for each in due:
                self._apply([each])
        elif self.complete and due and self._held.keys() >= self._awaited(least):
            self._apply(due)
        least = self.central.pace = min(self.live.values(), default=self.central.pace)
        return {who: self._applied.pop(who) for who in [*self._applied] if self.live[who] - least < self._bound}

    def _awaited(self, least: int) -> set[str]:
        """Return the slowest, and who vanished just now, as one whose connection broke is soon back."""
        lost = time.monotonic() - min(_BACK, self.patience)
        slowest = {who for who, pace in self.live.items() if pace == least}
        return slowest | {who for who, when in self._lost.items() if when > lost}

    def _apply(self, updates: list[Update]) -> None:
        dropped = self.central.apply(updates)
        for who in (each.trainer for each in updates):
            del self._held[who]
            self.live[who] += 1
            self._applied[who] = who in dropped

    def late(self, hosts: Mapping[str, str]) -> str:
        """Return in words who is waited for; `hosts`: where each is."""
        if not self._begun:
            more = self._wanted - len(self._goodbyes | self.live.keys())
            return f"{more} more to join: serve has trainers={self._wanted}"
        if not self.complete:
            return f"{len(self._returning)} to return, which were connected when this server was saved"
        least, applied = min(self.live.values(), default=0), self.central.applied
        slowest = {who for who, count in self.live.items() if count == least}
        late = sorted(slowest - self._held.keys() or slowest)
        names = (f"{each[:8]} at {hosts.get(each)} (latest update {applied.get(each, 0)})" for each in late)
        return f"{', '.join(names)}: slow, or its gradients are not finite and it skips them"
