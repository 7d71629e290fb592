"""`thinwire plan`, from a request to the printed plan and written files."""

import json as documents
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from thinwire.planner import Plan, Profile, decide
from thinwire_lab.cluster.workers import ended, is_first
from thinwire_lab.inputs import BadInput, check_writable, write_atomically
from thinwire_lab.plan.apart import Apart
from thinwire_lab.plan.report import every, folded, print_plan, write_html
from thinwire_lab.plan.sources import Known, Source, Wishes
from thinwire_lab.plan.words import UNKNOWN_OPTIMIZER
from thinwire_lab.show.terminal import complain, print_raw, print_written


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where the plan is written. Raises BadInput when a file cannot be written, before anything has been measured."""

    console: Console
    json: Path | None
    html: Path | None
    profile: Path | None
    unfolded: bool
    apart: Apart | None = None

    def __post_init__(self) -> None:
        check_writable((self.json, self.html, self.profile))

    def keep(self, measured: Profile) -> None:
        """Save the profile before anything else: measuring takes longest."""
        if self.profile is not None:
            write_atomically(self.profile, measured.to_json() + "\n")

    def show(self, measured: Profile, plan: Plan) -> None:
        """Write the files and print the plan."""
        if self.json is not None:
            write_atomically(self.json, self._document(plan) + "\n")
        if self.html is not None:
            write_html(measured, plan, self.html, self.apart)
        print_plan(self.console, measured, plan, every(plan) if self.unfolded else folded(plan), self.apart)
        print_written(self.console, (self.profile, self.json, self.html))

    def _document(self, plan: Plan) -> str:
        if self.apart is None:
            return plan.to_json()
        return documents.dumps(documents.loads(plan.to_json()) | {"outer": self.apart.document(plan)}, indent=1)


def run(
    source: Source,
    wishes: Wishes,
    *,
    json: Path | None,
    html: Path | None,
    profile: Path | None,
    unfolded: bool,
    apart: Apart | None = None,
) -> int:
    """Get a profile, decide, print, write the files, and return the exit code. Raises BadInput."""
    first = is_first()
    files = {name: path if first else None for name, path in {"json": json, "html": html, "profile": profile}.items()}
    outputs = Outputs(console=Console(quiet=not first), unfolded=unfolded, apart=apart, **files)
    return guarded(lambda: _plan(source, wishes, outputs))


def guarded(work: Callable[[], None]) -> int:
    """Do the work and return the exit code. If something cuts it short, say what. Raises BadInput."""
    code, reason = ended(work)
    if reason:
        complain("plan", reason)
    return code


def hint(wishes: Wishes) -> None:
    """Where the plan chose as if the optimizer did not matter, say on standard error how to name it."""
    if is_first() and wishes.optimizer is None and wishes.names is None:
        print_raw(Console(stderr=True), UNKNOWN_OPTIMIZER)


def decided(known: Known) -> Plan:
    """Decide. Raises BadInput for a profile that cannot be planned for."""
    try:
        return decide(known.profile, known.budget)
    except ValueError as error:
        raise BadInput(str(error)) from error


def _plan(source: Source, wishes: Wishes, outputs: Outputs) -> None:
    with outputs.console.status("measuring"):
        known = source.known(wishes)
        outputs.keep(known.measured)
        plan = decided(known)
    outputs.show(known.measured, plan)
    hint(replace(wishes, optimizer=known.budget.optimizer))
