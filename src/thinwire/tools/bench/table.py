"""The results as tables for a terminal or a log."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.tools.bench.results import Results, Row
from thinwire.tools.bench.words import in_words
from thinwire.tools.show.terminal import ASCII
from thinwire.tools.show.units import UNKNOWN, duration, human_bytes, loss_text, milliseconds

Half = Literal["time", "bytes and loss"]


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
    if results.stages > 1:
        lines.append(
            f"{results.stages} stages: of the first one's worker. exchange: all waiting. | 0.05: share of activations "
            "that crosses, in bf16. dense: activations as they are, and float32 all-reduce between replicas."
        )
    if any(row.wire_bytes_per_step.measured is None for row in results.rows):
        lines.append(f"measured {UNKNOWN}: counting on the link needs network namespaces.")
    if any(row.wire_bytes_per_step.declared is None for row in results.rows):
        lines.append(f"declared {UNKNOWN}: the payload is not thinwire's, its size not known.")
    return lines


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
        table.add_column(column.heading.translate(plain), justify="right", vertical="bottom", no_wrap=True)
    cells = [
        [Text(text.translate(plain), style="bold green" if best else "") for text, best in column.cells(results.rows)]
        for column in chosen
    ]
    for entries in zip(names, *cells, strict=True):
        table.add_row(*entries)
    return table
