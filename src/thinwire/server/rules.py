"""When an update is applied, and how long its trainer waits for the others."""

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import final

from thinwire.errors import ServerError
from thinwire.server.central import Central, Update
from thinwire.server.frames import GoneError

logger = logging.getLogger("thinwire")
TICK = 0.2
"""Seconds in which a trainer that waits is noticed to be gone."""
Meanwhile = Callable[[], None]
"""Called while a trainer waits, now and then, with the server's lock held; raises if that trainer is gone."""


class Rule(ABC):
    """Decides over the updates of all trainers, of which so many must have joined before the first is applied.

    Every call but `submit` is made with the server's lock held. `timeout`: how long a rule that keeps trainers in step
    waits, after a restart, for those that were there; and how long any trainer waits before the log says for whom.
    """

    def __init__(self, central: Central, lock: threading.Condition, *, trainers: int, timeout: float) -> None:
        self.central, self._lock, self._tick = central, lock, min(TICK, timeout / 4)
        self._wanted, self.live, self._hosts = trainers, dict[str, int](), dict[str, str]()
        self._patience, self._told = timeout, -math.inf
        self.goodbyes, self._begun, self._open = 0, bool(central.applied), True
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
        self._lock.notify_all()

    def left(self, trainer: str, *, goodbye: bool) -> None:
        """Wait for this trainer no longer. If it did not say BYE it may come back, perhaps under another number."""
        self.live.pop(trainer, None)
        self.goodbyes += goodbye
        self._note_present()
        self._lock.notify_all()

    def stop(self) -> None:
        """Wake all waiting trainers."""
        self._open = False
        self._lock.notify_all()

    def submit(self, update: Update, meanwhile: Meanwhile) -> bool:
        """Have an update applied, once; wait as long as the rule says; return whether it was dropped, not finite."""
        with self._lock:
            self._wait(lambda: self.complete, meanwhile, self._absent)
            if not self.complete:
                raise GoneError("the server was closed")
            return self._submit(update, meanwhile)

    def _note_present(self) -> None:
        self.central.present = {*self.live, *self._returning}

    @abstractmethod
    def _submit(self, update: Update, meanwhile: Meanwhile) -> bool: ...

    def _wait(self, until: Callable[[], bool], meanwhile: Meanwhile, others: Callable[[], str]) -> None:
        due = (since := time.monotonic()) + self._tick
        while self._open and not until():
            self._lock.wait(max(0.0, due - time.monotonic()))
            if time.monotonic() >= due:  # others may notify more often than that
                meanwhile()
                due = time.monotonic() + self._tick
                self._name(others, since)
        self.central.check()

    def _name(self, others: Callable[[], str], since: float) -> None:
        """Log who is waited for, now and then: a trainer that skips all its steps looks like one that is slow."""
        now = time.monotonic()
        if now - max(since, self._told) > self._patience:
            self._told = now
            logger.warning("trainers have waited %.0f s for %s", now - since, others())

    def _absent(self) -> str:
        """Return in words who must come before the first update is applied."""
        if self._begun:
            return f"{len(self._returning)} that were there when this server was saved, to come back"
        return f"{self._wanted - len(self.live) - self.goodbyes} more to join: serve has trainers={self._wanted}"

    def _late(self, trainers: Iterable[str]) -> str:
        """Return in words whose updates are waited for."""
        latest = {each: self.central.applied.get(each, 0) for each in sorted(trainers)}
        names = (f"{each[:8]} at {self._hosts.get(each)} (latest update {number})" for each, number in latest.items())
        return f"{', '.join(names)}: slow, or its gradients are not finite and it skips them"


@final
class Asynchronous(Rule):
    """Apply updates as they come, no trainer over `bound` ahead (stale-synchronous parallel, Ho et al. 2013)."""

    def __init__(
        self, central: Central, lock: threading.Condition, *, trainers: int, timeout: float, bound: int | None
    ) -> None:
        super().__init__(central, lock, trainers=trainers, timeout=timeout)
        self._bound = bound
        if bound is None:  # nobody's pace matters
            self._returning.clear()

    def _submit(self, update: Update, meanwhile: Meanwhile) -> bool:
        who = update.trainer
        dropped = bool(self.central.apply([update]))
        if who in self.live:
            self.live[who] += 1
            self._lock.notify_all()
        self._wait(lambda: not self._ahead(who), meanwhile, self._slowest)
        return dropped

    def _slowest(self) -> str:
        return self._late(each for each, count in self.live.items() if count == min(self.live.values()))

    def _ahead(self, who: str) -> bool:
        """Whether this trainer's next update would be one too many: it gets the newest parameters when it may go on."""
        return self._bound is not None and who in self.live and self.live[who] - min(self.live.values()) >= self._bound


@final
class Synchronous(Rule):
    """Apply the mean of one update of each live trainer, in one step."""

    def __init__(self, central: Central, lock: threading.Condition, *, trainers: int, timeout: float) -> None:
        super().__init__(central, lock, trainers=trainers, timeout=timeout)
        self._round: dict[str, Update] = {}
        self._dropped: set[str] = set()

    def left(self, trainer: str, *, goodbye: bool) -> None:
        """Wait for this trainer no longer. What it has sent already counts."""
        super().left(trainer, goodbye=goodbye)
        with suppress(ServerError):  # those who wait are told
            self._close_if_complete()

    def _submit(self, update: Update, meanwhile: Meanwhile) -> bool:
        who, number = update.trainer, update.number
        self._round[who] = update
        self._close_if_complete()
        self._wait(lambda: self.central.applied.get(who, 0) >= number, meanwhile, self._missing)
        return who in self._dropped

    def _missing(self) -> str:
        return self._late(self.live.keys() - self._round.keys())

    def _close_if_complete(self) -> None:
        if self._round and self.complete and self._round.keys() >= self.live.keys():
            updates = list(self._round.values())
            self._round.clear()
            self._lock.notify_all()
            self._dropped = self.central.apply(updates)
            for each in updates:
                if each.trainer in self.live:
                    self.live[each.trainer] += 1
