"""`thinwire simulate`: what a step would take between more workers than there are."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from thinwire.planner.scaling import PLANNED, SMALLEST, Scale
from thinwire.tools.show.table import Table
from thinwire.tools.simulate.options import Options
from thinwire.tools.simulate.outputs import Outcome, starred
from thinwire.tools.simulate.plots import scales_figure

_NOTES = (
    "predicted, not measured. Every worker's share of the work stays as it is (weak scaling).",
    f"recipes: for all tensors from {SMALLEST:,} elements on, the rest uncompressed. *: the fastest of them.",
    f"{PLANNED}: tensor by tensor the planner's choice among them; it takes what is kinder to the loss within 3 %.",
    "efficiency: throughput over that of as many workers that never wait for each other.",
)


def outcome(options: Options) -> Outcome:
    """Predict. Raises BadInput for a recipe that the profile does not know."""
    found = options.scales()
    return Outcome(
        title=options.title,
        tables=scale_tables(found),
        notes=_NOTES,
        document=document(options, found),
        figure=partial(scales_figure, found, options.title),
    )


def document(options: Options, found: Sequence[Scale]) -> dict[str, Any]:
    """Return the JSON document: seconds, and throughput relative to as many workers that never wait."""
    rows = [
        {
            "world_size": scale.world_size,
            "seconds": dict(scale.seconds),
            "efficiency": {name: scale.efficiency(name) for name in scale.seconds},
            "best": scale.best,
            "planned": dict(scale.choice),
        }
        for scale in found
    ]
    return {"schema": "thinwire.simulate/1", "model": options.model, "network": options.where, "rows": rows}


def scale_tables(found: Sequence[Scale]) -> list[Table]:
    """Return the two tables, of times and of efficiencies; a star marks the fastest."""

    def table(title: str, cell: Callable[[Scale, str], str]) -> Table:
        names = list(found[0].seconds)
        rows = [
            [f"{scale.world_size:,}", *(cell(scale, name) + ("*" if name == scale.best else " ") for name in names)]
            for scale in found
        ]
        headings = [name.replace(":", " \n") + " " for name in names]
        return starred(title=title, headings=["workers", *headings], rows=rows)

    return [
        table("step, ms", lambda scale, name: _digits(1e3 * scale.seconds[name])),
        table("efficiency, %", lambda scale, name: _digits(100 * scale.efficiency(name))),
    ]


def _digits(number: float) -> str:
    return f"{number:,.{0 if number >= 999.5 else 1 if number >= 9.95 else 2}f}"
