"""Does thinwire work with the training loops that users write? Each one is compared with plain DDP.

    python -m thinwire_lab.studies.loops
    python -m thinwire_lab.studies.loops --only gan,lbfgs
    python -m thinwire_lab.studies.loops --json loops.json --markdown loops.md

Every loop of scripts.py runs on two workers over Gloo, in float64. It runs with plain DDP; with recipes that send
everything, which must end where plain DDP does; and with recipes that send a hundredth, which must keep the replicas
bit-identical and the loss sane. `distance` is ‖parameters - plain DDP's‖ / ‖how far plain DDP moved them‖. If a loop
raises, that is its row.

Verdicts: `same` as plain DDP; `trains` though less is sent; `differs` from plain DDP or between replicas; `worse` if
the loss fell less than a quarter as far as plain DDP's; `raised` (see the notes); `died` if a worker did. The run ends
with status 1 if a row differs, is worse or died.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from thinwire_lab.inputs import write_document
from thinwire_lab.machine import environment
from thinwire_lab.show.terminal import print_table
from thinwire_lab.studies.loops.recipes import WAYS
from thinwire_lab.studies.loops.running import Row, run
from thinwire_lab.studies.loops.scripts import LOOPS
from thinwire_lab.studies.loops.table import FAILED, notes, summary, table
from thinwire_lab.studies.loops.table import markdown as page

SCHEMA = "thinwire.loops/1"
STEPS, QUICK_STEPS = 80, 16

console = Console()


def main(
    only: Annotated[str, typer.Option(help="Names of loops, separated by commas; all where left out.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_STEPS} steps instead of {STEPS}.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the rows here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table here.")] = None,
) -> None:
    """Run every loop with every recipe."""
    loops, steps = _named(only), QUICK_STEPS if quick else STEPS
    rows = _all(loops, steps)
    print_table(console, table(rows))
    for note in notes(rows):
        console.print(note, highlight=False, markup=False)
    console.print(summary(rows), highlight=False)
    write_document(json, SCHEMA, environment=environment(steps=steps), rows=[asdict(row) for row in rows])
    if markdown is not None:
        markdown.write_text(page(rows))
    raise typer.Exit(int(any(row.verdict in FAILED for row in rows)))


def _named(only: str) -> list[str]:
    names = [name.strip() for name in only.split(",") if name.strip()] or list(LOOPS)
    if unknown := [name for name in names if name not in LOOPS]:
        raise typer.BadParameter(f"no loop is called {unknown[0]!r}; there are {', '.join(LOOPS)}")
    return names


def _all(loops: list[str], steps: int) -> list[Row]:
    ways = [None, *(way.name for way in WAYS)]
    rows = list[Row]()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_interactive) as progress:
        task = progress.add_task("", total=len(loops) * len(ways))
        for row in run(loops, ways, steps):
            rows.append(row)
            progress.update(task, advance=1, description=row.loop)
    return rows


if __name__ == "__main__":
    typer.run(main)
