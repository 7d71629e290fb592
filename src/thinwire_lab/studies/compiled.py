"""What do the large Triton kernels take once they are compiled? Compiled for GPUs that need not be there.

    python -m thinwire_lab.studies.compiled
    python -m thinwire_lab.studies.compiled --markdown compiled.md --json compiled.json

ptxas, which comes with Triton, says how many registers a thread takes, what is spilled, and how much shared memory a
program takes. For AMD's GPUs the kernel's own header says it. *Streamed* are the bytes an element that the kernel loads
and stores in vectors of 8 and 16 bytes, counted in the PTX for sm_90; where they equal *the least*, the kernel moves
what the operation cannot do without, in the widest accesses there are. What it moves besides, in single words and only
where there is something, is reckoned from its design, for a whole encode with error feedback.
"""

import json as js
import re
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import triton
import typer
from rich.console import Console
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from thinwire_lab.show.table import Table
from thinwire_lab.show.table import markdown as in_markdown
from thinwire_lab.show.terminal import print_table

SCHEMA = "thinwire.compiled/1"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
REGISTERS = {"cuda": 65_536, "hip": 131_072}
"""Registers of a multiprocessor, and of a compute unit."""
MOST_WARPS = {80: 64, 90: 64, 100: 64, "gfx942": 32}
"""How many warps may run on one of these at a time."""
TILE, ROOM = 4096, 64
FLOAT, INT = "*fp32", "*i32"

console = Console(width=150)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel as a step launches it on float32.

    arguments: the type of each argument; those left out are constants. least: the bytes an element that it must move.
    """

    folder: str
    kernel: str
    arguments: dict[str, str]
    constants: dict[str, Any]
    least: float
    num_warps: int = 8


_PER_TILE = (4 + 4 + 4 * ROOM / 8) / TILE  # a count, a peak, and the lines of memory that the picks are written to
_SUM = {"x": FLOAT, "residual": FLOAT, "gradient": FLOAT, "scale": FLOAT, "high": "i32", "low": "i32"}
_FOUND = {"threshold": FLOAT, "n": "i32", "counts": INT, "peaks": INT, "kept": INT}
_MOVING = {"velocity_out": FLOAT, "velocity": FLOAT, "momentum": FLOAT}
_SELECTING = {"TILE": TILE, "ROOM": ROOM}
_DIGITS = {"x": FLOAT, "histograms": INT, "found": INT, "n": "i32", "k": "i32"}
_FOUR = {"LEVELS": 4, "TILE": TILE}

CASES = {
    "select": Case(
        folder="select",
        kernel="_find",
        arguments={"x": FLOAT, "high": "i32", "low": "i32"} | _FOUND,
        constants=_SELECTING | {"HOW": "given"},
        least=4,
    ),
    "accumulate_select": Case(
        folder="select",
        kernel="_find",
        arguments=_SUM | _FOUND,
        constants=_SELECTING | {"HOW": "sum"},
        least=12,
    ),
    "accumulate_fading_select": Case(
        folder="select",
        kernel="_find",
        arguments=_SUM | {"momentum": FLOAT} | _FOUND,
        constants=_SELECTING | {"HOW": "fading"},
        least=12,
    ),
    "accumulate_momentum_select": Case(
        folder="select",
        kernel="_find",
        arguments=_SUM | _MOVING | _FOUND,
        constants=_SELECTING | {"HOW": "momentum"},
        least=20,
    ),
    "accumulate_rounded_select": Case(
        folder="select",
        kernel="_find",
        arguments=_SUM
        | {"x": "*bf16", "residual": "*bf16", "threshold": "*bf16", "peaks": "*i16"}
        | {key: value for key, value in _FOUND.items() if key not in ("threshold", "peaks")},
        constants=_SELECTING | {"HOW": "rounded"},
        least=8,
    ),
    "largest: a digit": Case(
        folder="select",
        kernel="_count_digits",
        arguments=_DIGITS | {"level": "i32"},
        constants=_FOUR,
        least=4,
    ),
    "largest: counts": Case(
        folder="select", kernel="_count", arguments=_DIGITS | {"counts": "*i64"}, constants=_FOUR, least=4
    ),
    "largest: places": Case(
        folder="select",
        kernel="_place",
        arguments=_DIGITS | {"counts": "*i64", "ends": "*i64", "out": INT},
        constants=_FOUR,
        least=4,
    ),
    "accumulate_fading": Case(
        folder="accumulate",
        kernel="_accumulate",
        arguments={"out": FLOAT} | {k: v for k, v in _SUM.items() if k != "x"} | {"momentum": FLOAT, "n": "i32"},
        constants={"HOW": "fading", "TILE": TILE},
        least=12,
    ),
    "scatter": Case(
        folder="scatter",
        kernel="_write",
        arguments={
            "out": FLOAT,
            "starts": INT,
            "stops": INT,
            "indices": INT,
            "values": FLOAT,
            "bounds": INT,
            "disorder": INT,
            "count": "i32",
            "tiles": "i32",
        },
        constants={"TILE": 16384, "CHUNK": 256},
        least=4,
    ),
    "pack_bits, 8 to a byte": Case(
        folder="bits",
        kernel="_pack",
        arguments={"codes": "*u8", "out": "*u8", "count": "i32", "nbytes": "i32"},
        constants={"BITS": 1, "BLOCK": 1024},
        least=1.125,
        num_warps=4,
    ),
    "unpack_bits, 10 of a code": Case(
        folder="bits",
        kernel="_unpack",
        arguments={"buffer": "*u8", "codes": "*i16", "count": "i32", "nbytes": "i32"},
        constants={"BITS": 10, "BLOCK": 1024},
        least=3.25,
        num_warps=4,
    ),
    "several: sums": Case(
        folder="accumulate",
        kernel="_accumulate_each",
        arguments={
            "like": FLOAT,
            "gradient_like": FLOAT,
            **dict.fromkeys(("out", "velocity_out", "residual", "velocity", "gradient", "size"), "*i64"),
            "scale": "*i64",
            "momentum": "*i64",
            "tiles": INT,
            "count": "i32",
        },
        constants={"HOW": "sum", "TILE": TILE},
        least=12,
    ),
    "several: picks": Case(
        folder="sampled",
        kernel="_find",
        arguments={
            "counts": INT,
            "kept": INT,
            "like": FLOAT,
            "at": "*i64",
            "size": "*i64",
            "histograms": INT,
            "nans": INT,
            "rank": "*i64",
            "tiles": INT,
            "count": "i32",
        },
        constants={"LEVELS": 4, "TILE": TILE, "ROOM": ROOM},
        least=4,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What ptxas or the code object says. spilled: bytes a thread; shared: bytes a program; warps: at a time.

    streamed: bytes an element in vector accesses, 0 where there is no PTX.
    """

    registers: int
    spilled: int
    shared: int
    warps: float
    streamed: float


