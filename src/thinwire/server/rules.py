"""When an update is applied, and when its trainer gets the answer."""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple, final

from thinwire.server.central import Central, Update

logger = logging.getLogger("thinwire")


class Answer(NamedTuple):
    """Whose update can be answered now, its number, and whether it was dropped: not finite."""

    trainer: str
    number: int
    dropped: bool


class Rule(ABC):
    """Decides over the updates of all trainers, of which so many must have joined before the first is applied.

    A trainer has one update here at a time. The caller holds the server's lock, and calls `release` after each call.
    `timeout`: how long a rule that keeps trainers in step waits, after a restart, for those that were there; and how
    long any trainer waits before the log says for whom.
    """

    def __init__(self, central: Central, *, trainers: int, timeout: float) -> None:
        self.central, self._wanted, self.live = central, trainers, dict[str, int]()
        self._hosts, self._since = dict[str, str](), dict[str, float]()
        self._patience, self._told = timeout, -math.inf
        self.goodbyes, self._begun = 0, bool(central.applied)
        self._held = dict[str, Update]()
        """Updates that are not applied yet."""
        self._applied = dict[str, Answer]()
        """Those that are, and not answered."""
        self._returning, self._until = set(central.present), time.monotonic() + timeout

    @property
    def complete(self) -> bool:
        """Whether as many trainers as are wanted have been there at one time, and are back after a restart."""
        return self._begun and (not self._returning or time.monotonic() > self._until)

    def joined(self, trainer: str, host: str) -> None:
        """Count a trainer in, at the pace of the slowest."""
        self._hosts[trainer] = host
        self.live[trainer] = min(self.live.values(), default=0)
        self._begun |= len(self.live) + self.goodbyes >= self._wanted
        self._returning.discard(trainer)
        self._note_present()

    def left(self, trainer: str, *, goodbye: bool) -> None:
        """Wait for this trainer no longer. If it did not say BYE it may come back, perhaps under another number.

        What it has sent counts, unless training has not begun.
        """
        self.live.pop(trainer, None)
        self._since.pop(trainer, None)
        self._applied.pop(trainer, None)
        if not self.complete:
            self._held.pop(trainer, None)
        self.goodbyes += goodbye
        self._note_present()

    def submit(self, update: Update) -> None:
        """Take an update, which is the next of its trainer."""
        self._held[update.trainer] = update
        self._since[update.trainer] = time.monotonic()

    def release(self) -> list[Answer]:
        """Apply what may be applied, and return what can be answered. Raises ServerError if a step fails."""
        if self.complete and self._held:
            self._apply()
        found = [each for each in self._applied.values() if not self._waits(each.trainer)]
        for each in found:
            del self._applied[each.trainer]
            self._since.pop(each.trainer, None)
        return found

    def name(self) -> None:
        """Log who is waited for, now and then: a trainer that skips all its steps looks like one that is slow."""
        now = time.monotonic()
        since = min(self._since.values(), default=now)
        if now - max(since, self._told) > self._patience:
            self._told = now
            others = self._late() if self.complete else self._absent()
            logger.warning("trainers have waited %.0f s for %s", now - since, others)

    def _note_present(self) -> None:
        self.central.present = {*self.live, *self._returning}

    @abstractmethod
    def _apply(self) -> None:
        """Apply what is held, if it is enough, and note what was."""

    @abstractmethod
    def _waits(self, who: str) -> bool:
        """Whether this trainer's update is applied and the trainer has to wait all the same."""

    @abstractmethod
    def _behind(self) -> Iterable[str]:
        """Return whose updates are waited for."""

    def _apply_mean(self, updates: list[Update]) -> None:
        for each in updates:
            del self._held[each.trainer]
        dropped = self.central.apply(updates)
        for each in updates:
            who = each.trainer
            if who in self.live:
                self.live[who] += 1
                self._applied[who] = Answer(who, each.number, who in dropped)

    def _absent(self) -> str:
        """Return in words who must come before the first update is applied."""
        if self._begun:
            return f"{len(self._returning)} that were connected when this server was saved, to return"
        return f"{self._wanted - len(self.live) - self.goodbyes} more to join: serve has trainers={self._wanted}"

    def _late(self) -> str:
        latest = {each: self.central.applied.get(each, 0) for each in sorted(self._behind())}
        names = (f"{each[:8]} at {self._hosts.get(each)} (latest update {number})" for each, number in latest.items())
        return f"{', '.join(names)}: slow, or its gradients are not finite and it skips them"


@final
class Asynchronous(Rule):
    """Apply updates as they come, no trainer over `bound` ahead (stale-synchronous parallel, Ho et al. 2013)."""

    def __init__(self, central: Central, *, trainers: int, timeout: float, bound: int | None) -> None:
        super().__init__(central, trainers=trainers, timeout=timeout)
        self._bound = bound
        if bound is None:  # nobody's pace matters
            self._returning.clear()

    def _apply(self) -> None:
        for update in list(self._held.values()):
            self._apply_mean([update])

    def _waits(self, who: str) -> bool:
        """Whether its next update would be one too many: it gets the newest parameters when it may go on."""
        return self._bound is not None and self.live[who] - min(self.live.values()) >= self._bound

    def _behind(self) -> Iterable[str]:
        return [each for each, count in self.live.items() if count == min(self.live.values())]


@final
class Synchronous(Rule):
    """Apply the mean of one update of each live trainer, in one step."""

    def _apply(self) -> None:
        if self._held.keys() >= self.live.keys():
            self._apply_mean(list(self._held.values()))

    def _waits(self, who: str) -> bool:
        return False

    def _behind(self) -> Iterable[str]:
        return self.live.keys() - self._held.keys()
