"""`thinwire check --gpu`, part by part. Each row is written as soon as it is there, and none is measured twice."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from thinwire.files import write_atomically
from thinwire_lab.check.about import versions
from thinwire_lab.check.findings import first_line
from thinwire_lab.check.gpu import buckets, cost, first, halves, held, large, layouts, network, steps
from thinwire_lab.check.gpu.buckets import OTHERS, RECIPES, WORLD, Case
from thinwire_lab.check.gpu.counting import gpu_path
from thinwire_lab.check.gpu.late import check_aborted, check_constants, check_freed, check_late
from thinwire_lab.check.gpu.page import INTERPRETER, page_of
from thinwire_lab.inputs import BadInput, check_writable, reading, write_document
from thinwire_lab.show.table import plain
from thinwire_lab.show.terminal import print_titled, print_written, report_console

Row = dict[str, Any]
SCHEMA = "thinwire.gpu/1"
DTYPES = ("float32", "bfloat16")
_MIB = 1 << 20
_SMALL, _LARGE, _LARGEST = 204_800, 25 * _MIB // 4, 500 * _MIB // 4  # elements of a bucket


@dataclass
class Proof:
    """What has been found, and where it is written. interpreted: without a GPU, through Triton's interpreter."""

    device: torch.device
    quick: bool
    path: Path | None
    console: Console
    document: dict[str, Any] = field(default_factory=dict)
    failed: bool = False

    @property
    def interpreted(self) -> bool:
        """Whether no GPU is used."""
        return self.device.type == "cpu"

    def part(self, name: str, rows: Iterator[tuple[str, Callable[[], Row]]]) -> None:
        """Do what is not there yet of a part's rows, or has failed. A row that raises says so."""
        found: dict[str, Row] = self.document["parts"].setdefault(name, {})
        seconds = self.document["seconds"]
        start = time.perf_counter() - seconds.get(name, 0.0)
        for key, work in rows:
            if key in found and "error" not in found[key]:
                continue
            try:
                found[key] = work()
            except Exception as error:
                found[key] = {"error": first_line(error)}
            seconds[name] = round(time.perf_counter() - start, 1)
            write_document(self.path, **self.document)
        self.failed |= any("error" in row for row in found.values())


def run(*, interpreted: bool, quick: bool, path: Path | None, page: Path | None = None) -> int:
    """Measure, print and write; return 1 if a row failed, else 0. Raises BadInput."""
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    elif not torch.cuda.is_available():
        raise BadInput("--gpu: torch sees no GPU here; with --interpreted it runs without one, and times nothing")
    device = torch.device("cpu" if interpreted else "cuda:0")
    proof = Proof(device, quick, path, report_console())
    name = INTERPRETER if interpreted else torch.cuda.get_device_name(device)
    check_writable((path, page))
    proof.document = {"schema": SCHEMA, "device": name, "quick": quick, "versions": versions()}
    proof.document |= _there(path, proof.document)
    for part in _PARTS:
        part(proof)
    counted = [row for row in proof.document["parts"]["buckets"].values() if "launches" in row]
    proof.document["launches"] = [_where(row) | row["launches"] for row in counted]
    six = [row for row in counted if row["tensors"] == 6 and row["dtype"] == "float32"]
    proof.document["model"] = cost.predicted(six)
    if not proof.interpreted:
        for part in proof.document["parts"]["steps"].values():
            steps.note_overlap(part.get("rows", ()), {row["recipe"]: row for row in six})
    write_document(proof.path, **proof.document)
    if page is not None:
        write_atomically(page, page_of(proof.document))
    _show(proof, counted)
    print_written(proof.console, [path, page])
    return int(proof.failed)


def _there(path: Path | None, head: Row) -> Row:
    """Return what an earlier run has left. Raises BadInput if it was of something else."""
    if path is None or not path.exists():
        return {"seconds": {}, "parts": {}}
    with reading(path, f"JSON of {SCHEMA}"):
        found = json.loads(path.read_text())
        there = {name: found[name] for name in head}
        rest = {name: found[name] for name in ("seconds", "parts")}
    for name, value in head.items():
        if there[name] != value:
            raise BadInput(f"--json {path}: its {name} is {there[name]}; expected {value}, or another file")
    return rest


def _cases(proof: Proof) -> Iterator[Case]:
    small = proof.quick and not proof.interpreted  # tensors that are only counted have no elements
    for tensors, dtype in product((1, 6, 100), DTYPES):
        each = (_SMALL if small else _LARGE) // tensors // 64 * 64
        for recipe in RECIPES:
            yield Case(recipe=recipe, tensors=tensors, dtype=dtype, numel=each * tensors)
    if not small:
        yield from (Case(recipe=recipe, tensors=1, dtype="float32", numel=_LARGEST) for recipe in RECIPES)


