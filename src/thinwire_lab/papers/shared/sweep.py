"""How long do collectives take, by size, link and number of workers?

    python -m thinwire_lab.papers.shared.sweep --json papers/runs/sweep.json

Workers in network namespaces of this machine, each behind its own link; Gloo. `collectives`: seconds of a dense
all-reduce and all-gather over so many bytes a rank, medians, and the least and greatest, from the start of the last
rank to the end of the last. `pings`: one-way seconds.
"""

import json as js
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from thinwire_lab.cluster.link import Rate, parse_rate
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.papers.shared.report import environment
from thinwire_lab.papers.shared.sweeping import COLLECTIVES

HANDLER = "thinwire_lab.papers.shared.sweeping:handle"
SCHEMA = "thinwire.sweep/1"
SMALL = [2**8, 2**12]  # bytes, for collectives alone
SIZES = [2**power for power in range(16, 28, 2)] + [2**27]
PINGS = [1_000, 16_000, 64_000, 256_000, 1_000_000, 4_000_000]

console = Console()


def main(
    json: Annotated[Path, typer.Option(help="Write the results here.")],
    worlds: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "2,3,4,6,8",
    links: Annotated[str, typer.Option(help="Rates of the workers' links.")] = "100mbit,1gbit,10gbit",
    largest: Annotated[int, typer.Option(help="Bytes of the largest tensor.")] = SIZES[-1],
    longest: Annotated[float, typer.Option(help="Leave out collectives that take so many seconds.")] = 6.0,
    repeats: Annotated[int, typer.Option(help="Times that each is measured.")] = 3,
) -> None:
    """Sweep."""
    sizes, counts = [size for size in SIZES if size <= largest], [int(count) for count in worlds.split(",")]
    found: dict[str, list[Any]] = {"collectives": [], "pings": []}
    for text in links.split(","):
        for world in counts:
            rate = parse_rate(text)
            with Cluster(world, rate, HANDLER) as cluster:
                console.print(f"{world} workers, {cluster.label}", style="dim", highlight=False)
                link = text if cluster.throttled else "unthrottled"
                found["collectives"] += list(_collectives(cluster, rate, link, world, sizes, longest, repeats))
                found["pings"] += list(_pings(cluster, link, world, repeats))
    json.write_text(js.dumps({"schema": SCHEMA, "environment": environment({"repeats": repeats}), **found}, indent=1))


def _collectives(
    cluster: Cluster, rate: Rate | None, link: str, world: int, sizes: Sequence[int], longest: float, repeats: int
) -> Iterator[dict[str, Any]]:
    for kind in COLLECTIVES:
        for size in (*SMALL, *sizes):
            if rate is not None and 8 * size * (world - 1) / rate.bits_per_second > longest:
                continue
            times = _durations(_events(cluster, task="collective", kind=kind, nbytes=size, repeats=repeats))
            spread = {"seconds": median(times), "least": min(times), "most": max(times)}
            yield {"kind": kind, "link": link, "world": world, "bytes": size} | spread


def _pings(cluster: Cluster, link: str, world: int, repeats: int) -> Iterator[dict[str, Any]]:
    for event in _events(cluster, task="ping", sizes=PINGS, repeats=repeats) if world == 2 else ():
        yield {"link": link} | event


def _events(cluster: Cluster, **job: Any) -> list[dict[str, Any]]:
    return [event for _, event in cluster.run(job)]


def _durations(events: Sequence[dict[str, Any]]) -> list[float]:
    """Return each repeat's time from the start of the last rank to the end of the last."""
    repeats = defaultdict(list)
    for event in events:
        repeats[event["repeat"]].append(event)
    return [max(e["end"] for e in ranks) - max(e["start"] for e in ranks) for ranks in repeats.values()]


if __name__ == "__main__":
    typer.run(main)
