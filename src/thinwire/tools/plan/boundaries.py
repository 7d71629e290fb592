"""A plan for a pipeline as text: a table of its cuts, then the plan of each stage."""

import textwrap
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from thinwire.planner import BoundaryRow, PipelinePlan
from thinwire.tools.plan.rows import every, folded
from thinwire.tools.plan.table import Column, print_plan
from thinwire.tools.plan.words import bit_rate, boundary_reason
from thinwire.tools.show.terminal import ASCII
from thinwire.tools.show.units import UNKNOWN, human_bytes

COLUMNS: tuple[Column[BoundaryRow], ...] = (
    Column(heading="cut", text=lambda row: f"stage {row.cut.stage} to {row.cut.stage + 1}", left=True),
    Column(heading="size", text=lambda row: human_bytes(row.cut.dense_bytes)),
    Column(heading="choice", text=lambda row: row.choice, left=True),
    Column(heading="as words", text=lambda row: human_bytes(row.cut.nbytes)),
    Column(heading="saves ms", text=lambda row: f"{1e3 * row.saves:.2f}" if row.pays else UNKNOWN),
)
NOTE = (
    "size, as words: of a micro-batch one way, as it is and sparsified. saves: milliseconds of a step, activations and "
    "gradients of all micro-batches, where nothing else hides their way; a pipeline hides some of it."
)
OWN = "Each stage's step is predicted by itself: waiting for its neighbours is not in it."


def heading(plan: PipelinePlan) -> str:
    """How the workers are arranged, and what joins them."""
    stages, replicas = len(plan.stages), plan.stages[0].profile.world_size
    each = "1 replica" if replicas == 1 else f"{replicas} replicas"
    link = plan.stages[0].profile.made["link"]
    return f"{each} of {stages} stages, {stages * replicas} workers · {link}"


def links(plan: PipelinePlan) -> list[tuple[str, str]]:
    """Return what joins the stages on either side of each cut."""
    found = [(row.cut.stage, row.cut.link) for row in plan.boundaries]
    return [
        (f"stage {stage} to {stage + 1}", f"latency {1e3 * link.latency:.2f} ms  bandwidth {bit_rate(link.bandwidth)}")
        for stage, link in found
    ]


def stage_heading(plan: PipelinePlan, stage: int) -> str:
    """What is planned for a stage."""
    replicas = plan.stages[stage].profile.world_size
    if replicas == 1:
        return f"Stage {stage} has one replica: there is nobody to exchange gradients with."
    return f"Stage {stage}, gradients between its {replicas} replicas:"


def print_pipeline(console: Console, plan: PipelinePlan, *, unfolded: bool) -> None:
    """Print the table of cuts, and each stage's plan; `unfolded` shows every tensor."""
    plain = ASCII if console.options.ascii_only else {}

    def say(text: str, style: str = "", indent: str = "") -> None:
        filled = textwrap.fill(text, console.width, subsequent_indent=indent, break_long_words=False)
        console.print(Text(filled.translate(plain), style=style), soft_wrap=True)

    say(heading(plan), "bold")
    for name, link in links(plan):
        say(f"  {name}  {link}")
    say(f"{plan.crossings.micro_batches} micro-batches a step", "dim")
    console.print()
    for text, style in _table(plan, console.width):
        console.print(Text(text.translate(plain), style=style), soft_wrap=True)
    say(NOTE, "dim")
    console.print()
    say(f"{plan.verdict[0].upper()}{plan.verdict[1:]}.", "bold")
    for stage, own in enumerate(plan.stages):
        console.print()
        say(stage_heading(plan, stage), "bold")
        if own.profile.world_size > 1:
            print_plan(console, own.profile, own, every(own) if unfolded else folded(own))
    console.print()
    say(OWN, "dim")


def _table(plan: PipelinePlan, width: int) -> Iterator[tuple[str, str]]:
    """Yield text and style of each line of text."""
    head, *lines = ["  ".join(cells) for cells in zip(*(c.cells(plan.boundaries) for c in COLUMNS), strict=True)]
    yield head, "bold"
    for row, line in zip(plan.boundaries, lines, strict=True):
        yield line, ""
        yield textwrap.fill(boundary_reason(row), width, initial_indent="  ", subsequent_indent="  "), "dim"
