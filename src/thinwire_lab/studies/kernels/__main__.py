"""How far is each kernel, and each step made of kernels, from the memory passes that it needs at least?

    python -m thinwire_lab.studies.kernels --json > out.json
    python -m thinwire_lab.studies.kernels --output out.json --plot out.png

Each row is first checked against the reference. If it differs, it gets no times and the run ends with status 1. Then it
is timed in turn with its floor (a copy, an addition or a sum of the same tensors, as the row says): the ratio is
meaningful even where times are not. Last comes the torch expression you would write instead.

Densities are swept at the largest number of workers, workers at the density nearest 0.001. Torch expressions slower
than some seconds are left out, and so are rows with more than 2²⁶ picks. On a GPU the floor of an encode is three
passes at its copy rate.
"""

import json as js
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from thinwire_lab.machine import environment
from thinwire_lab.show.terminal import print_titled
from thinwire_lab.studies.kernels.plot import draw
from thinwire_lab.studies.kernels.rows import Row, document
from thinwire_lab.studies.kernels.runner import CASES, Plan, Runner
from thinwire_lab.studies.kernels.tables import complaints, size_table, target_table

SIZES = "2^16,2^18,2^20,2^22,2^24,126.72M"
DENSITIES = "1e-4,1e-3,1e-2,1e-1"

console = Console(stderr=True, width=None if sys.stderr.isatty() else 150)


def main(
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON on stdout.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the results here, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results here, as PNG.")] = None,
    sizes: Annotated[str | None, typer.Option(help=f"Numbers of elements.  [default: {SIZES}]")] = None,
    densities: Annotated[str | None, typer.Option(help=f"Shares that are kept.  [default: {DENSITIES}]")] = None,
    workers: Annotated[str, typer.Option(help="How many payloads are decoded at once.")] = "2,4,8,16",
    only: Annotated[str | None, typer.Option(help="Names of rows, separated by commas.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(help="Threads of torch and of the kernels.")] = 2,
    repeats: Annotated[int | None, typer.Option(help="Times that each row is measured at most.  [default: 15]")] = None,
    seconds: Annotated[float, typer.Option(help="Stop repeating a row after so long, but three times at least.")] = 0.5,
    quick: Annotated[bool, typer.Option("--quick", help="Two sizes, two densities, three repeats.")] = False,
) -> None:
    """Measure the kernels; ends with status 1 where one differs from the reference."""
    torch.set_num_threads(threads)
    plan = Plan(
        names=_names(only),
        sizes=[round(size) for size in numbers("--sizes", sizes or ("2^16,2^20" if quick else SIZES), 1, 2**31 - 1)],
        densities=numbers("--densities", densities or ("1e-3,1e-2" if quick else DENSITIES), 1e-9, 1),
        workers=[round(count) for count in numbers("--workers", workers, 1, 1024)],
        device=_device(device),
        repeats=repeats or (3 if quick else 15),
        budget=seconds,
    )
    rows = _measure(plan)
    device = torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else "cpu"
    found = environment(device=device, repeats=plan.repeats)
    results = js.dumps(document(rows, found), indent=1) + "\n"
    if output is not None:
        output.write_text(results)
    if json:
        print(results, end="")
    if plot is not None:
        draw(rows, found, plot)
    wrong = complaints(rows)
    for complaint in wrong:
        console.print(f"WRONG, so without times: {complaint}", style="bold red", markup=False)
    raise typer.Exit(int(bool(wrong)))


def _measure(plan: Plan) -> list[Row]:
    rows: list[Row] = []
    with console.status("") as status:
        for row in Runner(plan).rows(status.update):
            if rows and row.d != rows[-1].d:
                _show(rows, rows[-1].d)
            rows.append(row)
    if rows:
        _show(rows, rows[-1].d)
        print_titled(console, target_table(rows, on_gpu=plan.device.type == "cuda"))
    return rows


def _show(rows: list[Row], numel: int) -> None:
    print_titled(console, size_table(numel, [row for row in rows if row.d == numel]))


def numbers(option: str, text: str, least: float, most: float) -> list[float]:
    """Read numbers like 1e-3, 2^20 or 126.72M, separated by commas; raises typer.BadParameter."""
    try:
        found = [_number(part.strip()) for part in text.split(",")]
    except (ValueError, OverflowError):
        found = []
    if not found or not all(least <= number <= most for number in found):
        raise typer.BadParameter(f"{option} is {text!r}; expected numbers from {least:g} to {most:g} and commas")
    return sorted(set(found))


def _number(text: str) -> float:
    base, power, exponent = text.partition("^")
    if power:
        return float(base) ** float(exponent)
    return 1e6 * float(text[:-1]) if text.endswith("M") else float(text)


def _names(only: str | None) -> list[str]:
    names = list(CASES) if only is None else [name.strip() for name in only.split(",")]
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise typer.BadParameter(f"--only names {', '.join(unknown)}; expected some of {', '.join(CASES)}")
    return names


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        raise typer.BadParameter(f"--device is {name!r}; expected cpu, or cuda where torch finds a GPU")
    return torch.device(name)


if __name__ == "__main__":
    typer.run(main)
