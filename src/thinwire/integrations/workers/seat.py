"""Who begins the training under a store: one worker, and nobody else as long as anybody has its state.

The key `seat` has three words: the founder, where it listens, and a sign. Until the first outer step everybody who has
the training's state changes the sign every second, and then one of them writes `_BEGUN`, for good, before it sends a
share. A seat may be taken once its sign has stood still for `LOST` seconds in which another worker kept looking. The
worker that had it finds out before its first outer step, and takes over the other one's state.
"""

import logging
import secrets
import threading
from collections.abc import Collection
from contextlib import suppress
from typing import final

from thinwire.errors import StateError
from thinwire.integrations.workers import agreement
from thinwire.integrations.workers.awake import monotonic
from thinwire.integrations.workers.directory import Directory, StoreError

_log = logging.getLogger("thinwire")
_KEY, _BEGUN = "seat", "begun"


@final
class Seat:
    """What this worker knows of it. `training`: the founder of the one whose state it has, and where that listens."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self.training = self._own = self._lost = ""
        self.begun, self._said = False, False
        self._turn = threading.Lock()
        self._seen, self._looked = "", monotonic()
        self._still = self._waited = 0.0  # for how long it had the same sign, and founder, while this worker looked

    @property
    def lost(self) -> bool:
        """Whether the seat is that of another training."""
        return self._lost == self.training != ""

    def join(self, training: str, *, begun: bool = False) -> None:
        """Note that this worker has the state of a training, which may have begun."""
        if self.training != training:
            self.training, self.begun = training, begun

    def take(self, own: str, *, enough: bool, present: Collection[str] = ()) -> bool:
        """Take the seat if it is free, and there are `enough` workers. Return whether this worker has it.

        Args:
            own: What this worker's training is called.
            enough: Whether there are.
            present: Who is reached. A founder among them may be busy for long before it has a state.

        Raises:
            StateError: If another one has it for long, and can therefore not be reached.
            StoreError: If the store does not answer.
        """
        held, seen, before = self._directory.get(_KEY), self._seen, self._looked
        owner, _, sign = held.rpartition(" ")
        away = owner.partition(" ")[0] not in present
        self._seen, self._looked = held, monotonic()
        passed = min(self._looked - before, 1.0)  # the store may not have answered for long
        self._still = self._still + passed if away and held == seen else 0.0
        self._waited = self._waited + passed if away and owner == seen.rpartition(" ")[0] else 0.0
        if held and (sign == _BEGUN or self._still <= agreement.LOST):
            self._complain(owner, begun=sign == _BEGUN)
            return False
        mine = f"{own} {secrets.token_hex(4)}"
        if not enough or self._directory.replace(_KEY, held, mine) != mine:
            return False
        self._own, self._lost = own, ""
        self.join(own)
        return True

    def _complain(self, owner: str, *, begun: bool) -> None:
        if self._waited <= agreement.LOST:
            return
        name, _, address = owner.partition(" ")
        host, _, port = address.rpartition(":")
        text = (
            f"worker {name} at {self._directory.reached(host)}:{port} has begun this run, and none of its workers can "
            "be reached from here: let workers reach each other's ports or, if all are gone, restart the store"
        )
        if begun or self._waited > 2 * agreement.LOST:
            raise StateError(text)
        if not self._said:
            self._said = True
            _log.warning("%s. Trying for %g s more at most", text, agreement.LOST)

    def hold(self, *, begins: bool = False) -> None:
        """Show that this worker's training lives; with `begins`, for good. Raises StoreError."""
        tried = False
        with self._turn:
            while (training := self.training) and not self.lost:
                held = self._directory.get(_KEY)
                owner, _, sign = held.rpartition(" ")
                if held and owner != training and (sign == _BEGUN or not self.begun):
                    self._lost = "" if self.begun else training
                    return  # two that have begun, as the store was restarted, compare their states
                begun = begins or self.begun or (owner == training and sign == _BEGUN)
                if tried and owner == training and not begun:
                    return  # another one has shown it
                tried, mine = True, f"{training} {_BEGUN if begun else secrets.token_hex(4)}"
                if held == mine or self._directory.replace(_KEY, held, mine) == mine:
                    self.begun = begun
                    return

    def leave(self) -> None:
        """Give it up, unless the training has begun."""
        with self._turn, suppress(StoreError):
            training, self.training = self.training, ""
            if training == self._own and not self._directory.away:
                held = self._directory.get(_KEY)
                owner, _, sign = held.rpartition(" ")
                if owner == training and sign != _BEGUN:
                    self._directory.replace(_KEY, held, "")
