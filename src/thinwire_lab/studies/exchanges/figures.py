"""From what workers emit to rows, and from ping-pong times to a link."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from thinwire.exchanges import Link
from thinwire_lab.bench.rows import HEADER_BYTES, percentiles
from thinwire_lab.cluster.rounds import durations
from thinwire_lab.studies.exchanges.worker import WAYS

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One exchange at one number of workers. Bytes are means per worker; `excess`: measured over declared + headers.

    `lifted_seconds`: without the links' limits. `identical`: all ranks hold the same bits. `right`: they are the
    float64 sum; None if that is not promised.
    """

    exchange: str
    world_size: int
    link: str
    declared_bytes: float
    formula_bytes: float
    measured_bytes: float | None
    header_bytes: float | None
    excess: float | None
    seconds: dict[str, float]
    lifted_seconds: dict[str, float]
    predicted_seconds: float
    identical: bool
    right: bool | None

    @property
    def off_formula(self) -> float:
        """Relative deviation of the declared bytes from the formula."""
        return self.declared_bytes / self.formula_bytes - 1

    @property
    def off_measured(self) -> float | None:
        """Relative deviation of the measured bytes from the formula with headers."""
        if self.measured_bytes is None or self.header_bytes is None:
            return None
        return self.measured_bytes / (self.formula_bytes + self.header_bytes) - 1


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A link as ping-pong measures it. `r2`: the share of variance in the times that a line over the bytes explains."""

    link: str
    latency: float
    bandwidth: float
    r2: float


def row(way: str, world_size: int, events: Sequence[Event], lifted: Sequence[Event], found: Fit) -> Row:
    """Sum up what all ranks emitted about one exchange, behind their links and with these lifted."""
    rounds = _rounds(events)
    sums = [event for event in events if event["kind"] == "sum"]
    declared = fmean(event["declared"] for event in rounds)
    counted = all("measured" in event for event in rounds)
    measured = fmean(event["measured"] for event in rounds) if counted else None
    headers = HEADER_BYTES * fmean(event["packets"] for event in rounds) if counted else None
    link = Link(latency=found.latency, bandwidth=found.bandwidth)
    payload = fmean(event["payload"] for event in sums)
    return Row(
        exchange=way,
        world_size=world_size,
        link=found.link,
        declared_bytes=declared,
        formula_bytes=fmean(event["formula"] for event in rounds),
        measured_bytes=measured,
        header_bytes=headers,
        excess=None if measured is None or headers is None else measured / (declared + headers) - 1,
        seconds=asdict(percentiles(durations(rounds))),
        lifted_seconds=asdict(percentiles(durations(_rounds(lifted)))),
        predicted_seconds=WAYS[way].exchange.seconds(payload, world_size, link),
        identical=len({event["digest"] for event in sums}) == 1,
        right=next((event["right"] for event in sums if event["right"] is not None), None),
    )


def _rounds(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event["kind"] == "round"]
