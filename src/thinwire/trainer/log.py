"""The updates that a server may yet lose, and that a trainer then sends once more."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from thinwire.wire.frames import Bytes, Flag


@final
@dataclass(frozen=True, kw_only=True)
class Sent:
    """An update: its number, the version that it was computed on, its flags and the parts of its body."""

    number: int
    version: int
    flags: Flag
    body: Sequence[Bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of its body."""
        return sum(map(len, self.body))


@final
class Log:
    """Updates in their order, of `room` bytes at most, or a single one. The caller holds the channel's lock."""

    def __init__(self, room: int) -> None:
        self._room, self._updates, self.nbytes = room, deque[Sent](), 0

    def __len__(self) -> int:
        return len(self._updates)

    def fits(self, nbytes: int) -> bool:
        """Whether there is room for an update of so many bytes."""
        return not self._updates or self.nbytes + nbytes <= self._room

    def half_full(self, nbytes: int) -> bool:
        """Whether an update of so many bytes makes it more than half full."""
        return self.nbytes + nbytes > self._room // 2

    def add(self, update: Sent) -> None:
        """Note an update."""
        self._updates.append(update)
        self.nbytes += update.nbytes

    def after(self, number: int) -> Sent | None:
        """Return the first update after this number, if there is one."""
        return next((each for each in self._updates if each.number > number), None)

    def forget(self, number: int) -> None:
        """Drop all updates up to this number."""
        while self._updates and self._updates[0].number <= number:
            self.nbytes -= self._updates.popleft().nbytes

    def clamp(self, version: int) -> None:
        """Note that the server has gone back to this version: nothing was computed on a newer one."""
        self._updates = deque(replace(each, version=min(each.version, version)) for each in self._updates)