def main(
    json: Annotated[Path | None, typer.Option(help="Write the rows here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables here.")] = None,
) -> None:
    """Compile every kernel for every target, and print what it takes."""
    rows = {name: {target: _compiled(case, target) for target in TARGETS} for name, case in CASES.items()}
    tables = [_kernels(rows), _encode()]
    for table in tables:
        print_table(console, table)
    if json is not None:
        found = {name: {target: asdict(each) for target, each in row.items()} for name, row in rows.items()}
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        json.write_text(js.dumps({"schema": SCHEMA, **versions, "rows": found}, indent=1) + "\n")
    if markdown is not None:
        markdown.write_text("\n\n".join(map(in_markdown, tables)) + "\n")


def _compiled(case: Case, name: str) -> Compiled:
    function, target = getattr(import_module(f"thinwire.kernels.{case.folder}.triton"), case.kernel), TARGETS[name]
    given = set(case.arguments) | set(case.constants)
    constants = case.constants | {argument: None for argument in function.arg_names if argument not in given}
    signature = {a: case.arguments.get(a, "constexpr") for a in function.arg_names}
    # As it is launched: memory begins at a multiple of 16 bytes, and lengths of large vectors are such multiples, too.
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, a in enumerate(function.arg_names) if a == "n" or signature[a][0] == "*"
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": case.num_warps} | ({"enable_fp_fusion": False} if target.backend == "cuda" else {})
    done = triton.compile(source, target=target, options=options)
    registers, spilled = _by_ptxas(done.asm, target) if target.backend == "cuda" else _by_header(done.asm)
    return Compiled(
        registers=registers,
        spilled=spilled,
        shared=done.metadata.shared,
        warps=_warps(registers, target, case),
        streamed=_streamed(done.asm.get("ptx", ""), case),
    )


