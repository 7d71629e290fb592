"""`thinwire simulate`: what a step would take between more workers than there are."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from thinwire.planner.scaling import Scale
from thinwire.tools.simulate.options import Options
from thinwire.tools.simulate.outputs import Outcome
from thinwire.tools.simulate.plots import scales_figure
from thinwire.tools.simulate.table import NOTES, scale_sheets


def outcome(options: Options) -> Outcome:
    """Predict. Raises BadInput for a recipe that the profile does not know."""
    found = options.scales()
    return Outcome(
        title=options.title,
        sheets=scale_sheets(found),
        notes=NOTES,
        document=document(options, found),
        figure=partial(scales_figure, found, options.title),
    )


def document(options: Options, found: Sequence[Scale]) -> dict[str, Any]:
    """Return all of it for a program: seconds, and throughput over that of as many workers that never wait."""
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
