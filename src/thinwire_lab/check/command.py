"""`thinwire check`, from options to printed tables, written files and exit code."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from thinwire_lab.check.about import versions
from thinwire_lab.check.findings import Finding
from thinwire_lab.check.launch import Launch
from thinwire_lab.check.report import Report, progress_line
from thinwire_lab.check.sections import Asked, Section
from thinwire_lab.check.supervision import work
from thinwire_lab.inputs import BadInput
from thinwire_lab.show.page import Files
from thinwire_lab.show.terminal import print_raw, print_written, report_console


class CheckProgress:
    """Progress on `console`, drawn within `with progress.bar`."""

    def __init__(self, console: Console, rows: int) -> None:
        self._console = console
        columns = (TextColumn("{task.description}", markup=False), BarColumn(24), MofNCompleteColumn())
        self.bar = Progress(
            *columns, TimeElapsedColumn(), console=console, disable=not console.is_interactive, transient=True
        )
        self._task = self.bar.add_task("starting", total=rows)

    def start(self, section: Section) -> None:
        """Say which section comes."""
        self.bar.update(self._task, description=section.title)
        if not self._console.is_interactive:
            print_raw(self._console, f"{section.title}: {len(section.rows)} rows")

    def found(self, found: Finding) -> None:
        """Note that a row is done."""
        self.bar.update(self._task, advance=1, description=f"{found.section}: {found.name}")
        if found.ok is False:
            print_raw(self._console, progress_line(found))


def asked(*, quick: bool, device: str | None, only: str | None) -> Asked:
    """Read options. Raises BadInput."""
    there = torch.cuda.is_available()
    device = ("cuda" if there else "cpu") if device is None else device
    if device not in ("cpu", "cuda"):
        raise BadInput(f"--device {device!r}: expected cpu or cuda")
    if device == "cuda" and not there:
        raise BadInput("--device cuda: torch sees no GPU here; expected cpu, or a build of torch for your GPU")
    parts = () if only is None else tuple(part.strip() for part in only.split(","))
    if not all(parts):
        raise BadInput(f"--only {only!r}: expected parts of names, separated by single commas")
    return Asked(device=device, quick=quick, only=parts)


def run(options: Asked, *, json: Path | None, html: Path | None) -> int:
    """Check, print and write; return 1 if anything failed, on every rank, else 0. Raises BadInput before it starts."""
    began, started, launch = datetime.now(UTC), time.perf_counter(), Launch.found()
    files = Files(json=json, html=html) if launch.rank == 0 else Files()  # other hosts may lack the folder
    sections = options.sections(None if launch.alone else launch.world)
    for part in options.only:
        if not any(part in row for section in sections for row in section.rows):
            raise BadInput(f"--only {part!r} is part of no row's name; run without it to see them all")
    findings: list[Finding] = []
    rows = sum(len(section.rows) for section in sections)
    reported = partial(Report, versions=versions(), asked=options, ranks=launch.world, began=began)
    progress = CheckProgress(Console(stderr=True, quiet=launch.rank != 0), rows)
    with progress.bar:
        for section in sections:
            progress.start(section)
            findings += work(section, launch, options.device, progress.found)
            seconds, complete = time.perf_counter() - started, section is sections[-1]
            report = reported(findings=findings, seconds=seconds, complete=complete)
            if launch.rank == 0:
                files.write(report.document(), report.html)
    if launch.rank == 0:
        console = report_console()
        report.print(console)
        print_written(console, files.paths)
    return launch.verdict(1 if report.failed else 0)
