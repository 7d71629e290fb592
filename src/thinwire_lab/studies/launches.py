"""How many calls does a step take: of kernels, of torch's operators, and launches on a GPU? Counted, without a GPU.

    python -m thinwire_lab.studies.launches
    python -m thinwire_lab.studies.launches --recipes topk,dgc --before ../older/src --markdown launches.md

It takes steps of the model of `thinwire bench` in DDP's buckets, once on the CPU, and once on fake tensors that take a
GPU's path: they have a shape and no elements, so no GPU is needed. A step is taken apart into *encode*, *exchange*
(writing and reading the buffers that travel) and *decode* (with what the memory then does). Counted are

- kernels: calls of `thinwire.kernels`, whichever implementation runs;
- operators: torch's own that touch elements, so neither views nor allocations;
- launches: the same on a GPU, plus those of Triton;
- passes: bytes that all launches are given to read and to write, over the bytes of the gradients.

With `--before`, the same is done with another checkout's `src`, in turn, and the times of both are compared in pairs.
"""

import json as js
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensorMode

from thinwire import trace
from thinwire.reducer import Bucket, Round, Segment
from thinwire.waits import Verdict
from thinwire_lab.check.gpu.buckets import made
from thinwire_lab.check.gpu.counting import counting, fake_group, gpu_path, patched
from thinwire_lab.problems.transformer import ByteGPT, Shape
from thinwire_lab.show.table import Table
from thinwire_lab.show.table import markdown as in_markdown
from thinwire_lab.show.terminal import print_table

SCHEMA = "thinwire.launches/1"
RECIPES = (
    "dense,bf16,fp16,topk,sampled_topk,dgc,dragonn,fading,orthogonal,demo,randomk,fft,dct_dp,dct_steered,mstopk,"
    "qsgd,qsgd_l2,terngrad,signsgd"
)
"""Those of one or two collectives. The others take rounds whose sizes only the keys say, and fake tensors have none."""
BUCKETS = [1 << 20, 25 << 20]  # bytes, as DDP's
WORLD = 2
PHASES = ("encode", "exchange", "decode")

console = Console(width=None if sys.stdout.isatty() else 150)


def main(
    recipes: Annotated[str, typer.Option(help="Names, separated by commas.")] = RECIPES,
    steps: Annotated[int, typer.Option(min=3, help="Steps that are timed, after some that warm up.")] = 60,
    before: Annotated[Path | None, typer.Option(help="Another checkout's src, to compare with.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each checkout is timed, with --before.")] = 5,
    count: Annotated[bool, typer.Option(help="Count too, which takes longer than timing.")] = True,
    json: Annotated[Path | None, typer.Option(help="Write the rows here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables here.")] = None,
) -> None:
    """Count calls and launches, and time encoding and decoding."""
    names = recipes.split(",")
    if unknown := [name for name in names if name not in RECIPES.split(",")]:
        raise typer.BadParameter(
            f"{unknown[0]!r} cannot be counted; expected some of {RECIPES}", param_hint="--recipes"
        )
    if before is None:
        rows = {"now": {name: _timed(name, steps) | (_counted(name) if count else {}) for name in names}}
    else:
        rows = _paired(names, steps, before.resolve(), rounds, count=count)
    tables = [_calls(rows[when], when) for when in rows if count]
    if before is not None:
        tables.append(_times(rows))
    for table in tables:
        print_table(console, table)
    if json is not None:
        json.write_text(js.dumps({"schema": SCHEMA, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    if markdown is not None:
        markdown.write_text("\n\n".join(map(in_markdown, tables)) + "\n")


# --- what a step does ---


def _segments() -> list[tuple[Segment, ...]]:
    """Return the bench's parameters as DDP puts them in buckets, the last ones first."""
    named = list(ByteGPT(Shape.of(1)).named_parameters())[::-1]
    assigned, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]  # as DDP calls it
        [parameter for _, parameter in named], BUCKETS
    )
    buckets = []
    for places in assigned:
        end, segments = 0, []
        for name, parameter in (named[place] for place in places):
            segments.append(Segment(name=name, offset=end, length=parameter.numel(), shape=tuple(parameter.shape)))
            end += parameter.numel()
        buckets.append(tuple(segments))
    return buckets


def _steps(name: str, count: int, before_each: Callable[[int], None], *, fake: bool) -> None:
    """Take steps. The group is one whose ranks all send what this one sends."""
    buckets, group = _segments(), fake_group(WORLD)
    recipe = made(name, [segment.name for segments in buckets for segment in segments])
    generator = None if fake else torch.Generator().manual_seed(0)
    drawn = [torch.randn(sum(s.length for s in segments), generator=generator) for segments in buckets]
    for step in range(count):
        flats = [flat.roll(step) for flat in drawn]
        before_each(step)
        at = Round(step=step, group=group, scale=1 / WORLD, verdict=Verdict() if fake else None)
        for segments, flat in zip(buckets, flats, strict=True):
            recipe.reduce(Bucket(flat=flat, segments=segments), at).wait()
        for memory in recipe.memories():
            memory.commit()


# --- counting ---


def _counted(name: str) -> dict[str, Any]:
    with counting() as count:
        _steps(name, 2, lambda step: count.clear(), fake=False)
        found = {phase: dict(here) for phase, here in count.phases.items()}
    with gpu_path(), FakeTensorMode(allow_non_fake_inputs=True), counting() as count:
        _steps(name, 2, lambda step: count.clear(), fake=True)
    nbytes = sum(segment.length for segments in _segments() for segment in segments) * 4
    launches = {phase: here["operators"] + here["triton"] for phase, here in count.phases.items()}
    passes = {phase: here["bytes"] / nbytes for phase, here in count.phases.items()}
    return {"calls": found, "launches": launches, "passes": passes}


# --- timing ---


def _timed(name: str, steps: int) -> dict[str, Any]:
    """Return the median of each phase's milliseconds in a step: the thread's processor time, as others may run too."""
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"encode": [], "decode": []}
    with patched((time, "perf_counter", time.thread_time)), trace.listen(trace.Recorder()) as recorder:

        def note(step: int) -> None:
            for phase, found in seconds.items():
                found.append(recorder.seconds(phase))
            recorder.clear()

        _steps(name, steps + 10, note, fake=False)
    return {"ms": {phase: 1e3 * median(found[10:]) for phase, found in seconds.items()}}


