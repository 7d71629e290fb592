"""The ledger of the papers' claims: what was run for each, and what came of it.

python -m thinwire_lab.papers list
python -m thinwire_lab.papers run D11 --data DATA  # a claim, a paper, or nothing for all: runs only what is missing
python -m thinwire_lab.papers run gtopk --quick    # a smoke of the same, a few steps, which changes no verdict
python -m thinwire_lab.papers check                # are the tables what the ledger says, and the ledger what runs say?
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from thinwire_lab.machine import environment
from thinwire_lab.papers.registry import PAPERS
from thinwire_lab.papers.shared import ledger, tables
from thinwire_lab.papers.shared.deciding import Deciding
from thinwire_lab.papers.shared.ledger import FOLDER, LEDGER, NAMES, OPEN, Row
from thinwire_lab.papers.shared.shelf import RUNS, Shelf
from thinwire_lab.show.table import Column, tabulated
from thinwire_lab.show.terminal import print_table

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
console = Console()

Names = Annotated[list[str] | None, typer.Argument(help="Claims such as D11, or papers; all where left out.")]
Data = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, help="Folder of the data sets, which commands call DATA.")
]


@app.command("list")
def show(
    names: Names = None, *, only_open: Annotated[bool, typer.Option("--open", help="Only open claims.")] = False
) -> None:
    """List claims with their verdicts, and how many commands of each have yet to run."""
    deciding, shelf = _asked(names), Shelf()
    known = [row for name, row in _base(LEDGER).items() if name in deciding.names]
    rows = [row for row in known if not only_open or row.verdict == OPEN]
    try:
        missing = {row.id: str(len(deciding.missing(row.id, shelf))) for row in rows}
    except ValueError as problem:
        sys.exit(str(problem))
    columns: list[Column[Row]] = [
        Column(heading="id", text=lambda row: row.id, left=True),
        Column(heading="verdict", text=lambda row: row.verdict, left=True),
        Column(heading="to run", text=lambda row: missing[row.id]),
        Column(heading="claim", text=lambda row: row.claim, left=True),
    ]
    print_table(console, tabulated(columns, rows))
    console.print(tables.counted(rows))


@app.command()
def run(
    names: Names = None,
    data: Data = None,
    json: Annotated[Path, typer.Option(help="The ledger, to be renewed.")] = LEDGER,
    quick: Annotated[bool, typer.Option(help="A few steps of each, elsewhere; no verdict is kept.")] = False,
    anew: Annotated[bool, typer.Option("--anew", help="Run what other sources of this version wrote, too.")] = False,
) -> None:
    """Run what is missing, judge, and renew the ledger and the papers' tables."""
    deciding = _asked(names)
    if quick:
        with TemporaryDirectory() as folder:
            short, shelf = deciding.shrunk(), Shelf(folder=Path(folder), data=data)
            failed, judged = _run(short, shelf), len(short.rows(shelf))
        console.print(f"{judged} of {len(short.judges)} claims could be judged; no verdict is kept")
        raise typer.Exit(int(failed))
    _base(json)  # a file that is not a ledger is refused before anything runs
    shelf = Shelf(folder=RUNS, data=data, anew=anew)
    failed = _run(deciding, shelf)
    _renew(deciding, shelf, json)
    raise typer.Exit(int(failed))


@app.command()
def judge(names: Names = None) -> None:
    """Judge from the runs that are there, and renew the ledger and the papers' tables. Runs nothing."""
    _renew(_asked(names), Shelf(), LEDGER)


@app.command()
def check() -> None:
    """Exit with status 1 where a table is not what the ledger says, or the ledger not what the runs say."""
    rows, deciding = _base(LEDGER), _asked(None)
    wrong, notes = [*tables.stale(rows), *deciding.unfounded(rows, Shelf())], RUNS / "made.json"
    wrong += [] if notes.exists() else [f"{notes.relative_to(FOLDER.parent)} is not there"]
    for name in wrong:
        console.print(f"not up to date: {name}", style="red")
    raise typer.Exit(int(bool(wrong)))


def _renew(deciding: Deciding, shelf: Shelf, json: Path) -> None:
    rows = _base(json) | deciding.rows(shelf)
    ledger.write(rows, json, environment())
    if json == LEDGER:
        tables.renew(rows)
    console.print(tables.counted(list(rows.values())))


def _base(json: Path) -> dict[str, Row]:
    """Return the rows to renew: those of the file, or ours where it is not there yet."""
    try:
        return ledger.read(json if json.exists() else LEDGER)
    except ValueError as problem:
        sys.exit(str(problem))


def _run(deciding: Deciding, shelf: Shelf) -> bool:
    """Run what is missing. Return whether any command failed; the others ran all the same."""
    failed = False
    with Progress(console=console) as progress:
        for command in progress.track(deciding.commands(shelf), description="runs"):
            console.print(command, style="dim", highlight=False)
            problem = shelf.try_to_run(command)
            if problem:
                console.print(problem, style="red", highlight=False)
            failed |= problem is not None
    return failed


def _asked(names: list[str] | None) -> Deciding:
    try:
        return Deciding.of(PAPERS, [name.lower() if name.lower() in NAMES else name.upper() for name in names or []])
    except KeyError as unknown:
        sys.exit(f"{unknown.args[0]} is neither a claim nor a paper")


if __name__ == "__main__":
    app()
