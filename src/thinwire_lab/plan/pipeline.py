"""`thinwire plan --pipeline`, from a request to the printed plan and written files."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from json import dumps
from pathlib import Path
from typing import Any

from rich.console import Console

from thinwire.planner import Profile
from thinwire_lab.cluster.link import Rate
from thinwire_lab.cluster.workers import is_first, started
from thinwire_lab.inputs import BadInput, check_writable, write_atomically
from thinwire_lab.plan import report
from thinwire_lab.plan.command import decided, guarded, hint
from thinwire_lab.plan.cuts import BoundaryRow, Crossings, PipelinePlan, decide_boundaries
from thinwire_lab.plan.report import every, folded
from thinwire_lab.plan.sources import Known, Wishes, accepted
from thinwire_lab.plan.words import bit_rate
from thinwire_lab.plan.worker import checked, measure_stages
from thinwire_lab.show import page
from thinwire_lab.show.table import Column, Table, tabulated
from thinwire_lab.show.terminal import print_table, print_written, say
from thinwire_lab.show.units import UNKNOWN, human_bytes

_COLUMNS: tuple[Column[BoundaryRow], ...] = (
    Column(heading="cut", text=lambda row: f"stage {row.cut.stage} to {row.cut.stage + 1}", left=True),
    Column(heading="size", text=lambda row: human_bytes(row.cut.dense_bytes)),
    Column(heading="choice", text=lambda row: row.choice, left=True),
    Column(heading="sparsified", text=lambda row: human_bytes(row.cut.nbytes)),
    Column(heading="saves ms", text=lambda row: f"{1e3 * row.saves:.2f}" if row.pays else UNKNOWN),
)
_NOTE = (
    "size, sparsified: of a micro-batch one way, as it is and sparsified. saves: milliseconds of a step, activations "
    "and gradients of all micro-batches, where nothing else hides their way; a pipeline hides some of it."
)
_OWN = "Each stage's step is predicted by itself: waiting for its neighbours is not in it."


def print_pipeline(console: Console, plan: PipelinePlan, *, unfolded: bool) -> None:
    """Print the table of cuts, and each stage's plan; `unfolded` shows every tensor."""
    say(console, _heading(plan), "bold")
    for name, link in _links(plan).items():
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


def drawn(plan: PipelinePlan) -> str:
    """Return the page: the cuts, their links, and each stage's plan."""
    return page.page(
        f"thinwire plan: {_heading(plan)}",
        page.chapter("thinwire plan", page.paragraphs([_heading(plan), _verdict(plan)])),
        page.section(
            "Boundaries",
            page.table(_table(plan)),
            page.paragraphs([f"{plan.crossings.micro_batches} micro-batches a step. {_NOTE}"], "soft"),
            page.definitions(_links(plan)),
        ),
        *_stages(plan),
        page.paragraphs([_OWN], "soft"),
    )


def _stages(plan: PipelinePlan) -> Iterator[str]:
    for stage, own in enumerate(plan.stages):
        sections = report.sections(own.profile, own) if own.profile.world_size > 1 else ()
        yield page.chapter(_stage_heading(plan, stage), *sections)


def _table(plan: PipelinePlan) -> Table:
    reasons = [row.reason for row in plan.boundaries]
    return tabulated(_COLUMNS, plan.boundaries, why=reasons, under=reasons)


def _verdict(plan: PipelinePlan) -> str:
    return f"{plan.verdict[0].upper()}{plan.verdict[1:]}."


def _heading(plan: PipelinePlan) -> str:
    """The arrangement of the workers, and their link."""
    stages, replicas = len(plan.stages), plan.stages[0].profile.world_size
    each = "1 replica" if replicas == 1 else f"{replicas} replicas"
    link = plan.stages[0].profile.made["link"]
    return f"{each} of {stages} stages, {stages * replicas} workers · {link}"


def _links(plan: PipelinePlan) -> dict[str, str]:
    """Return the link across each cut."""
    links = {f"stage {cut.stage} to {cut.stage + 1}": cut.link for cut in plan.crossings.cuts}
    return {
        name: f"latency {1e3 * link.latency:.2f} ms  bandwidth {bit_rate(link.bandwidth)}"
        for name, link in links.items()
    }


def _stage_heading(plan: PipelinePlan, stage: int) -> str:
    """What is planned for a stage."""
    replicas = plan.stages[stage].profile.world_size
    if replicas == 1:
        return f"Stage {stage} has only one replica: no gradients to exchange."
    return f"Stage {stage}, gradients between its {replicas} replicas:"


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """A bench model, split into `stages` on as many workers a replica. Raises BadInput for impossible values.

    density: the share of activations that crosses if a plan sparsifies.
    """

    subject: dict[str, Any]
    workers: int
    rate: Rate | None
    stages: int
    micro_batches: int
    density: float

    def __post_init__(self) -> None:
        if self.stages < 1 or self.workers % self.stages:
            raise BadInput(f"--pipeline {self.stages} does not divide --workers {self.workers} into replicas of stages")
        if self.micro_batches < 1:
            raise BadInput(f"--micro-batches is {self.micro_batches}; expected 1 or more")
        if not 0 < self.density < 1:
            raise BadInput(f"--boundary {self.density:g} is not a share of activations; expected above 0 and below 1")

    def planned(self, wishes: Wishes) -> PipelinePlan:
        """Start the workers, let them measure, end them, and decide."""
        checked(self.subject, self.stages, self.micro_batches)  # otherwise every worker would refuse
        budget = wishes.budget()
        job = {"subject": self.subject, "budget": asdict(budget), "stages": self.stages}
        job |= {"micro_batches": self.micro_batches, "density": self.density}
        with started(self.workers, self.rate, measure_stages) as workers:
            event, *_ = [accepted(event) for _, event in workers.run(job)]
            label = workers.label
        measured = [Profile.from_json(text) for text in event["profiles"]]
        stages = [replace(profile, made={**profile.made, "link": label}) for profile in measured]
        plans, crossings = [decided(Known(each, each, budget)) for each in stages], Crossings.of(event["crossings"])
        return PipelinePlan(plans, crossings, decide_boundaries(crossings))


def run(source: Pipelined, wishes: Wishes, *, json: Path | None, html: Path | None, unfolded: bool) -> int:
    """Measure, decide, print, write the files, and return the exit code. Raises BadInput."""
    first = is_first()
    console, files = Console(quiet=not first), (json if first else None, html if first else None)
    check_writable(files)

    def work() -> None:
        with console.status("measuring"):
            plan = source.planned(wishes)
        for path, make in zip(files, (lambda plan: dumps(plan.document(), indent=1) + "\n", drawn), strict=True):
            if path is not None:
                write_atomically(path, make(plan))
        print_pipeline(console, plan, unfolded=unfolded)
        print_written(console, files)

    code = guarded(work)
    hint(wishes)
    return code
