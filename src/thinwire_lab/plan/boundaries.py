"""A plan for a pipeline, printed and as a page: first the cuts between stages, then each stage's plan."""

from collections.abc import Iterator

from rich.console import Console

from thinwire_lab.plan import report
from thinwire_lab.plan.cuts import BoundaryRow, PipelinePlan
from thinwire_lab.plan.tensors import every, folded
from thinwire_lab.plan.words import bit_rate, boundary_reason
from thinwire_lab.show import page
from thinwire_lab.show.table import Column, Table, tabulated
from thinwire_lab.show.terminal import print_table, say
from thinwire_lab.show.units import UNKNOWN, human_bytes

_COLUMNS: tuple[Column[BoundaryRow], ...] = (
    Column(heading="cut", text=lambda row: f"stage {row.cut.stage} to {row.cut.stage + 1}", left=True),
    Column(heading="size", text=lambda row: human_bytes(row.cut.dense_bytes)),
    Column(heading="choice", text=lambda row: row.choice, left=True),
    Column(heading="as words", text=lambda row: human_bytes(row.cut.nbytes)),
    Column(heading="saves ms", text=lambda row: f"{1e3 * row.saves:.2f}" if row.pays else UNKNOWN),
)
_NOTE = (
    "size, as words: of a micro-batch one way, as it is and sparsified. saves: milliseconds of a step, activations and "
    "gradients of all micro-batches, where nothing else hides their way; a pipeline hides some of it."
)
_OWN = "Each stage's step is predicted by itself: waiting for its neighbours is not in it."


def print_pipeline(console: Console, plan: PipelinePlan, *, unfolded: bool) -> None:
    """Print the table of cuts, and each stage's plan; `unfolded` shows every tensor."""
    say(console, _heading(plan), "bold")
    for name, link in _links(plan):
        say(console, f"  {name}  {link}")
    say(console, f"{plan.crossings.micro_batches} micro-batches a step", "dim")
    console.print()
    print_table(console, _table(plan))
    say(console, _NOTE, "dim")
    console.print()
    say(console, _verdict(plan), "bold")
    for stage, own in enumerate(plan.stages):
        console.print()
        say(console, _stage_heading(plan, stage), "bold")
        if own.profile.world_size > 1:
            report.print_plan(console, own.profile, own, every(own) if unfolded else folded(own))
    console.print()
    say(console, _OWN, "dim")


def html(plan: PipelinePlan) -> str:
    """Return the page: the cuts, their links, and each stage's plan."""
    return page.page(
        f"thinwire plan: {_heading(plan)}",
        page.chapter("thinwire plan", page.paragraphs([_heading(plan), _verdict(plan)])),
        page.section(
            "Boundaries",
            page.table(_table(plan)),
            page.paragraphs([f"{plan.crossings.micro_batches} micro-batches a step. {_NOTE}"], "soft"),
            page.definitions(dict(_links(plan))),
        ),
        *_stages(plan),
        page.paragraphs([_OWN], "soft"),
    )


def _stages(plan: PipelinePlan) -> Iterator[str]:
    for stage, own in enumerate(plan.stages):
        sections = report.sections(own.profile, own) if own.profile.world_size > 1 else ()
        yield page.chapter(_stage_heading(plan, stage), *sections)


def _table(plan: PipelinePlan) -> Table:
    reasons = [boundary_reason(row) for row in plan.boundaries]
    return tabulated(_COLUMNS, plan.boundaries, why=reasons, under=reasons)


def _verdict(plan: PipelinePlan) -> str:
    return f"{plan.verdict[0].upper()}{plan.verdict[1:]}."


def _heading(plan: PipelinePlan) -> str:
    """The arrangement of the workers, and their link."""
    stages, replicas = len(plan.stages), plan.stages[0].profile.world_size
    each = "1 replica" if replicas == 1 else f"{replicas} replicas"
    link = plan.stages[0].profile.made["link"]
    return f"{each} of {stages} stages, {stages * replicas} workers · {link}"


def _links(plan: PipelinePlan) -> list[tuple[str, str]]:
    """Return the link across each cut."""
    found = [(row.cut.stage, row.cut.link) for row in plan.boundaries]
    return [
        (f"stage {stage} to {stage + 1}", f"latency {1e3 * link.latency:.2f} ms  bandwidth {bit_rate(link.bandwidth)}")
        for stage, link in found
    ]


def _stage_heading(plan: PipelinePlan, stage: int) -> str:
    """What is planned for a stage."""
    replicas = plan.stages[stage].profile.world_size
    if replicas == 1:
        return f"Stage {stage} has one replica: there is nobody to exchange gradients with."
    return f"Stage {stage}, gradients between its {replicas} replicas:"
