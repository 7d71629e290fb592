"""What does an exchange of single messages wait for? The path of messages that ends with the last one to arrive."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_NAME = re.compile(r"(send to|receive from) (\d+)")
"""Of the spans in `thinwire.collectives.peers`."""
Pair = tuple[int, int]
"""The ranks that send and receive; it has one message in each direction."""


class Took(NamedTuple):
    """From when to when something took."""

    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Hop:
    """A message on the path, and the seconds since the one before, as by merging or waiting for a core.

    It counts from when both ranks were there, and with what its sender had to send before.
    """

    sender: int
    receiver: int
    seconds: float
    waited: float


def path(ranks: Iterable[Mapping[str, Any]]) -> Sequence[Hop]:
    """Return the path of one repeat, its first message first; nothing if there were no single messages.

    ranks: what each rank emitted, with its `rank`, `start`, and `spans`.
    """
    messages = _Messages()
    for each in ranks:
        messages.add(**each)
    return list(messages.back())[::-1]


@dataclass
class _Messages:
    begun: dict[int, float] = field(default_factory=dict)
    sends: dict[Pair, Took] = field(default_factory=dict)
    arrivals: dict[Pair, Took] = field(default_factory=dict)

    def add(self, rank: int, start: float, spans: Iterable[tuple[str, float, float]], **_: Any) -> None:
        self.begun[rank] = start
        for name, *took in spans:
            call = _NAME.fullmatch(name)
            if call and call[1] == "send to":
                self.sends[rank, int(call[2])] = Took(*took)
            elif call:
                self.arrivals[int(call[2]), rank] = Took(*took)

    def back(self) -> Iterator[Hop]:
        """Yield the hops from the last to the first."""
        pair = self._last(self.arrivals)
        while pair:
            sent, arrived = self.sends[pair], self.arrivals[pair]
            start, late = max((sent.start, pair[0]), (arrived.start, pair[1]))
            before = self._last(each for each, took in self.arrivals.items() if each[1] == late and took.end <= start)
            since = self.arrivals[before].end if before else self.begun[late]
            sending = sum(took.end - took.start for took in self._sent(late, since, start))
            seconds = arrived.end - start + sending
            yield Hop(sender=pair[0], receiver=pair[1], seconds=seconds, waited=arrived.end - since - seconds)
            pair = before

    def _last(self, pairs: Iterable[Pair]) -> Pair | None:
        return max(pairs, key=lambda pair: self.arrivals[pair].end, default=None)

    def _sent(self, rank: int, since: float, until: float) -> Iterator[Took]:
        return (took for pair, took in self.sends.items() if pair[0] == rank and since <= took.start < until)
