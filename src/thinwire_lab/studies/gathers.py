"""An all-gather on Gloo by torch and as thinwire does it, each worker to each other directly, in turn.

    python -m thinwire_lab.studies.gathers --json out.json --page docs/measurements/exchanges.md

The workers share this machine, each behind its own link. You see, for each link, number of workers and size, the
median time of both ways from the start of the last worker to the end of the last, the time that the bytes alone take on
the link, the bytes counted there, and whether both ways gave the same bits on all workers. `--page` replaces the
section on gathers in that file, or adds it at the end.
"""

import json as js
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Annotated

import typer
from rich.console import Console

from thinwire_lab.bench.rows import percentiles
from thinwire_lab.cluster.link import Rate
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.cluster.rounds import durations, events
from thinwire_lab.machine import environment
from thinwire_lab.show.table import Column, Table, markdown, tabulated
from thinwire_lab.show.terminal import print_titled
from thinwire_lab.show.units import UNKNOWN, human_bytes, milliseconds
from thinwire_lab.studies.exchanges.__main__ import HANDLER, _counts, _rates
from thinwire_lab.studies.exchanges.figures import Event

SCHEMA = "thinwire.gathers/2"
HEADING = "## Gathers on Gloo"

console = Console()


@dataclass(frozen=True, kw_only=True)
class Gather:
    """One size on one link. Bytes are means per worker, packets' headers included. `line`: the payload's seconds."""

    link: str
    world_size: int
    nbytes: int
    torch: dict[str, float]
    direct: dict[str, float]
    line: float | None
    torch_bytes: float | None
    direct_bytes: float | None
    identical: bool

    @property
    def times_as_fast(self) -> float:
        """How many times as fast the direct way is."""
        return self.torch["p50"] / self.direct["p50"]


def main(
    worlds: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "2,4",
    links: Annotated[
        str, typer.Option(help="Rates of the workers' links, or none.")
    ] = "none,100mbit,1gbit,100mbit/25ms",
    sizes: Annotated[str, typer.Option(help="Megabytes that each worker sends.")] = "0.001,0.01,0.1,0.3,1,3,10,30",
    repeats: Annotated[int, typer.Option(help="Times that each way is measured.")] = 5,
    json: Annotated[Path | None, typer.Option(help="Write the results here.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write the section on gathers here.")] = None,
) -> None:
    """Compare gathers; ends with status 1 where bits differ."""
    megabytes = [float(size) for size in sizes.split(",")]
    rows: list[Gather] = []
    for rate in _rates(links):
        for world in _counts(worlds):
            rows += _compare(rate, world, [round(1e6 * size) for size in megabytes], repeats)
    about = environment(repeats=repeats)
    if json is not None:
        results = {"schema": SCHEMA, "environment": about, "rows": [asdict(each) for each in rows]}
        json.write_text(js.dumps(results, indent=1) + "\n")
    if page is not None:
        page.write_text(replaced(page.read_text(), section(rows, about)))
    raise typer.Exit(int(not all(each.identical for each in rows)))


def _compare(rate: Rate | None, world: int, sizes: Sequence[int], repeats: int) -> list[Gather]:
    with Cluster(world, rate, HANDLER) as cluster:
        link = str(rate) if cluster.throttled else "unthrottled"
        known = rate if cluster.throttled else None
        rows = [
            gather(events(cluster, task="gather", nbytes=nbytes, repeats=repeats), nbytes, world, link, known)
            for nbytes in sizes
        ]
        title = f"{world} workers, {cluster.label}"
    print_titled(console, tabulated(COLUMNS, rows, title=title))
    return rows


def gather(events: Sequence[Event], nbytes: int, world: int, link: str, rate: Rate | None) -> Gather:
    """Sum up what all ranks emitted about one size."""
    ways = [[event for event in events if event["way"] == way] for way in ("torch", "direct")]
    counted = all("measured" in event for event in events)
    sent = [fmean(event["measured"] for event in way) if counted else None for way in ways]
    return Gather(
        link=link,
        world_size=world,
        nbytes=nbytes,
        torch=asdict(percentiles(durations(ways[0]))),
        direct=asdict(percentiles(durations(ways[1]))),
        line=None if rate is None else 8 * (world - 1) * nbytes / rate.bits_per_second,
        torch_bytes=sent[0],
        direct_bytes=sent[1],
        identical=len({event["digest"] for event in events}) == 1,
    )


def section(rows: Sequence[Gather], environment: dict[str, object]) -> str:
    """Return the page's section: how many times as fast, by size, for each link and number of workers."""
    versions = f"torch {environment['torch']}, Python {environment['python']}, {environment['cores']} cores"
    alike = "Both ways give the same bits" if all(each.identical for each in rows) else "Bits differ in some rows"
    intro = (
        f"How many times as fast as Gloo's own gather, around a ring, is thinwire's, from each worker to each other "
        f"at once? By the bytes that each worker gathers from each of the others, link and number of workers. {alike}. "
        f"{versions}; medians of {environment['repeats']} repeats, both ways in turn."
    )
    places = list(dict.fromkeys((each.link, each.world_size) for each in rows))
    found = {(each.nbytes, each.link, each.world_size): f"{each.times_as_fast:.2f}" for each in rows}
    table = Table(
        headings=["bytes", *(f"{link}: {world}" for link, world in places)],
        rows=[
            [human_bytes(nbytes), *(found.get((nbytes, *place), UNKNOWN) for place in places)]
            for nbytes in dict.fromkeys(each.nbytes for each in rows)
        ],
    )
    return "\n\n".join([HEADING, fill(intro, 100), markdown(table)]) + "\n"


def replaced(text: str, new: str) -> str:
    """Return a page with its section on gathers replaced, or with one at its end."""
    found = re.compile(rf"^{re.escape(HEADING)}\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    if found.search(text):
        return found.sub(lambda _: new + "\n", text).rstrip("\n") + "\n"
    return f"{text.rstrip()}\n\n{new}"


def _spread(seconds: dict[str, float]) -> str:
    return f"{milliseconds(seconds['p50'])} ({milliseconds(seconds['p20'])}-{milliseconds(seconds['p80'])})"


COLUMNS: tuple[Column[Gather], ...] = (
    Column(heading="workers", text=lambda each: str(each.world_size), left=True),
    Column(heading="bytes", text=lambda each: human_bytes(each.nbytes)),
    Column(heading="line ms", text=lambda each: UNKNOWN if each.line is None else milliseconds(each.line)),
    Column(heading="torch ms p50 (p20-p80)", text=lambda each: _spread(each.torch)),
    Column(heading="direct ms p50 (p20-p80)", text=lambda each: _spread(each.direct)),
    Column(heading="times as fast", text=lambda each: f"{each.times_as_fast:.2f}"),
    Column(heading="sent by torch", text=lambda each: human_bytes(each.torch_bytes)),
    Column(heading="sent directly", text=lambda each: human_bytes(each.direct_bytes)),
    Column(
        heading="same bits", text=lambda each: "yes" if each.identical else "NO", wrong=lambda each: not each.identical
    ),
)


if __name__ == "__main__":
    typer.run(main)
