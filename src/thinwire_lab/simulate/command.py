"""`thinwire simulate`: what a step would take between more workers than there are."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from thinwire_lab.show.table import Table
from thinwire_lab.simulate.options import Options
from thinwire_lab.simulate.outputs import Outcome, starred
from thinwire_lab.simulate.plots import scales_figure
from thinwire_lab.simulate.scaling import PLANNED, SMALLEST, Scale

_NOTES = (
    "predicted, not measured. Every worker's share of the work stays as it is (weak scaling).",
    f"recipes: for all tensors from {SMALLEST:,} elements on, the rest uncompressed. *: the fastest of them.",
    f"{PLANNED}: tensor by tensor the planner's choice among them; it takes what is kinder to the loss within 3 %.",
    "efficiency: throughput over that of as many workers that never wait for each other.",
)

_APART = (
    "H: workers train on their own for so many steps, and then exchange how far they moved; encoding that counts as "
    "free. Equal tokens are not equal losses: how much later they reach the same one, `thinwire plan --outer` knows of "
    "a small model.",
)
_DAY = 86400  # seconds


def outcome(options: Options) -> Outcome:
    """Predict. Raises BadInput for a recipe that the profile does not know."""
    found = options.scales()
    return Outcome(
        title=options.title,
        tables=[*scale_tables(found), *_days(options, found)],
        notes=(*_NOTES, *(_APART if options.outer else ())),
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
            **({"days": days_to(options, scale)} if options.tokens else {}),
        }
        for scale in found
    ]
    return {"schema": "thinwire.simulate/1", "model": options.model, "network": options.where, "rows": rows}


def scale_tables(found: Sequence[Scale]) -> list[Table]:
    """Return the two tables, of times and of efficiencies; a star marks the fastest."""
    return [
        _table("step, ms", found, lambda scale, name: _digits(1e3 * scale.seconds[name])),
        _table("efficiency, %", found, lambda scale, name: _digits(100 * scale.efficiency(name))),
    ]


def days_to(options: Options, scale: Scale) -> dict[str, float]:
    """Return the days it takes to train on the tokens asked for, by recipe."""
    steps = (options.tokens or 0.0) / (scale.world_size * options.batch)
    return {name: steps * seconds / _DAY for name, seconds in scale.seconds.items()}


def _days(options: Options, found: Sequence[Scale]) -> list[Table]:
    if options.tokens is None:
        return []
    title = f"days to {options.tokens:,.4g} tokens, {options.batch:,} a worker and step"
    return [_table(title, found, lambda scale, name: _digits(days_to(options, scale)[name]))]


def _table(title: str, found: Sequence[Scale], cell: Callable[[Scale, str], str]) -> Table:
    names = list(found[0].seconds)
    rows = [
        [f"{scale.world_size:,}", *(cell(scale, name) + ("*" if name == scale.best else " ") for name in names)]
        for scale in found
    ]
    headings = [name.replace(":", " \n") + " " for name in names]
    return starred(title=title, headings=["workers", *headings], rows=rows)


def _digits(number: float) -> str:
    if 0 < number < 0.095:
        return f"{number:.2g}"
    return f"{number:,.{0 if number >= 999.5 else 1 if number >= 9.95 else 2}f}"