def _buckets(proof: Proof) -> None:
    def work(case: Case) -> Row:
        about = {"recipe": case.recipe, "tensors": case.tensors, "dtype": case.dtype, "elements": case.numel}
        return about | (buckets.counted(case) if proof.interpreted else buckets.measured(case, proof.device))

    proof.part("buckets", ((case.name, partial(work, case)) for case in _cases(proof)))


def _late(proof: Proof) -> None:
    steps = 3 if proof.interpreted else 14  # nothing is captured without a GPU
    # the interpreter is slow, and for one thread
    names = product(RECIPES, DTYPES) if proof.interpreted else product(RECIPES + OTHERS, (*DTYPES, "float16"))
    cases = (Case(recipe=name, tensors=6, dtype=dtype, numel=6 * 2048) for name, dtype in names)
    _compared(proof, "late", lambda case: check_late(case, proof.device, steps), cases)


def _freed(proof: Proof) -> None:
    numel, steps = (2048, 4) if proof.interpreted else (10 * _SMALL, 20)
    cases = (Case(recipe=name, tensors=1, dtype="float32", numel=numel) for name in ("topk", "orthogonal"))
    _compared(proof, "freed", lambda case: check_freed(case, proof.device, steps), cases)


def _constants(proof: Proof) -> None:
    _compared(proof, "constants", lambda case: check_constants(case, proof.device), _few(proof, *RECIPES))


def _aborted(proof: Proof) -> None:
    gathered = (name for name in RECIPES if name not in ("dense", "bf16"))  # those are summed in place
    _compared(proof, "aborted", lambda case: check_aborted(case, proof.device), _few(proof, *gathered))


def _few(proof: Proof, *names: str, numel: int = _SMALL) -> Iterator[Case]:
    """Yield buckets of these recipes; through the interpreter, which is slow, a tiny one of Top-k alone."""
    for name in ("topk",) if proof.interpreted else names:
        each = 1088 if proof.interpreted else numel // 6 // 64 * 64
        yield Case(recipe=name, tensors=6, dtype="float32", numel=6 * each)


def _compared(proof: Proof, part: str, check: Callable[[Case], Row | None], cases: Iterator[Case]) -> None:
    def work(case: Case) -> Row:
        with gpu_path() if proof.interpreted else nullcontext():
            return check(case) or {"ok": True}

    proof.part(part, ((case.name, partial(work, case)) for case in cases))


def _first(proof: Proof) -> None:
    count = (2,) if proof.interpreted else ()
    cases = _few(proof, *first.RECIPES, numel=_SMALL if proof.quick else _LARGE)
    proof.part("first", ((case.recipe, partial(first.measured, case, proof.device, *count)) for case in cases))


def _held(proof: Proof) -> None:
    counts = (6, 2) if proof.interpreted else ()
    cases = _few(proof, *RECIPES, numel=_SMALL if proof.quick else _LARGE)
    _compared(proof, "held", lambda case: held.measured(case, proof.device, *counts), cases)


def _layouts(proof: Proof) -> None:
    count = 3 if proof.interpreted else 300
    proof.part("layouts", iter([(f"{count} layouts", lambda: layouts.checked(proof.device, count))]))


def _halves(proof: Proof) -> None:
    names = ("topk",) if proof.interpreted else halves.NAMES
    rows = ((kind, partial(halves.compared, kind, proof.device, names)) for kind in halves.KINDS)
    proof.part("halves", rows)


def _large(proof: Proof) -> None:
    def work(each: large.Large) -> Row:
        with gpu_path() if proof.interpreted else nullcontext():
            return large.checked(each, proof.device)

    cases = large.TINY if proof.interpreted else large.LARGE
    proof.part("large", ((name, partial(work, each)) for name, each in cases.items()))


def _kernels(proof: Proof) -> None:
    """Time every kernel beside a copy; a few, without a GPU."""
    sizes = "2^20" if proof.quick else f"{_LARGE},2^27"
    options: tuple[str, ...] = ("--device", "cuda", "--sizes", sizes, "--repeats", "7")
    if proof.interpreted:
        options = ("--device", "cpu", "--sizes", "1000", "--repeats", "1", "--only", "largest,scatter")

    def work() -> Row:
        rows = _written("thinwire_lab.studies.kernels", *options, to="--output")["rows"]
        return steps.with_errors(rows, [f"{row['name']}: {row['why']}" for row in rows if not row["correct"]])

    proof.part("kernels", iter([("beside their floors", work)]))


