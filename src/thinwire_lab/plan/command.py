"""`thinwire plan`, from a request to the printed plan and written files."""

import json as documents
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from thinwire.files import write_atomically
from thinwire.planner import decide
from thinwire_lab.cluster.workers import ended, is_first
from thinwire_lab.inputs import BadInput, check_writable
from thinwire_lab.plan import report
from thinwire_lab.plan.report import UNKNOWN_OPTIMIZER, Chapter, every, folded, print_plan
from thinwire_lab.plan.sources import Source, Wishes
from thinwire_lab.show.terminal import complain, print_raw, print_written


def run(
    source: Source,
    wishes: Wishes,
    *,
    json: Path | None,
    html: Path | None,
    profile: Path | None,
    unfolded: bool,
    tensors: bool = True,
    chapters: Sequence[Chapter] = (),
) -> int:
    """Get a profile, decide, print, write the files, and return the exit code. Raises BadInput."""
    first = is_first()
    console, files = Console(quiet=not first), [path if first else None for path in (profile, json, html)]
    check_writable(files)  # before anything is measured

    def work() -> None:
        with console.status("measuring"):
            known = source.known(wishes)
            if files[0] is not None:  # first of all: measuring takes longest
                write_atomically(files[0], known.measured.to_json() + "\n")
            try:
                plan = decide(known.profile, known.budget)
                answers = {each.key: each.document(plan) for each in chapters}  # raises before anything is printed
            except ValueError as error:  # a profile that cannot be planned for
                raise BadInput(str(error)) from error
        if files[1] is not None:
            document = documents.loads(plan.to_json()) | answers
            write_atomically(files[1], documents.dumps(document, indent=1) + "\n")
        if files[2] is not None:
            write_atomically(files[2], report.html(known.measured, plan, chapters))
        rows = (every if unfolded else folded)(plan) if tensors else None
        print_plan(console, known.measured, plan, rows, chapters)
        print_written(console, files)
        if tensors and first and known.budget.optimizer is None and wishes.names is None:
            print_raw(Console(stderr=True), UNKNOWN_OPTIMIZER)

    code, reason = ended(work)
    if reason:
        complain("plan", reason)
    return code
