"""`figures`: thresholds over training, activations, and how far a fitted threshold strays."""

import json as js
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from thinwire.pipeline import Boundary, LaplaceBoundary, TopKBoundary
from thinwire_lab.inputs import BadInput, write_atomically
from thinwire_lab.machine import environment
from thinwire_lab.papers.dct.accuracy import OTHERWISE, STEPS
from thinwire_lab.papers.dct.looking import DENSITIES, activations, follow, shape
from thinwire_lab.papers.dct.plots import draw
from thinwire_lab.papers.dct.training import Material
from thinwire_lab.problems import build
from thinwire_lab.show.table import Table
from thinwire_lab.show.terminal import print_titled

SCHEMA = "thinwire.pipeline_figures/1"
DENSE = "dense"
Make = Callable[[], Boundary | None]


def trainings() -> dict[str, Make]:
    """The modules to put at the first cut, by name."""
    found: dict[str, Make] = {DENSE: lambda: None}
    for each in DENSITIES:
        found[f"exact {each:g}"] = lambda each=each: TopKBoundary(each)  # type: ignore[misc]
        found[f"Laplace {each:g}"] = lambda each=each: LaplaceBoundary(each)  # type: ignore[misc]
        found[f"Laplace {each:g}, unbounded"] = lambda each=each: LaplaceBoundary(each, bound=1 / each)  # type: ignore[misc]
    return found


def figures(
    json: Annotated[Path, typer.Option(help="Write what is drawn here, after each training.")],
    folder: Annotated[Path | None, typer.Option(help="Write the figures here, as PNG.")] = None,
    problem: Annotated[str, typer.Option(help="One that falls into stages.")] = "dlrm",
    data: Annotated[Path | None, typer.Option(help="The problem's data, where it is not generated.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    resume: Annotated[bool, typer.Option(help="Skip the trainings that the document has.")] = False,
) -> None:
    """Train with and without a boundary at the first cut, and note what the activations did, or draw it, too."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        built = build(problem, seed=seed, data=data)
    except BadInput as wrong:
        raise typer.BadParameter(str(wrong)) from wrong
    count = steps or STEPS.get(problem, OTHERWISE)
    document = _document(json if resume else None, {"description": built.description, "steps": count, "seed": seed})
    material = Material(problem=built, batches=[built.batch(step, 0, 1) for step in range(count)])
    for name, make in trainings().items():
        if name not in document["runs"]:
            with console.status(f"{name}, {count} steps"):
                _record(document, material, name, make())
            write_atomically(json, js.dumps(document, allow_nan=False) + "\n")
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        draw(document, folder)
    print_titled(console, _laws(document))


def _document(path: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    fresh = {"schema": SCHEMA, "environment": environment(), "settings": settings, "runs": {}, "shapes": {}}
    if path is None or not path.exists():
        return fresh
    found: dict[str, Any] = js.loads(path.read_text())
    if (found.get("schema"), found.get("settings")) != (SCHEMA, settings):
        raise typer.BadParameter(f"{path} is of {found.get('settings')}, not of {settings}; name another with --json")
    return found


def _record(document: dict[str, Any], material: Material, name: str, boundary: Boundary | None) -> None:
    network, looks = follow(material, boundary)
    if name == DENSE:
        document["shapes"] = {place: asdict(shape(x)) for place, x in activations(network, material).items()}
    document["runs"][name] = [asdict(each) for each in looks]


def _laws(document: dict[str, Any]) -> Table:
    return Table(
        title="Akaike's criterion per element, less is better",
        headings=("activations", "law", "criterion"),
        rows=[
            (place, law, f"{value:.3f}")
            for place, found in document["shapes"].items()
            for law, value in found["aic"].items()
        ],
        left=(0, 1),
    )
