"""Does any codec, memory or exchange make the host wait for a GPU? Steps on fake tensors, and what they launch.

    python -m thinwire_lab.studies.fake_matrix --markdown fake_matrix.md

Every codec of the tests' one list of cases is sent by every exchange of one collective that takes it, with every memory
before it. Tensors are fake and take a GPU's path: they have a shape and no elements, so whatever asks for one raises,
and its cell says ✗. A cell counts the second step of a bucket of two tensors, of 40 × 50 and of 500 elements: torch's
operators that touch elements, and launches of Triton's kernels. `tests/reducer/test_waits.py` takes the same steps, and
refuses copies that make the host wait, too.
"""

import json as js
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import track
from torch._subclasses.fake_tensor import FakeTensorMode

from thinwire.codecs import Codec
from thinwire.exchanges import AllGather, AllReduce, Exchange
from thinwire.reducer import Bucket, Compressed, Round, Segment
from thinwire.waits import Verdict
from thinwire_lab.check.gpu.counting import counting, fake_group, gpu_path
from thinwire_lab.show.table import Table
from thinwire_lab.show.table import markdown as in_markdown
from thinwire_lab.show.terminal import print_table
from thinwire_lab.studies.launches import WORLD

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))
from cases import CODECS, MEMORIES

SCHEMA = "thinwire.fake_matrix/1"
SEGMENTS = (
    Segment(name="matrix", offset=0, length=2000, shape=(40, 50)),
    Segment(name="vector", offset=2000, length=500, shape=(500,)),
)
ROWS: dict[str, tuple[Codec, Exchange]] = {name: (case.codec, AllGather()) for name, case in CODECS.items()} | {
    f"{name}, summed": (case.codec, AllReduce())
    for name, case in CODECS.items()
    if isinstance(case.exchange, AllReduce)
}
Cell = dict[str, int | str]


def main(
    json: Annotated[Path | None, typer.Option(help="Write the cells here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table here.")] = None,
) -> None:
    """Take all steps; end with 1 if the host would have waited in any."""
    cells = {
        row: {memory: _cell(*ROWS[row], memory) for memory in MEMORIES}
        for row in track(ROWS, console=Console(stderr=True))
    }
    table = Table(
        title="operators + launches of Triton",
        headings=("codec", *MEMORIES),
        rows=[[row, *map(_text, found.values())] for row, found in cells.items()],
        left=(0,),
    )
    waits = [cell["error"] for found in cells.values() for cell in found.values() if "error" in cell]
    print_table(Console(width=None if sys.stdout.isatty() else 400), table)
    typer.echo(f"{len(ROWS)} rows by {len(MEMORIES)} memories: {len(waits)} of {len(ROWS) * len(MEMORIES)} cells wait")
    if json is not None:
        json.write_text(js.dumps({"schema": SCHEMA, "torch": torch.__version__, "cells": cells}, indent=1) + "\n")
    if markdown is not None:
        markdown.write_text(in_markdown(table) + "\n")
    raise typer.Exit(bool(waits))


def _cell(codec: Codec, exchange: Exchange, memory: str) -> Cell:
    """Return what the second step takes; in the first, constants are copied to the GPU, where they stay."""
    reducer, group = Compressed(memory=MEMORIES[memory](), codec=codec, exchange=exchange), fake_group(WORLD)
    try:
        with gpu_path(), FakeTensorMode(allow_non_fake_inputs=True), counting() as count:
            for step in range(2):
                count.clear()
                _step(reducer, group, step)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    every = sum((Counter(phase) for phase in count.phases.values()), Counter[str]())
    return {"operators": every["operators"], "launches": every["triton"]}


def _step(reducer: Compressed, group: dist.ProcessGroup, step: int) -> None:
    at = Round(step=step, group=group, scale=1 / WORLD, verdict=Verdict())
    reducer.reduce(Bucket(flat=torch.empty(2500), segments=SEGMENTS), at).wait()
    for memory in reducer.memories():
        memory.commit()


def _text(cell: Cell) -> str:
    return "✗" if "error" in cell else f"{cell['operators']} + {cell['launches']}"


if __name__ == "__main__":
    typer.run(main)
