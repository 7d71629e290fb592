"""A plan as text for a terminal or a log."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

from rich.console import Console
from rich.text import Text

from thinwire.planner import Plan, Profile
from thinwire.tools.plan.rows import Line
from thinwire.tools.plan.words import conclusions, network, origin, title
from thinwire.tools.show.terminal import ASCII
from thinwire.tools.show.units import UNKNOWN, human_bytes

L = TypeVar("L")
_NARROWEST = 12  # of the column of names


@dataclass(frozen=True, kw_only=True)
class Column(Generic[L]):
    """One column: its heading, and what it says of a line."""

    heading: str
    text: Callable[[L], str]
    left: bool = False

    def cells(self, lines: Sequence[L]) -> list[str]:
        """Heading and texts, all of one width."""
        texts = [self.heading, *map(self.text, lines)]
        width = max(map(len, texts))
        return [text.ljust(width) if self.left else text.rjust(width) for text in texts]


COLUMNS: tuple[Column[Line], ...] = (
    Column(heading="elements", text=lambda line: f"{line.numel:,}"),
    Column(heading="size", text=lambda line: human_bytes(line.dense_bytes)),
    Column(heading="choice", text=lambda line: line.choice, left=True),
    Column(heading="payload", text=lambda line: human_bytes(line.nbytes)),
    Column(heading="saves ms", text=lambda line: UNKNOWN if line.choice == "dense" else f"{1e3 * line.saves:.2f}"),
)
NOTE = "saves: how much longer a step would take if these tensors alone were left uncompressed."
ADVICE = "What would help more:"


def print_plan(console: Console, measured: Profile, plan: Plan, lines: Sequence[Line]) -> None:
    """Print where the plan is for, its table, what it comes to, and what else would help."""
    plain = ASCII if console.options.ascii_only else {}

    def say(text: str, style: str = "", indent: str = "") -> None:
        filled = textwrap.fill(text, console.width, subsequent_indent=indent, break_long_words=False)
        console.print(Text(filled.translate(plain), style=style), soft_wrap=True)

    say(title(plan.profile), "bold")
    for line in origin(measured, plan.profile):
        say(line, "dim")
    for name, latency, bandwidth in network(plan.profile):
        say(f"  {name:14}  latency {latency:>8}  bandwidth {bandwidth}")
    for tier in plan.profile.tiers:
        say(f"  {tier}", indent="    ")
    console.print()
    if lines:
        for text, style in _table(lines, console.width):
            console.print(Text(text.translate(plain), style=style), soft_wrap=True)
        if plan.pays:
            say(NOTE, "dim")
    else:
        say("No gradient to plan for: those of sparse embeddings go as DDP sends them.")
    console.print()
    for text in conclusions(plan):
        say(text, "bold")
    if plan.advice:
        say(ADVICE)
    for text in plan.advice:
        say(f"- {text}", indent="  ")


def _table(lines: Sequence[Line], width: int) -> Iterator[tuple[str, str]]:
    """Yield text and style of each line of text; a name too long for its column has one of its own."""
    heads, *figures = ["  ".join(cells) for cells in zip(*(column.cells(lines) for column in COLUMNS), strict=True)]
    room = max(_NARROWEST, min(width - len(heads) - 2, max(len(line.label) for line in lines)))
    yield f"{'tensor':{room}}  {heads}", "bold"
    pairs = zip(lines, figures, strict=True)
    for (reason, like), group in groupby(pairs, key=lambda pair: (pair[0].reason, pair[0].like)):
        count = 0
        for line, figure in group:
            count += line.count
            if len(line.label) > room:
                yield line.label, ""
            yield f"{line.label if len(line.label) <= room else '':{room}}  {figure}", ""
        which = "" if count == 1 else "each: " if like else "the largest: "
        yield textwrap.fill(f"{which}{reason}", width, initial_indent="  ", subsequent_indent="  "), "dim"
