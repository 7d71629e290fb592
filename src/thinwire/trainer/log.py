"""What a trainer has to say to a server, in order: updates that the server may yet lose, and questions for rows."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from torch import Tensor

from thinwire.wire.frames import NONE, Bytes, Flag, Kind


@final
@dataclass(frozen=True, kw_only=True)
class Sent:
    """An UPDATE, with the version that it was computed on, or a FETCH of the rows `keys`."""

    kind: Kind
    number: int
    body: Sequence[Bytes]
    version: int = 0
    flags: Flag = NONE
    keys: Sequence[Tensor] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its body."""
        return sum(map(len, self.body))


@final
class Log:
    """Updates that are not on disk, and questions: the first `under_way` have been sent over this connection.

    `open` are the questions without an answer. The caller holds the channel's lock.
    """

    def __init__(self) -> None:
        self._items, self.open = deque[Sent](), dict[int, Sent]()
        self.under_way = self.nbytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Sent) -> None:
        """Note what is to be sent."""
        self._items.append(item)
        self.nbytes += item.nbytes
        if item.kind is Kind.FETCH:
            self.open[item.number] = item

    def next(self) -> Sent | None:
        """Return what is to be sent next, if anything is."""
        while self.under_way < len(self._items):
            item = self._items[self.under_way]
            if item.kind is Kind.UPDATE or item.number in self.open:
                return item
            self.under_way += 1
        return None

    def forget(self, durable: int) -> None:
        """Drop what need not be sent again: updates up to this number, and questions that were answered."""
        while self._items and not self._waits(self._items[0], durable):
            self.nbytes -= self._items.popleft().nbytes
            self.under_way = max(0, self.under_way - 1)

    def restart(self, applied: int, floor: int) -> None:
        """Note that this is another connection, to a server that has applied so many updates and went back to `floor`.

        So nothing was computed on a newer version.
        """
        self._items = deque(replace(each, version=min(each.version, floor)) for each in self._items)
        self.under_way = next((i for i, x in enumerate(self._items) if self._waits(x, applied)), len(self._items))

    def _waits(self, item: Sent, number: int) -> bool:
        return item.number > number if item.kind is Kind.UPDATE else item.number in self.open