def _streamed(ptx: str, case: Case) -> float:
    """Return the bytes an element in accesses of several words. Loops would count once; the large kernels have none."""
    found = re.findall(r"(?:ld|st)\.global\S*?\.v([248])\.b(\d+)", ptx)
    elements = case.constants["TILE" if "TILE" in case.constants else "BLOCK"]
    return sum(int(many) * int(bits) // 8 for many, bits in found) * 32 * case.num_warps / elements


def _by_ptxas(asm: Any, target: GPUTarget) -> tuple[int, int]:
    """Return registers a thread and bytes spilled (stores and loads together)."""
    folder = Path(import_module("triton.backends.nvidia").__file__ or "").parent / "bin"
    arch = "sm_90a" if target.arch == 90 else "sm_100a" if target.arch == 100 else f"sm_{target.arch}"
    ptxas = folder / ("ptxas-blackwell" if target.arch == 100 else "ptxas")
    with TemporaryDirectory() as where:
        ptx = Path(where) / "kernel.ptx"
        ptx.write_text(asm["ptx"])
        command = [str(ptxas), "-v", "--fmad=false", f"--gpu-name={arch}", str(ptx), "-o", f"{where}/kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = re.search(r"Used (\d+) registers", said)
    assert used is not None, said
    return int(used[1]), sum(map(int, re.findall(r"(\d+) bytes spill", said)))


def _by_header(asm: Any) -> tuple[int, int]:
    """Return vector registers a thread and bytes of scratch a thread, from the code object's own account."""
    text = asm["amdgcn"]
    registers, scratch = (re.search(rf"\.{key}:\s+(\d+)", text) for key in ("vgpr_count", "private_segment_fixed_size"))
    assert registers is not None
    assert scratch is not None
    return int(registers[1]), int(scratch[1])


def _warps(registers: int, target: GPUTarget, case: Case) -> float:
    """Return the share of the warps that may run at a time, as registers allow: whole programs of `num_warps`."""
    a_program = case.num_warps * target.warp_size * max(1, -(-registers // 8) * 8)
    programs = REGISTERS[target.backend] // a_program
    return min(1.0, programs * case.num_warps / MOST_WARPS[target.arch])


def _kernels(rows: dict[str, dict[str, Compiled]]) -> Table:
    """Return registers, spills and shared memory on every target, and the bytes that it streams."""
    headings = ("kernel", "the least", "streamed", *TARGETS)
    cells = [
        [f"`{name}`", f"{CASES[name].least:.3g}", f"{row['sm_90'].streamed:.3g}", *map(_cell, row.values())]
        for name, row in rows.items()
    ]
    return Table(
        title="registers / bytes spilled / shared memory / warps at a time", headings=headings, rows=cells, left=(0,)
    )


def _cell(found: Compiled) -> str:
    return f"{found.registers} / {found.spilled} / {found.shared:,} / {found.warps:.0%}"


def _encode() -> Table:
    """Return the traffic of a whole encode with error feedback, at density 0.001, in bytes an element."""
    rows = [[what, f"{nbytes:.3f}"] for what, nbytes in _traffic()]
    total = sum(nbytes for _, nbytes in _traffic())
    rows += [["together", f"{total:.3f}"], ["over three passes (12 bytes)", f"{total / 12:.3f}"]]
    return Table(
        title="encode with error feedback, density 0.001", headings=("what", "bytes an element"), rows=rows, left=(0,)
    )


def _traffic(density: float = 0.001, surplus: float = 1.25) -> Iterator[tuple[str, float]]:
    """Yield what moves, launch by launch, where the threshold's picks fit in their room: see kernels/select/triton.py.

    Whoever reads single elements moves sectors of 32 bytes.
    """
    picks, room, sector = density * surplus, 3 * density * surplus, 32
    yield (
        "the sample: two sectors for each of 80 in every 1.25 · density · d elements",
        2 * sector * 80 / (picks * 126.72e6),
    )
    yield (
        "`accumulate_select`: two vectors read, one written, counts, peaks, the first picks of each tile",
        12 + _PER_TILE,
    )
    yield "joining the picks: counts and picks read, indices written", (3 * 4 + 4 * ROOM / 8) / TILE + 8 * room
    yield "their values: a sector each", sector * picks + 8 * room
    yield "the largest of them: six passes over the room for picks", 6 * 4 * room + 2 * sector * density
    yield "the payload", 3 * 8 * density
    yield "clearing what was sent: a sector read and written", 2 * sector * density


if __name__ == "__main__":
    typer.run(main)
