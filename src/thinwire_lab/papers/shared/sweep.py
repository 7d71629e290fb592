"""How long do collectives take, by size, link and number of workers?

    python -m thinwire_lab.papers.shared.sweep --json papers/runs/sweep.json

Workers in network namespaces of this machine, each behind its own link; Gloo. `collectives`: seconds of a dense
all-reduce and all-gather over so many bytes a rank, medians, and the least and greatest, from the start of the last
rank to the end of the last. `pings`: one-way seconds.
"""

import json as js
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor

from thinwire_lab.cluster.link import Rate, parse_rate
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.cluster.rounds import durations, events, ping, start_together
from thinwire_lab.cluster.worker import Emit
from thinwire_lab.cluster.workers import join_group
from thinwire_lab.machine import environment

HANDLER = "thinwire_lab.papers.shared.sweep:handle"
SCHEMA = "thinwire.sweep/1"
SMALL = [2**8, 2**12]  # bytes, for collectives alone
SIZES = [2**power for power in range(16, 28, 2)] + [2**27]
LEAD = 0.05  # seconds for all ranks to settle before they start together
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
                pings = events(cluster, task="ping", sizes=PINGS, repeats=repeats) if world == 2 else []
                found["pings"] += [{"link": link, **event} for event in pings]
    json.write_text(js.dumps({"schema": SCHEMA, "environment": environment(repeats=repeats), **found}, indent=1))


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


def handle(job: dict[str, Any], emit: Emit) -> None:
    """What a worker does: join the group at the first job, then do the job."""
    join_group()
    _TASKS[job.pop("task")](emit, **job)


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


_TASKS: dict[str, Callable[..., None]] = {"collective": _collective, "ping": ping}
COLLECTIVES: dict[str, Callable[[Tensor], Callable[[], object]]] = {
    "all-reduce": lambda x: lambda: dist.all_reduce(x),
    "all-gather": _all_gather,
}


if __name__ == "__main__":
    typer.run(main)
