"""The results as tables for a terminal or a log, and in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.bench.results import Results, Row

UNKNOWN = "—"
CLOSE = 1.05  # times within 5 % of each other are named together: a run says no more
ASCII = str.maketrans({"✓": "yes", "✗": "NO", "—": "-", "·": "|"})

Half = Literal["time", "bytes and loss"]


def milliseconds(seconds: float) -> str:
    """Seconds as bare milliseconds: ``118``, ``2.3``."""
    return f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f}"


def duration(seconds: float) -> str:
    """Seconds for a reader: ``41.2 s``, ``12 min 05 s``, ``3 h 12 min``."""
    if seconds < 600:
        return f"{seconds:.{1 if seconds < 100 else 0}f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def human_bytes(count: float | None) -> str:
    """Bytes in decimal units, as links are rated: ``4.38 MB``."""
    if count is None:
        return UNKNOWN
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if count < 999.5:
            break
        count, unit = count / 1000, larger
    return f"{count:.0f} B" if unit == "B" else f"{count:#.3g}".rstrip(".") + f" {unit}"


def loss_text(loss: float) -> str:
    """A loss to three decimals; ``diverged`` where it is no longer a number."""
    return f"{loss:.3f}" if math.isfinite(loss) else "diverged"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: its heading, the half of a split table it goes to, what it says of a row, and what is best."""

    heading: str
    half: Half
    text: Callable[[Row], str]
    rank: Callable[[Row], float | None] = lambda row: None

    def cells(self, rows: Sequence[Row]) -> list[tuple[str, bool]]:
        """The text for each row, and whether it is the best of several (the lowest ``rank``)."""
        ranks = [(rank, self.text(row)) for row in rows if (rank := self.rank(row)) is not None and math.isfinite(rank)]
        best = min(ranks)[1] if len(ranks) > 1 else None
        return [(text, text == best) for text in map(self.text, rows)]


def columns(results: Results) -> list[Column]:
    """Every column after the recipe's name, in reading order."""
    return _time_columns(results) + _byte_and_loss_columns(results)


def _time_columns(results: Results) -> list[Column]:
    free = results.free_step_seconds

    def step(row: Row) -> str:
        low, middle, high = map(milliseconds, (row.step_seconds.p20, row.step_seconds.p50, row.step_seconds.p80))
        return f"{middle} ({low}-{high})"

    def over_free(row: Row) -> str:
        return f"{row.step_seconds.p50 / free:.2f}x" if free else UNKNOWN

    def speedup(row: Row) -> str:
        return UNKNOWN if row.speedup_vs_dense is None else f"{row.speedup_vs_dense:.2f}x"

    def part(name: str) -> Column:
        return Column(
            heading=f"{name}\nms", half="time", text=lambda row: milliseconds(getattr(row.split_seconds, name))
        )

    return [
        Column(heading="step ms\np50 (p20-p80)", half="time", text=step, rank=lambda row: row.step_seconds.p50),
        Column(heading="x free\nnet", half="time", text=over_free),
        *map(part, ("compute", "encode", "exchange", "decode")),
        Column(heading="speed\nup", half="time", text=speedup),
    ]


def _byte_and_loss_columns(results: Results) -> list[Column]:
    half: Half = "bytes and loss"
    steps = {row.steps for row in results.rows}
    after = f"{steps.pop()} steps" if len(steps) == 1 else "equal steps"

    def to_target(row: Row) -> str:
        if row.seconds_to_target is not None:
            return duration(row.seconds_to_target)
        return UNKNOWN if results.target_loss is None else "not reached"

    def sent(name: str) -> Column:
        return Column(
            heading=f"{name}\nbytes", half=half, text=lambda row: human_bytes(getattr(row.wire_bytes_per_step, name))
        )

    return [
        *map(sent, ("measured", "declared", "dense")),
        Column(
            heading=f"loss at\n{after}",
            half=half,
            text=lambda row: loss_text(row.final_loss),
            rank=lambda row: row.final_loss,
        ),
        Column(heading="time to\ntarget", half=half, text=to_target, rank=lambda row: row.seconds_to_target),
        Column(heading="replicas\nidentical", half=half, text=lambda row: "✓" if row.replicas_identical else "✗"),
    ]


def notes(results: Results) -> list[str]:
    """What the columns mean, as far as this run needs it."""
    free = results.free_step_seconds
    lifted = f"an uncompressed step with the link lifted, {milliseconds(free)} ms" if free else "not taken in this run"
    lines = [f"free net: {lifted}. speed up: dense's median step over this one."]
    lines += ["bytes: sent per step per worker. measured: on the link, headers included. dense: by float32 all-reduce."]
    if any(row.wire_bytes_per_step.measured is None for row in results.rows):
        lines.append(f"measured {UNKNOWN}: counting on the link needs network namespaces.")
    if any(row.wire_bytes_per_step.declared is None for row in results.rows):
        lines.append(f"declared {UNKNOWN}: the payload is not thinwire's, its size not known.")
    return lines


