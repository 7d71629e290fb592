"""How far is each kernel, and each step made of kernels, from one pass over the same memory?

    python -m thinwire_lab.studies.kernels --output kernels.json
    python -m thinwire_lab.studies.kernels --device cuda --sizes 2^20,2^24 --only largest,scatter

A kernel gets what `thinwire check` tries it on, and is first compared with the reference as there. If it differs, it
gets no times and the run ends with status 1. Then it is timed in turn with a copy that moves as many bytes as it has
to: `over a copy` is the median of the pairs' ratios. `reference`: how many times as long plain torch takes, up to 4 M
elements. Whole encodes, and the decode of 16 payloads, are those of the check's section on speed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from thinwire.planner.probe.measure import timed
from thinwire_lab.bench.rows import percentiles
from thinwire_lab.check import speed
from thinwire_lab.check.cases import CASES
from thinwire_lab.check.findings import first_line
from thinwire_lab.check.kernels import KERNELS, Limits, check_kernel, implementation
from thinwire_lab.check.material import Kit, flat, tensors
from thinwire_lab.inputs import prepare_file, write_document
from thinwire_lab.machine import environment
from thinwire_lab.show.table import plain
from thinwire_lab.show.terminal import print_titled, report_console

SCHEMA = "thinwire.kernels/2"
COMPARED = 1 << 22  # elements, up to which a CPU's kernels are compared with the reference, and that is timed

console = report_console()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel or step at one size. If it is not `correct`, there are no times, and `why` says what is wrong.

    moved: bytes that it has to read and write. seconds: the 20th, 50th and 80th percentile. copy_seconds: the median of
    copies that move as many. over_copy: the median of paired ratios. reference: its seconds over ours.
    """

    name: str
    elements: int
    backend: str
    correct: bool = True
    why: str = ""
    moved: int = 0
    seconds: Mapping[str, float] | None = None
    copy_seconds: float | None = None
    over_copy: float | None = None
    reference: float | None = None


def main(
    sizes: Annotated[str, typer.Option(help="Numbers of elements.")] = "2^16,2^20,2^24",
    only: Annotated[str, typer.Option(help="Names of rows, separated by commas; all where left out.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(help="Threads of torch and of the kernels.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each row is measured.")] = 9,
    output: Annotated[Path | None, typer.Option(help="Write the rows here, as JSON.")] = None,
) -> None:
    """Measure the kernels; ends with status 1 where one differs from the reference."""
    prepare_file(output)
    torch.set_num_threads(threads)
    names, where, rows = _names(only), _device(device), list[Row]()
    for numel in numbers(sizes):
        with console.status(f"{numel:,} elements"):
            found = list(measured(names, numel, where, repeats))
        print_titled(console, plain([asdict(row) for row in found], title=f"{numel:,} elements"))
        rows += found
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"
    about = environment(device=name, repeats=repeats)
    write_document(output, SCHEMA, environment=about, rows=[asdict(row) for row in rows])
    for row in rows:
        if not row.correct:
            console.print(f"WRONG: {row.name}, {row.elements:,} elements: {row.why}", style="bold red", markup=False)
    raise typer.Exit(int(not all(row.correct for row in rows)))


def measured(names: Sequence[str], numel: int, device: torch.device, repeats: int) -> Iterator[Row]:
    """Yield a row for each name; one that raises leaves the others."""
    for name in names:
        measure = _step if name in speed.ROWS else _kernel
        try:
            yield measure(name, numel, device, repeats)
        except Exception as error:
            yield Row(name=name, elements=numel, backend="", correct=False, why=first_line(error))


def _step(name: str, numel: int, device: torch.device, repeats: int) -> Row:
    row = speed.ROWS[name]
    moved = 4 * row.passes * numel
    return _timed(Row(name=name, elements=numel, backend="", moved=moved), row.make(numel, device), device, repeats)


def _kernel(name: str, numel: int, device: torch.device, repeats: int) -> Row:
    kernel, args = KERNELS[name], next(iter(CASES[name].make(Kit(device), numel))).args
    row = Row(name=name, elements=numel, backend=implementation(kernel, *args))
    ok, said = check_kernel(name, device, Limits(sizes=compared(numel, device)), {})
    if ok is False:
        return replace(row, correct=False, why=said)
    moved = sum(x.nbytes for x in (*tensors(args), *tensors(tuple(flat(kernel(*args))))))
    row = _timed(replace(row, moved=moved), lambda: kernel(*args), device, repeats)
    if numel > COMPARED or row.seconds is None:
        return row
    plain = min(timed(lambda: kernel.reference(*args), device) for _ in range(2))
    return replace(row, reference=plain / row.seconds["p50"])


def compared(numel: int, device: torch.device) -> tuple[int, ...]:
    """Return where a kernel is compared with its reference: on a GPU at the size itself, too, if that is quick."""
    least = min(numel, COMPARED)
    return (least, numel) if device.type == "cuda" and least < numel else (least,)


def _timed(row: Row, work: Callable[[], object], device: torch.device, repeats: int) -> Row:
    pairs = speed.beside_copy(work, row.moved, device, repeats)
    ours, copies = zip(*pairs, strict=True)
    ratio = median(mine / copy for mine, copy in pairs)
    return replace(row, seconds=asdict(percentiles(ours)), copy_seconds=median(copies), over_copy=ratio)


def numbers(text: str) -> list[int]:
    """Read numbers like 2^20 or 126.72M, separated by commas, rising. Raises typer.BadParameter."""
    try:
        found = sorted({_number(part.strip()) for part in text.split(",")})
    except (ValueError, OverflowError):
        found = []
    if not found or not 1 <= found[0] <= found[-1] < 2**31:
        raise typer.BadParameter(f"--sizes is {text!r}; expected numbers from 1 to 2^31, and commas")
    return found


def _number(text: str) -> int:
    base, power, exponent = text.partition("^")
    return int(base) ** int(exponent) if power else round(1e6 * float(text[:-1]) if text[-1:] == "M" else float(text))


def _names(only: str) -> list[str]:
    known = [*speed.ROWS, *sorted(KERNELS)]
    names = [part.strip() for part in only.split(",") if part.strip()] or known
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"--only names {', '.join(unknown)}; expected some of {', '.join(known)}")
    return names


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        raise typer.BadParameter(f"--device is {name!r}; expected cpu, or cuda where torch finds a GPU")
    return torch.device(name)


if __name__ == "__main__":
    typer.run(main)
