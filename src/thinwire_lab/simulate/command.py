"""`thinwire simulate`: what a step would take between more workers than there are."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter
from rich.console import Console

from thinwire_lab.show import canvas
from thinwire_lab.show.page import Files, page
from thinwire_lab.show.table import Table
from thinwire_lab.show.terminal import print_chapter, print_written, say
from thinwire_lab.simulate.options import Options
from thinwire_lab.simulate.scaling import PLANNED, SMALLEST, Scale


def run(options: Options, files: Files) -> None:
    """Predict, write the files and print: what reads the output may stop early, as `head` does. Raises BadInput."""
    found = options.scales()
    figure, printed = partial(scales_figure, found, options.title), partial(_print, options=options, found=found)
    files.write(document(options, found), lambda: page("thinwire simulate", printed, figure()), figure)
    console = Console()
    printed(console)
    print_written(console, files.paths)


def _print(console: Console, options: Options, found: Sequence[Scale]) -> None:
    say(console, options.title, "bold")
    for table in _tables(options, found):
        print_chapter(console, table)
    for note in ("", *_NOTES, *(_APART if options.outer else ()), *(_FAULTS if options.faults else ())):
        say(console, note, "dim")


_NOTES = (
    "predicted, not measured. Every worker's share of the work stays as it is (weak scaling).",
    f"recipes: for all tensors from {SMALLEST:,} elements on, the rest uncompressed. *: the best of them.",
    f"{PLANNED}: tensor by tensor the planner's choice among them; it takes what is kinder to the loss within 3 %.",
    "efficiency: throughput over that of as many workers that never wait for each other.",
)

_APART = (
    "H: workers train on their own for so many steps, and then exchange how far they moved; encoding that counts as "
    "free. Equal tokens are not equal losses: how much later they reach the same one, `thinwire plan --outer` knows of "
    "a small model.",
)
_FAULTS = (
    "goodput: efficiency where workers fail. Who exchanges every step stands still while one is gone, and its "
    "checkpoints count as free. Outer steps go on after 4 s, and the one that failed loses its steps since the latest.",
)
_DAY = 86400  # seconds


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
            **({"goodput": options.goodput(scale)} if options.faults else {}),
        }
        for scale in found
    ]
    return {"schema": "thinwire.simulate/1", "model": options.model, "network": options.where, "rows": rows}


def _tables(options: Options, found: Sequence[Scale]) -> Iterator[Table]:
    """Yield the tables of times, of efficiencies, and of what else was asked for; a star marks the best."""
    yield _table("step, ms", found, lambda scale, name: 1e3 * scale.seconds[name])
    yield _table("efficiency, %", found, lambda scale, name: 100 * scale.efficiency(name))
    if options.faults is not None:
        best = [_best(options.goodput(scale), max) for scale in found]
        yield _table("goodput, %", found, lambda scale, name: 100 * options.goodput(scale)[name], best)
    if options.tokens is not None:
        title = f"days to {options.tokens:,.4g} tokens, {options.batch:,} a worker and step"
        yield _table(title, found, lambda scale, name: days_to(options, scale)[name])


def days_to(options: Options, scale: Scale) -> dict[str, float]:
    """Return the days it takes to train on the tokens asked for, by recipe."""
    steps = (options.tokens or 0.0) / (scale.world_size * options.batch)
    return {name: steps * seconds / _DAY for name, seconds in scale.seconds.items()}


def _best(figures: Mapping[str, float], order: Callable[..., str]) -> str:
    return order((name for name in figures if name != PLANNED), key=figures.__getitem__)


def _table(
    title: str, found: Sequence[Scale], cell: Callable[[Scale, str], float], best: Sequence[str] | None = None
) -> Table:
    """Return a row for each scale. best: whose figure has the star, unless that is the shortest step's."""
    names, best = list(found[0].seconds), best or [scale.best for scale in found]
    rows = [
        [
            f"{scale.world_size:,}",
            *(_digits(cell(scale, name)) + ("*" if name == star else " ") for name in names),
        ]
        for scale, star in zip(found, best, strict=True)
    ]
    headings = [name.replace(":", " \n") + " " for name in names]
    cells = {(row, 1 + names.index(star)) for row, star in enumerate(best)}
    return Table(title=title, headings=["workers", *headings], rows=rows, best=cells, gap=1)  # cells have spaces


def _digits(number: float) -> str:
    if 0 < number < 0.095:
        return f"{number:.2g}"
    return f"{number:,.{0 if number >= 999.5 else 1 if number >= 9.95 else 2}f}"


_INCHES = (12.0, 5.0)


def scales_figure(found: Sequence[Scale], title: str) -> Figure:
    """Draw the step on logarithmic axes, and beside it the efficiency from 0 to 1."""
    figure = canvas.blank(_INCHES)
    step, efficiency = figure.subplots(1, 2)
    for label, colour, dash, width in _styled(list(found[0].seconds)):
        worlds = [scale.world_size for scale in found]
        seconds = [1e3 * scale.seconds[label] for scale in found]
        shares = [scale.efficiency(label) for scale in found]
        for axes, values in ((step, seconds), (efficiency, shares)):
            axes.plot(worlds, values, dash, color=colour, linewidth=width, marker="o", markersize=3.5, label=label)
    _step_axes(step, found[0].alone)
    over_workers(efficiency, [scale.world_size for scale in found])
    over_workers(step, [scale.world_size for scale in found])
    share_axes(efficiency, max(scale.efficiency(label) for scale in found for label in scale.seconds))
    canvas.legend(figure, step, columns=8)
    canvas.head(figure, title)
    return figure


def over_workers(axes: Axes, worlds: Sequence[int]) -> None:
    """Put workers on the horizontal axis, doubling."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(worlds[:: -(-len(worlds) // 12)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    canvas.restrain(axes)


def share_axes(axes: Axes, most: float) -> None:
    """Show shares from 0 to 1, or only to somewhat above the largest if that is small."""
    axes.set_ylim(0, 1.05 if most > 0.3 else 1.15 * most)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    canvas.name(axes, "Scaling efficiency", "workers; throughput over that of as many that never wait")


def _step_axes(axes: Axes, alone: float) -> None:
    axes.set_yscale("log")
    axes.axhline(
        1e3 * alone, color=canvas.MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1, label="one worker alone"
    )
    canvas.log_ticks(axes.yaxis, "{:,.9g}".format)
    canvas.name(axes, "Time of one step", "workers; milliseconds, both on log scales")


def _styled(labels: Sequence[str]) -> Iterator[tuple[str, str, str, float]]:
    """Give each its own colour; dense and the plan stand apart."""
    others = [label for label in labels if label not in ("dense", PLANNED)]
    for label in labels:
        if label in others:
            turn, place = divmod(others.index(label), len(canvas.COLOURS))
            yield label, canvas.COLOURS[place], canvas.DASHES[turn % len(canvas.DASHES)], 1.8
    yield from ((label, canvas.INK, "-", 1.8) for label in labels if label == "dense")
    yield PLANNED, canvas.MUTED, "--", 2.6
