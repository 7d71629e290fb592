"""Every exchange on the same vectors, with 2, 4 and 8 workers: bytes against the formulas, times against the models.

    python -m thinwire_lab.studies.exchanges --json out.json

The workers share this machine, each behind its own link. Vectors are random, so the ranks' picks are independent, as
the formulas assume. For each exchange you see: the bytes per worker, as declared, as the formula predicts, and as the
link counts them, with the packets' headers (66 each) counted apart; the time, beside the model's prediction from a
latency and a bandwidth that two workers found by ping-pong; the time of the same exchange with the links lifted;
whether all ranks hold the same bits; and whether these are the float64 sum. The models know messages only. Computing,
and waiting for a turn on the shared cores, come on top: they are what is left with the links lifted. Of the tree it
also says what each message took on the path that ended last, and what was between them.

Without permission for network namespaces it says so, and runs unthrottled, with no bytes counted on the link.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor

from thinwire.codecs import BlockTopK, Codec
from thinwire.exchanges import Exchange, Link, OwnerSharded
from thinwire.payloads import Payload
from thinwire.recipes import METHODS
from thinwire.trace import Recorder, listen
from thinwire_lab.bench.rows import HEADER_BYTES, percentiles
from thinwire_lab.cluster.link import Meter, Rate, parse_rate
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.cluster.rounds import doing, durations, events, line, ping, start_together
from thinwire_lab.cluster.worker import Emit
from thinwire_lab.inputs import prepare_file, write_document
from thinwire_lab.machine import environment
from thinwire_lab.show.table import plain
from thinwire_lab.show.terminal import print_titled
from thinwire_lab.studies.exchange_bytes import sent_bytes
from thinwire_lab.studies.exchange_path import Hop, path

LEAD = 0.1  # seconds for all ranks to settle before they start together


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to sum sparse vectors. `exact`: it gives exactly the sum of what the ranks sent."""

    codec: Callable[[float], Codec]
    exchange: Exchange
    exact: bool = True


def _of(method: str, *, exact: bool = True) -> Way:
    """Return the way of a catalogue method."""
    found = METHODS[method]
    return Way(codec=lambda density: found.large(density).codec, exchange=found.large().exchange, exact=exact)


WAYS = {
    "dense": _of("dense"),
    "all-gather": _of("topk"),
    "tree": _of("gtopk", exact=False),
    "doubling": _of("doubling"),
    "owner-sharded": _of("owner"),
    "owner-sharded, blocks": Way(codec=lambda density: BlockTopK(density=density), exchange=OwnerSharded()),
    "union, blocks": _of("s2_union"),
    "sketch, blocks": _of("s2_reducer", exact=False),
}


def vector(rank: int, numel: int) -> Tensor:
    """Return normal float32 numbers, the same for a rank in every job: multiples of 2⁻¹², so that sums are exact."""
    return (torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 2**12).round() / 2**12


def _measure(emit: Emit, *, way: str, numel: int, density: float, repeats: int) -> None:
    """Emit "round" for every repeat but the first, which warms up, and finally "sum"."""
    chosen, meter = WAYS[way], Meter()
    codec, world = chosen.codec(density), dist.get_world_size()
    mine = codec.encode(vector(dist.get_rank(), numel))
    for repeat in range(repeats + 1):
        event, total = _exchange(chosen.exchange, mine, meter, seed=repeat)
        if repeat:
            formula = sent_bytes(chosen.exchange, mine, world)
            emit({"kind": "round", "rank": dist.get_rank(), "repeat": repeat, "formula": formula} | event)
    right = None
    if chosen.exact and dist.get_rank() == 0:
        every = (codec.encode(vector(rank, numel)).dense().to(torch.float64) for rank in range(world))
        right = torch.equal(total.to(torch.float64), sum(every))  # type: ignore[arg-type]  # one vector at a time
    digest = hashlib.sha256(total.numpy().tobytes()).hexdigest()
    emit({"kind": "sum", "digest": digest, "right": right, "payload": mine.nbytes})


def _exchange(exchange: Exchange, mine: Payload, meter: Meter, *, seed: int) -> tuple[dict[str, Any], Tensor]:
    group = dist.group.WORLD
    assert group is not None
    start_together(LEAD)
    meter.skip()
    with listen(Recorder()) as recorder:
        start = time.perf_counter()
        done = exchange.start(mine, group, seeds=[seed]).wait()
        end = time.perf_counter()
    event = {"start": start, "end": end, "spans": recorder.spans, "declared": done.sent_bytes}
    return event | meter.drain(), done.total.dense()