def _paired(names: list[str], steps: int, before: Path, rounds: int, *, count: bool) -> dict[str, Any]:
    """Run both checkouts in turn. Times are medians over rounds; each round has processes of its own."""
    sources = {"before": before, "now": Path(trace.__file__).parents[1]}
    found: dict[str, Any] = {when: [] for when in sources}
    for number in range(rounds):
        for when, source in sources.items():
            found[when].append(_elsewhere(names, steps, source, count=count and not number))
    for each in found.values():
        for name in names:
            each[0][name]["rounds"] = [one[name]["ms"] for one in each]
    return {when: each[0] for when, each in found.items()}


def _elsewhere(names: list[str], steps: int, source: Path, *, count: bool) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        found = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--recipes", ",".join(names), "--steps", str(steps), "--json", str(found)]
        command += [] if count else ["--no-count"]
        (Path(folder) / "thinwire").symlink_to(source / "thinwire")  # with this lab, whatever the other checkout has
        (Path(folder) / "thinwire_lab").symlink_to(Path(__file__).parents[1])
        subprocess.run(command, env=os.environ | {"PYTHONPATH": folder}, stdout=subprocess.DEVNULL, check=True)
        rows: dict[str, Any] = js.loads(found.read_text())["rows"]["now"]
    return rows


# --- tables ---


def _calls(rows: dict[str, Any], when: str) -> Table:
    """Return the counts of a step, in all buckets: encode + exchange + decode."""
    headings = ("recipe", "kernels", "operators", "launches on a GPU", "passes", "encode, ms", "decode, ms")
    return Table(title=when, headings=headings, rows=[_cells(name, row) for name, row in rows.items()], left=(0,))


def _cells(name: str, row: dict[str, Any]) -> list[str]:
    calls, ms = row["calls"], row["ms"]
    counts = ({phase: here.get(kind, 0) for phase, here in calls.items()} for kind in ("kernels", "operators"))
    parts = [" + ".join(str(found.get(phase, 0)) for phase in PHASES) for found in (*counts, row["launches"])]
    return [f"`{name}`", *parts, f"{sum(row['passes'].values()):.1f}", f"{ms['encode']:.2f}", f"{ms['decode']:.2f}"]


def _times(rows: dict[str, Any]) -> Table:
    """Return the times of both, and the ratio of each round's pair."""
    headings = ["recipe"]
    for phase in ("encode", "decode"):
        headings += [f"{phase} before, ms", "now, ms", "now / before: median (least - most)"]
    return Table(title="paired", headings=headings, rows=[_pair(name, rows) for name in rows["now"]], left=(0,))


def _pair(name: str, rows: dict[str, Any]) -> list[str]:
    cells = [f"`{name}`"]
    for phase in ("encode", "decode"):
        before, now = ([one[phase] for one in rows[when][name]["rounds"]] for when in ("before", "now"))
        ratios = [b / a for a, b in zip(before, now, strict=True)]
        cells += [f"{median(before):.2f}", f"{median(now):.2f}"]
        cells += [f"{median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"]
    return cells


if __name__ == "__main__":
    typer.run(main)
