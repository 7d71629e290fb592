"""What two looks at a server tell of each trainer: its pace, staleness, bytes and loss."""

from dataclasses import dataclass

from thinwire.server.status import ServerStatus, TrainerStatus
from thinwire_lab.show.table import Column, Table, tabulated
from thinwire_lab.show.units import UNKNOWN, duration, human_bytes, loss_text

_SHORT = 8  # hexadecimal digits of a trainer's number that tell it from others


@dataclass(frozen=True, kw_only=True)
class Look:
    """A server's status, and when it was asked for, in `time.monotonic` seconds."""

    at: float
    status: ServerStatus


@dataclass(frozen=True, kw_only=True)
class Pace:
    """A trainer between two looks. Of one that has just come, what lies between is not known, so `before` is `now`."""

    name: str
    now: TrainerStatus
    before: TrainerStatus
    seconds: float

    def each_second(self, amount: float) -> float:
        """Return so much in a second; 0 if no time has passed."""
        return amount / self.seconds if self.seconds else 0.0

    def rate(self, of: str) -> str:
        """Return how many bytes of a kind came in between, in a second."""
        return human_bytes(self.each_second(getattr(self.now, of) - getattr(self.before, of)))

    @property
    def updates(self) -> int:
        """How many have come in between."""
        return self.now.updates - self.before.updates

    @property
    def staleness(self) -> str:
        """The mean over these updates, or over all there were if none has come in between."""
        if self.updates:
            return f"{(self.now.behind - self.before.behind) / self.updates:.1f}"
        return f"{self.now.behind / self.now.updates:.1f}" if self.now.updates else UNKNOWN


def view(address: str, before: Look, now: Look) -> Table:
    """Return the table of a server's trainers, with what the server itself did as its title and notes."""
    return tabulated(
        [
            Column(heading="trainer", text=lambda pace: pace.name[:_SHORT], left=True),
            Column(heading="updates", text=lambda pace: f"{pace.now.updates:,}"),
            Column(heading="steps\na second", text=lambda pace: f"{pace.each_second(pace.updates):.1f}"),
            Column(heading="staleness", text=lambda pace: pace.staleness),
            Column(heading="up\na second", text=lambda pace: pace.rate("received_bytes")),
            Column(heading="down\na second", text=lambda pace: pace.rate("sent_bytes")),
            Column(heading="loss", text=lambda pace: UNKNOWN if pace.now.loss is None else loss_text(pace.now.loss)),
            Column(heading="last update", text=lambda pace: f"{duration(pace.now.quiet)} ago"),
        ],
        _paces(before, now),
        title=_title(address, before, now),
    )


def _paces(before: Look, now: Look) -> list[Pace]:
    earlier, seconds = before.status.trainers, now.at - before.at
    return [
        Pace(name=name, now=each, before=_same(earlier.get(name, each), each), seconds=seconds)
        for name, each in sorted(now.status.trainers.items())
    ]


def _same(earlier: TrainerStatus, now: TrainerStatus) -> TrainerStatus:
    """Return the earlier status, unless the trainer has joined anew since: then its bytes began anew."""
    return earlier if earlier.received_bytes <= now.received_bytes else now


def _title(address: str, before: Look, now: Look) -> str:
    status, seconds = now.status, now.at - before.at
    steps = (status.version - before.status.version) / seconds if seconds else 0.0
    gone = len(status.updates.keys() - status.trainers.keys())
    here = len(status.trainers)
    counts = f"{status.version:,} steps, {steps:.1f} a second · {here} trainer{'' if here == 1 else 's'}"
    counts += f", {gone} gone" if gone else ""
    counts += f" · {status.dropped:,} updates not finite" if status.dropped else ""
    total = f"{human_bytes(status.received_bytes)} in, {human_bytes(status.sent_bytes)} out"
    return f"{address} · {counts} · {total}"