def _ranks(proof: Proof) -> None:
    """Have every recipe train on one rank with NCCL, and on two with Gloo that share the GPU; one on two without."""
    options = ("--device", "cpu", "--only", "topk") if proof.interpreted else ("--device", "cuda")

    def work() -> Row:
        found = _written("thinwire", "check", "--quick", *options, to="--json")["findings"]
        wrong = [f"{row['section']}: {row['name']}: {row['said']}" for row in found if row["ok"] is False]
        return steps.with_errors(found, wrong)

    proof.part("ranks", iter([("thinwire check --quick", work)]))


def _written(module: str, *options: str, to: str) -> Any:
    """Run a module, and return the JSON that it writes. Raises RuntimeError if there is none."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        done = subprocess.run(
            [sys.executable, "-m", module, *options, to, str(path)], capture_output=True, text=True, check=False
        )
        if not path.exists():
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise RuntimeError(f"-m {module} ended with status {done.returncode}: {last}")
        return json.loads(path.read_text())


def _network(proof: Proof) -> None:
    """Time steps over links of limited rates, where there are two GPUs; without any, on a slower one."""
    if not proof.interpreted and torch.cuda.device_count() < network.RANKS:
        proof.part("network", iter([("links", lambda: {"left_out": "one GPU; expected two"})]))
        return
    case: tuple[Any, ...] = ("cuda", steps.TOKENS[1], network.RECIPES)
    if proof.interpreted:
        case = "cpu", steps.FEW, network.RECIPES[:2]
    links = ("1gbit",) if proof.interpreted else network.LINKS
    proof.part("network", ((link, partial(network.timed, link, *case)) for link in links))


def _steps(proof: Proof) -> None:
    shape = steps.TINY if proof.interpreted else steps.SHAPE
    tokens = steps.TOKENS[:1] if proof.quick else steps.TOKENS

    def work(tokens: int) -> Row:
        return steps.gathered(steps.timed(tokens, proof.device, steps.RECIPES, shape))

    with steps.one_rank(proof.device):
        for each in (steps.FEW,) if proof.interpreted else tokens:
            proof.part("steps", iter([(f"{each} tokens", partial(work, each))]))


_PARTS = (
    _first, _late, _freed, _aborted, _layouts, _held, _buckets, _steps, _ranks, _halves, _network, _kernels, _large,
    _constants,
)  # fmt: skip
"""Last is what may end in an access out of bounds, after which this process can use the GPU no more."""


def _where(row: Row) -> Row:
    return {key: row[key] for key in ("recipe", "tensors", "dtype", "elements")}


def _show(proof: Proof, counted: list[Row]) -> None:
    parts = proof.document["parts"]
    tables = {
        f"Launches for a bucket of {WORLD} ranks on {proof.document['device']}": list(map(_taken, counted)),
        f"A step of {WORLD} ranks, ms, predicted": proof.document["model"],
    }
    if not proof.interpreted:  # what a CPU takes tells nothing of a GPU
        tables["A step of a GPT in DDP over NCCL with one rank"] = _stepped(*parts["steps"].values())
    tables |= {f"Two ranks, {link}": _stepped(row) for link, row in parts["network"].items()}
    for title, rows in tables.items():
        if rows:
            print_titled(proof.console, plain(rows, title))
    for part, found in parts.items():
        for key, row in found.items():
            if "left_out" in row:
                proof.console.print(f"{part}, {key}: not run, {row['left_out']}", markup=False)
            if "error" in row:
                proof.console.print(f"✗ {part}: {key}: {row['error']}", style="bold red", markup=False)
    took = ", ".join(f"{name} {seconds} s" for name, seconds in proof.document["seconds"].items())
    proof.console.print(f"took: {took}", markup=False)


def _taken(row: Row) -> Row:
    """Return a bucket's launches, and on a GPU what they took; `copy_ms`: of a copy of the bucket."""
    found = _where(row) | {phase: row["launches"].get(phase, 0) for phase in buckets.PHASES}
    if "host_us" not in row:
        return found
    host, captured = row["host_us"]["all"], row["captured"]
    found |= {"host_us": host, "captured_us": captured["host_us"]["all"], "busy_ms": sum(row["busy_ms"].values())}
    return found | {"captured_ms": captured["device_ms"], "copy_ms": row["floor_ms"]}


def _stepped(*parts: Row) -> list[Row]:
    rows = [row for part in parts for row in part.get("rows", ())]
    own = [{key: row.get(key) for key in ("name", "optimizer", "tokens", "ms")} for row in rows]
    return [found | {"behind_backward": row.get("hidden")} for found, row in zip(own, rows, strict=True)]