handle = doing(measure=_measure, ping=ping)


Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One exchange at one number of workers. Bytes are means per worker; `excess`: measured over declared + headers.

    `lifted_seconds`: without the links' limits. `identical`: all ranks hold the same bits. `right`: they are the
    float64 sum; None if that is not promised. `path`, and the seconds of its messages: see `exchange_path`, of the
    repeat in the middle; None where no single messages are sent.
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
    message_seconds: dict[str, float] | None
    path: Sequence[Hop] | None
    identical: bool
    right: bool | None


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
    payload, paths = fmean(event["payload"] for event in sums), _paths(rounds)
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
        message_seconds=asdict(percentiles(list(map(_messages, paths)))) if paths else None,
        path=paths[len(paths) // 2] if paths else None,
        identical=len({event["digest"] for event in sums}) == 1,
        right=next((event["right"] for event in sums if event["right"] is not None), None),
    )


def _rounds(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event["kind"] == "round"]


def _paths(rounds: Iterable[Event]) -> list[Sequence[Hop]]:
    """Return the path of every repeat in which single messages were sent, by the seconds of its messages."""
    repeats = defaultdict[int, list[Event]](list)
    for event in rounds:
        repeats[event["repeat"]].append(event)
    return sorted(filter(None, map(path, repeats.values())), key=_messages)


def _messages(hops: Iterable[Hop]) -> float:
    return sum(hop.seconds for hop in hops)


HANDLER = "thinwire_lab.studies.exchanges:handle"
SCHEMA = "thinwire.exchanges/2"

console = Console()


def main(
    worlds: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "2,4,8",
    links: Annotated[str, typer.Option(help="Rates of the workers' links, or none.")] = "100mbit,1gbit",
    numel: Annotated[int, typer.Option(help="Elements of each vector.")] = 1_000_000,
    density: Annotated[float, typer.Option(help="Share of the elements that are sent.")] = 0.01,
    repeats: Annotated[int, typer.Option(help="Times that each exchange is measured.")] = 7,
    json: Annotated[Path | None, typer.Option(help="Write the results here.")] = None,
) -> None:
    """Compare exchanges; ends with status 1 where ranks disagree or a sum is wrong."""
    prepare_file(json)
    job = {"numel": numel, "density": density, "repeats": repeats}
    counts = _counts(worlds)
    found = [_compare(rate, counts, job) for rate in _rates(links)]
    fits, rows = [link for link, _ in found], [each for _, many in found for each in many]
    show(rows, fits)
    about = environment(links=[asdict(found) for found in fits], **job)
    write_document(json, SCHEMA, environment=about, rows=[asdict(each) for each in rows])
    raise typer.Exit(int(not all(each.identical and each.right is not False for each in rows)))


def _counts(worlds: str) -> list[int]:
    counts = [int(count) for count in worlds.split(",") if count.strip().isdigit()]
    if len(counts) <= worlds.count(",") or min(counts) < 2:
        raise typer.BadParameter(f"--worlds is {worlds!r}; expected numbers from 2 on, separated by commas")
    return counts


def _rates(links: str) -> list[Rate | None]:
    """Read the rates; one is enough if links cannot be limited."""
    rates = [parse_rate(text) for text in links.split(",")]
    with Cluster(1, rates[0], HANDLER) as cluster:
        if rates[0] is None or cluster.throttled:
            return rates
        console.print(f"{cluster.label}: times say nothing about a slow link, and bytes are not counted", style="red")
        return [None]


def _compare(rate: Rate | None, worlds: list[int], job: dict[str, Any]) -> tuple[Fit, list[Row]]:
    """Measure the link with the workers of every cluster, then the exchanges on it."""
    pings: list[Event] = []
    emitted: list[tuple[str, int, list[Event], list[Event]]] = []
    for world in worlds:
        with Cluster(world, rate, HANDLER) as cluster:
            console.print(f"{world} workers, {cluster.label}", style="dim", highlight=False)
            link = str(rate) if cluster.throttled else "unthrottled"
            pings += events(cluster, task="ping", repeats=job["repeats"])
            limited = [events(cluster, task="measure", way=way, **job) for way in WAYS]
            cluster.limit(None)
            lifted = [events(cluster, task="measure", way=way, **job) for way in WAYS]
            emitted += zip(WAYS, [world] * len(WAYS), limited, lifted, strict=True)
    slope, latency, r2 = line(pings)
    found = Fit(link=link, latency=latency, bandwidth=1 / slope, r2=r2)
    return found, [row(*each, found) for each in emitted]


def show(rows: list[Row], fits: list[Fit]) -> None:
    """Print a table for each link and number of workers, and the paths there."""
    for found in fits:
        link = f"{1e3 * found.latency:.2f} ms per message, {8e-6 * found.bandwidth:.1f} Mbit/s (R² {found.r2:.4f})"
        mine = [each for each in rows if each.link == found.link]
        for world in dict.fromkeys(each.world_size for each in mine):
            title = f"{world} workers, {found.link}: {link}"
            here = [each for each in mine if each.world_size == world]
            print_titled(console, plain([asdict(each) | {"path": len(each.path or ())} for each in here], title=title))
            for each in here:
                if each.path:
                    title = f"{each.exchange}: the messages that the last one waited for"
                    print_titled(console, plain([asdict(hop) for hop in each.path], title=title))


if __name__ == "__main__":
    typer.run(main)
