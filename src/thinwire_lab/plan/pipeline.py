"""`thinwire plan --pipeline`, from a request to the printed plan and written files."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from thinwire.planner import Profile
from thinwire_lab.cluster.link import Rate
from thinwire_lab.cluster.workers import is_first, started
from thinwire_lab.inputs import BadInput, check_writable, write_atomically
from thinwire_lab.plan import boundaries
from thinwire_lab.plan.command import decided, guarded, hint
from thinwire_lab.plan.cuts import Crossings, PipelinePlan, decide_boundaries
from thinwire_lab.plan.sources import Known, Wishes, accepted
from thinwire_lab.plan.worker import checked, measure_stages
from thinwire_lab.show.terminal import print_written


class Found(NamedTuple):
    """What was measured: a profile for each stage, and the cuts."""

    stages: list[Known]
    crossings: Crossings


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
            raise BadInput(f"--boundary {self.density:g} is no share of activations; expected above 0 and below 1")

    def found(self, wishes: Wishes) -> Found:
        """Start the workers, let them measure, and end them."""
        checked(self.subject, self.stages, self.micro_batches)  # otherwise every worker would refuse
        budget = wishes.budget()
        job = {"subject": self.subject, "budget": asdict(budget), "stages": self.stages}
        job |= {"micro_batches": self.micro_batches, "density": self.density}
        with started(self.workers, self.rate, measure_stages) as workers:
            event, *_ = [accepted(event) for _, event in workers.run(job)]
            label = workers.label
        measured = [Profile.from_json(text) for text in event["profiles"]]
        stages = [replace(profile, made={**profile.made, "link": label}) for profile in measured]
        return Found([Known(stage, stage, budget) for stage in stages], Crossings.from_json(event["crossings"]))


def run(source: Pipelined, wishes: Wishes, *, json: Path | None, html: Path | None, unfolded: bool) -> int:
    """Measure, decide, print, write the files, and return the exit code. Raises BadInput."""
    first = is_first()
    console, files = Console(quiet=not first), (json if first else None, html if first else None)
    check_writable(files)

    def work() -> None:
        with console.status("measuring"):
            found = source.found(wishes)
            plans = [decided(known) for known in found.stages]
            plan = PipelinePlan(stages=plans, crossings=found.crossings, boundaries=decide_boundaries(found.crossings))
        for path, make in zip(files, (_json, boundaries.html), strict=True):
            if path is not None:
                write_atomically(path, make(plan))
        boundaries.print_pipeline(console, plan, unfolded=unfolded)
        print_written(console, files)

    code = guarded(work)
    hint(wishes)
    return code


def _json(plan: PipelinePlan) -> str:
    return plan.to_json() + "\n"