def in_words(results: Results) -> list[str]:
    """What the table says, and what it does not."""
    if not results.rows:
        return ["No recipe finished."]
    words = [_first_at_target(results), _lowest_loss(results), _where_time_goes(results)]
    if apart := [row.label for row in results.rows if not row.replicas_identical]:
        words.append(f"The replicas of {_listed(apart)} came apart: do not trust those rows.")
    if not results.throttled:
        words.append("The link was not throttled: these times say nothing about a slow one.")
    return words


def _first_at_target(results: Results) -> str:
    if results.target_loss is None:
        return "There was no target loss, so no time to it."
    times = {row.label: row.seconds_to_target for row in results.rows if row.seconds_to_target is not None}
    if not times:
        return f"No recipe reached the target loss of {results.target_loss:.3f}."
    best, *others = sorted(times, key=times.__getitem__)
    text = f"First at the target loss of {results.target_loss:.3f}: {best}, in {duration(times[best])}"
    if close := [label for label in others if times[label] <= CLOSE * times[best]]:
        text += f" ({_listed(close)} within 5%)"
    if "dense" in others:
        text += f", {times['dense'] / times[best]:.1f} times as fast as dense"
    missed = [row.label for row in results.rows if row.label not in times]
    return text + (f". Not reached by {_listed(missed)}." if missed else ".")


def _lowest_loss(results: Results) -> str:
    losses = {row.label: row.final_loss for row in results.rows if math.isfinite(row.final_loss)}
    if not losses:
        return "Every recipe diverged."
    low, high = loss_text(min(losses.values())), loss_text(max(losses.values()))
    lowest = [label for label, loss in losses.items() if loss_text(loss) == low]
    text = f"Lowest loss at equal steps: {_listed(lowest)}, {low}"
    if low != high:
        text += f" (highest {high}); one seed each, so small gaps may not repeat"
    return f"{text}."


def _where_time_goes(results: Results) -> str:
    quickest = min(results.rows, key=lambda row: row.step_seconds.p50)
    text = f"A step of {quickest.label}, the shortest, is {_share(quickest, 'exchange')} exchange"
    text += f" and {_share(quickest, 'encode', 'decode')} encode and decode"
    if results.free_step_seconds:
        text += f", and {quickest.step_seconds.p50 / results.free_step_seconds:.2f} times the free-network step"
    if results.dense not in (None, quickest):
        text += f"; a step of dense is {_share(results.dense, 'exchange')} exchange"
    return f"{text}."


def _share(row: Row, *parts: str) -> str:
    split = asdict(row.split_seconds)
    whole = sum(split.values())
    return f"{sum(split[part] for part in parts) / whole:.0%}" if whole else UNKNOWN


def _listed(labels: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(labels[:-1]), labels[-1])))


def print_table(console: Console, results: Results) -> None:
    """Print the run: title, tables (one where the console is wide enough), notes and conclusions."""
    plain = ASCII if console.options.ascii_only else {}

    def say(text: str, style: str = "") -> None:
        console.print(Text(text.translate(plain), style=style))

    say(results.title, "bold" if results.throttled else "bold red")
    if results.incomplete:
        say(results.incomplete, "bold yellow")
    if results.rows:
        for table in _tables(console, results):
            console.print("", table)
        say("\n" + "\n".join(notes(results)), "dim")
    say("\n" + "\n".join(in_words(results)))


def _tables(console: Console, results: Results) -> list[Table]:
    plain = ASCII if console.options.ascii_only else {}
    chosen = columns(results)
    whole = _table(results, chosen, plain)
    unbounded = console.options.update(max_width=10_000)
    if console.measure(whole, options=unbounded).maximum <= console.width:
        return [whole]
    halves: tuple[Half, ...] = ("time", "bytes and loss")
    return [_table(results, [column for column in chosen if column.half == half], plain, half) for half in halves]


def _table(results: Results, chosen: Sequence[Column], plain: dict[int, str], title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    names = [Text(row.label, no_wrap=True) for row in results.rows]
    table.add_column("recipe", vertical="bottom")
    for column in chosen:
        table.add_column(column.heading.translate(plain), justify="right", vertical="bottom")
    cells = [
        [Text(text.translate(plain), style="bold green" if best else "") for text, best in column.cells(results.rows)]
        for column in chosen
    ]
    for entries in zip(names, *cells, strict=True):
        table.add_row(*entries)
    return table
