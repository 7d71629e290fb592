"""How long do collectives take, by size, link and number of workers?

    python -m thinwire_lab.papers.shared.sweep --json papers/runs/sweep.json

Workers in network namespaces of this machine, each behind its own link; Gloo. `collectives`: seconds of a dense
all-reduce and all-gather over so many bytes a rank, medians, and the least and greatest, from the start of the last
rank to the end of the last. `pings`: one-way seconds.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor

from thinwire_lab.cluster.link import Rate, parse_rate
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.cluster.rounds import doing, durations, events, ping, start_together
from thinwire_lab.cluster.worker import Emit
from thinwire_lab.inputs import prepare_file, write_document
from thinwire_lab.machine import environment
from thinwire_lab.papers.shared.judging import Range
from thinwire_lab.papers.shared.shelf import Combined, Document

HANDLER = "thinwire_lab.papers.shared.sweep:handle"
SCHEMA = "thinwire.sweep/1"
SMALL = [2**8, 2**12]  # bytes, for collectives alone
SIZES = [2**power for power in range(16, 28, 2)] + [2**27]
LEAD = 0.05  # seconds for all ranks to settle before they start together

console = Console()


def main(
    json: Annotated[Path, typer.Option(help="Write the results here.")],
    worlds: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "2,3,4,6,8",
    links: Annotated[str, typer.Option(help="Rates of the workers' links.")] = "100mbit,1gbit,10gbit",
    largest: Annotated[int, typer.Option(help="Bytes of the largest tensor.")] = SIZES[-1],
    longest: Annotated[float, typer.Option(help="Leave out collectives that take so many seconds.")] = 6.0,
    repeats: Annotated[int, typer.Option(help="Times that each is measured.")] = 3,
) -> None:
    prepare_file(json)
    sizes, counts = [size for size in SIZES if size <= largest], [int(count) for count in worlds.split(",")]
    found: dict[str, list[Any]] = {"collectives": [], "pings": []}
    for text in links.split(","):
        for world in counts:
            rate = parse_rate(text)
            with Cluster(world, rate, HANDLER) as cluster:
                console.print(f"{world} workers, {cluster.label}", style="dim", highlight=False)
                link = text if cluster.throttled else "unthrottled"
                found["collectives"] += list(_collectives(cluster, rate, link, world, sizes, longest, repeats))
                pings = events(cluster, task="ping", repeats=repeats) if world == 2 else []
                found["pings"] += [{"link": link, **event} for event in pings]
    write_document(json, SCHEMA, environment=environment(repeats=repeats), **found)


def _collectives(
    cluster: Cluster, rate: Rate | None, link: str, world: int, sizes: Sequence[int], longest: float, repeats: int
) -> Iterator[dict[str, Any]]:
    for kind in COLLECTIVES:
        for size in (*SMALL, *sizes):
            if rate is not None and 8 * size * (world - 1) / rate.bits_per_second > longest:
                continue
            times = durations(events(cluster, task="collective", kind=kind, nbytes=size, repeats=repeats))
            spread = {"seconds": median(times), "least": min(times), "most": max(times)}
            yield {"kind": kind, "link": link, "world": world, "bytes": size} | spread


def _collective(emit: Emit, *, kind: str, nbytes: int, repeats: int) -> None:
    """Emit when this rank started and ended each repeat of a collective over so many bytes a rank."""
    for repeat in range(repeats + 1):
        call = COLLECTIVES[kind](torch.ones(nbytes // 4))
        start_together(LEAD)
        start = time.perf_counter()
        call()
        if repeat:
            emit({"repeat": repeat, "start": start, "end": time.perf_counter()})


def _all_gather(x: Tensor) -> Callable[[], object]:
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    return lambda: dist.all_gather(rows, x)


handle = doing(collective=_collective, ping=ping)
COLLECTIVES: dict[str, Callable[[Tensor], Callable[[], object]]] = {
    "all-reduce": lambda x: lambda: dist.all_reduce(x),
    "all-gather": _all_gather,
}


def _repeats(found: Mapping[str, Any]) -> str:
    apart = median(row["most"] / row["least"] for row in found["collectives"])
    return f"repeats to \N{MULTIPLICATION SIGN} {apart:.2f}"


SWEEP = Document(
    name="sweep",
    words="python -m thinwire_lab.papers.shared.sweep",
    quick="--worlds 2,4 --links 1gbit --largest 1048576 --repeats 1",
    apart=_repeats,
)
REPEATED = replace(
    SWEEP,
    name="sweep-repeated",
    words=f"{SWEEP.words} --links 100mbit,1gbit --largest 67108864 --repeats 9",
    more="more cores",
)
"""The sweep at the rates that judge, with the repeats that it takes to tell a formula from noise."""
ROUTES = Document(
    name="routes",
    words="python -m thinwire_lab.papers.shared.timed routes",
    quick="--worlds 2,4 --largest 1048576 --repeats 1",
)


def _apart(found: Mapping[str, Any]) -> str:
    times = [row["seconds"] for row in found["rows"]]
    most = max(max(each["p80"] / each["p50"] - 1, 1 - each["p20"] / each["p50"]) for each in times)
    return f"\N{PLUS-MINUS SIGN} {most:.0%}"


EXCHANGES = Document(
    name="exchanges",
    words="python -m thinwire_lab.studies.exchanges",
    quick="--worlds 2 --links none --numel 20000 --repeats 1",
    apart=_apart,
)
WIDE = replace(
    EXCHANGES,
    name="exchanges-wide",
    words=f"{EXCHANGES.words} --worlds 16,32 --links 10mbit,30mbit,100mbit --density 0.02",
)
"""Links so slow that two cores keep up with so many workers."""


class Exchanged(NamedTuple):
    """Milliseconds, and their 20th and 80th percentile."""

    ms: float
    around: Range


def exchanges(found: Mapping[str, Any], link: str, world: int) -> dict[str, Exchanged]:
    rows = (row for row in found["rows"] if row["link"] == link and row["world_size"] == world)
    times = ((row, {name: 1e3 * each for name, each in row["seconds"].items()}) for row in rows)
    return {row["exchange"]: Exchanged(ms["p50"], (ms["p20"], ms["p80"])) for row, ms in times}


SYNCHRONISING = Combined(documents=(SWEEP, ROUTES), combine=lambda found: found[0] | found[1])

Found = Mapping[str, Any]


def collective(found: Found, kind: str, link: str, world: int, of: str = "seconds") -> tuple[list[int], list[float]]:
    """Return sizes in bytes, rising, and the seconds of each; without sizes that took too long to be measured.

    of: "seconds" for the median, or the "least" or the "most" of the repeats.
    """
    rows = [r for r in found["collectives"] if (r["kind"], r["link"], r["world"]) == (kind, link, world)]
    rows.sort(key=lambda row: row["bytes"])
    return [row["bytes"] for row in rows], [row[of] for row in rows]


def seconds(found: Found, kind: str, link: str, world: int, nbytes: float, of: str = "seconds") -> float:
    """Return the seconds of a collective over so many bytes a rank: between two sizes, or on from the two largest."""
    sizes, times = collective(found, kind, link, world, of)
    if nbytes > sizes[-1]:
        slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        return times[-1] + slope * (nbytes - sizes[-1])
    return float(np.interp(nbytes, sizes, times))


def routes(found: Found, route: str, world: int, density: float) -> Sequence[Mapping[str, Any]]:
    """Return what a route's encoding and decoding took, by size."""
    rows = [r for r in found["routes"] if (r["route"], r["world"], r["density"]) == (route, world, density)]
    return sorted(rows, key=lambda row: row["bytes"])


def parts(found: Found, row: Mapping[str, Any], link: str, decode: str = "decode") -> tuple[float, float, float]:
    """Return the seconds of a route's encoding, of the all-gather, as the sweep found it, and of decoding."""
    return row["encode"], seconds(found, "all-gather", link, row["world"], row["sent"]), row[decode]


def links(found: Found) -> list[str]:
    """Return the links that were measured, the slowest first."""
    return list(dict.fromkeys(row["link"] for row in found["collectives"]))


KEPT = ("100mbit", "1gbit")
"""Rates that the machine keeps: at 10 Gbit/s two cores are busy with copying, and times jump by a factor of ten."""


def kept(found: Found) -> list[str]:
    """Return the links that judge: those whose rate the machine keeps, or all where only others were measured."""
    return [link for link in links(found) if link in KEPT] or links(found)


def worlds(found: Found) -> list[int]:
    """Return the numbers of workers, rising."""
    return sorted({row["world"] for row in found["collectives"]})


if __name__ == "__main__":
    typer.run(main)
