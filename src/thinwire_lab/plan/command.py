"""`thinwire plan`, from a request to the printed plan and written files."""

from collections.abc import Callable, Sequence
from functools import partial
from json import loads
from pathlib import Path

from rich.console import Console

from thinwire.files import write_atomically
from thinwire.planner import Plan, decide
from thinwire_lab.cluster.workers import ended, is_first
from thinwire_lab.inputs import BadInput
from thinwire_lab.plan.report import UNKNOWN_OPTIMIZER, Chapter, every, folded, html, print_plan
from thinwire_lab.plan.sources import Source, Wishes
from thinwire_lab.show.page import Files
from thinwire_lab.show.terminal import complain, print_raw, print_written


def run(
    source: Source,
    wishes: Wishes,
    *,
    unfolded: bool,
    tensors: bool = True,
    questions: Sequence[Callable[[Plan], Chapter]] = (),
    **files: Path | None,
) -> int:
    """Get a profile, decide, print, write the `files`, and return the exit code. Raises BadInput."""
    first = is_first()
    console, wanted = Console(quiet=not first), Files(**(files if first else {}))

    def work() -> None:
        with console.status("measuring"):
            known = source.known(wishes)
            if wanted.profile is not None:  # first of all: measuring takes longest
                write_atomically(wanted.profile, known.measured.to_json() + "\n")
            try:
                plan = decide(known.profile, known.budget)
                chapters = [question(plan) for question in questions]  # raises before anything is printed
            except ValueError as error:  # a profile that cannot be planned for
                raise BadInput(str(error)) from error
        document = loads(plan.to_json()) | {each.key: each.document for each in chapters}
        wanted.write(document, partial(html, known.measured, plan, chapters))
        rows = (every if unfolded else folded)(plan) if tensors else None
        print_plan(console, known.measured, plan, rows, chapters)
        print_written(console, wanted.paths)
        if tensors and first and known.budget.optimizer is None and wishes.names is None:
            print_raw(Console(stderr=True), UNKNOWN_OPTIMIZER)

    code, reason = ended(work)
    if reason:
        complain("plan", reason)
    return code
