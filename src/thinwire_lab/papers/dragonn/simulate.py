"""DRAGONN's measurements beside what its own figures predict.

python -m thinwire_lab.papers.dragonn.simulate [--json out.json] [--plot out.png] [--html out.html]
"""

from typing import Any

from matplotlib.figure import Figure

from thinwire_lab.papers.dragonn import model
from thinwire_lab.papers.shared.simulating import CIRCLE, app_of
from thinwire_lab.show.canvas import COLOURS, INK, MUTED, blank, head, name
from thinwire_lab.show.table import Table
from thinwire_lab.simulate.outputs import Outcome, starred
from thinwire_lab.simulate.plots import over_workers

_WORLDS = (4, 8, 16, 64, 256, 1000, 4096)
_MS = ("GPUs", "  full\n  ms", "  dgc\n  ms", "  dragonn\n  ms")
_HEADINGS = (*_MS, "  dgc\n  ours", "\n  theirs", "  dragonn\n  ours", "\n  theirs", "  free\n  compression")


def dragonn() -> Outcome:
    """Return Fig. 3 (d) and what it implies."""
    return Outcome(
        title="DRAGONN (Wang et al. 2022) from its own figures: XML, 126.7 M parameters, density 0.001, 25 Gbit/s",
        tables=[_figure_3()],
        notes=_notes(),
        document={"schema": "thinwire.paper/1", "paper": "dragonn", **_document()},
        figure=dragonn_figure,
    )


def _figure_3() -> Table:
    published = model.SPEEDUPS.values()
    rows: list[list[str]] = []
    for at in model.speeds(_WORLDS):
        gains = [f"{at.full / seconds:.1f}" for seconds in (at.dgc, at.dragonn)]
        theirs = [f"{x}" for x in published] if at.workers == model.WORKERS else ["", ""]
        times = (f"{1e3 * seconds:.1f}" for seconds in (at.full, at.dgc, at.dragonn))
        rows.append([f"{at.workers:,}", *times, gains[0], theirs[0], gains[1], theirs[1], f"{at.bound:.1f}"])
    return starred(title="Fig. 3 (d): a step, and how many times as fast as full", headings=_HEADINGS, rows=rows)


def _notes() -> list[str]:
    known = model.implied()
    (at,) = model.speeds((model.WORKERS,))
    full = 1e3 * model.SPEEDUPS["dragonn"] * at.dragonn
    return [
        "From them: 25 ms to compute, 35.4 (dgc) and 13.2 ms (dragonn) to encode 512 MB. No latency is given, nor "
        "times of decoding, which count as free here. Nothing overlaps: the model has one layer. 25 Gbit/s join all "
        "GPUs here; theirs sit eight to a machine.",
        f"22.4 exceeds what free compression could bring: were our dragonn step right, their full step took {full:.0f} "
        f"ms, as at {8e-9 * known.dense_bandwidth:.1f} Gbit/s, and dgc spent {1e3 * known.dgc_decode:.0f} ms more on "
        "decoding, which it does worker by worker.",
        f"From {model.last_gather():,.0f} GPUs on an all-gather takes longer than no compression.",
        f"dgc's break-even at 2^21 bytes: its exchange saves {1e3 * known.compression:.2f} ms (and 15 latencies), "
        f"so compressing took as long, {1e3 * known.overhead:.2f} ms of it whatever the size. That constant is not "
        "given, so the break-even can be explained, not predicted.",
    ]


def _document() -> dict[str, Any]:
    rows = [at._asdict() | {"bound": at.bound} for at in model.speeds(_WORLDS)]
    return {"rows": rows, "published": model.SPEEDUPS, "implied": model.implied()._asdict()}


def dragonn_figure() -> Figure:
    """Draw the XML model's speed-ups over full synchronisation, and what free compression would bring."""
    figure = blank((7.5, 5.0))
    axes = figure.subplots()
    worlds = tuple(1 << bit for bit in range(1, 13))
    rows = model.speeds(worlds)
    for values, colour, dash, label in (
        ([row.bound for row in rows], MUTED, "--", "free compression"),
        ([row.full / row.dragonn for row in rows], COLOURS[2], "-", "dragonn"),
        ([row.full / row.dgc for row in rows], COLOURS[0], "-", "dgc"),
    ):
        axes.plot(worlds, values, dash, color=colour, linewidth=1.8, label=label)
    for label, colour in (("dragonn", COLOURS[2]), ("dgc", COLOURS[0])):
        theirs = model.SPEEDUPS[label]
        axes.plot(model.WORKERS, theirs, **CIRCLE, color=colour)
    axes.axhline(1, color=INK, linewidth=0.9, linestyle=":", label="no compression")
    over_workers(axes, worlds)
    axes.set_ylim(0, 24)
    name(axes, "Times as fast as full synchronisation", "GPUs, one all-gather among all; circles: as published, on 16")
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    head(figure, "DRAGONN (Wang et al. 2022): XML, density 0.001, 25 Gbit/s; decoding, not published, counts as free")
    return figure


app = app_of(dragonn)

if __name__ == "__main__":
    app()
