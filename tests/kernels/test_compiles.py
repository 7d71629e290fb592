"""Do kernels that so far ran in Triton's interpreter alone compile for a GPU, which need not be there?

The interpreter takes what the compiler refuses, such as a name that means tensors of two shapes. It is chosen when
Triton is imported, so the compiler runs in a process of its own.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs/measurements/compiled.md"
FLOAT, INT, LONG, BYTE = "*fp32", "*i32", "*i64", "*u8"
_ELIAS_FANO = dict.fromkeys(("row_stride", "tiles", "count", "low_bits", "low_nbytes", "unary_bits"), "i32")
_TILES = {"tiles": INT}
_SEVERAL = {"at": LONG, "size": LONG, **_TILES}
_PLACES = {"indices": INT, "carried": LONG, **dict.fromkeys(("totals", "ended", "counts", "rows", "candidates"), INT)}
_DRAWN = dict.fromkeys(("bars", "capacity", "start", "room", "begin", "origin", "padding"), LONG)
_SUMS = dict.fromkeys(("out", "velocity_out", "residual", "velocity", "gradient", "size", "scale", "momentum"), LONG)
_KEYS = {"high": "i32", "low": "i32"}
_ELEMENTS = {"own_values": FLOAT, "own_indices": INT, **dict.fromkeys(("offset", "begin", "end"), LONG), **_TILES}
_OWNED = {"out": FLOAT, "values": FLOAT, **dict.fromkeys(("starts", "stops", "indices", "edges"), INT)} | dict.fromkeys(
    ("count", "extent", "gap", "per_row"), "i32"
)
_CHECKED = {"rows": BYTE, "fixed": INT, "flags": "*i1", "given": "*i1"} | dict.fromkeys(
    ("ranks", "stride", "fixed_count", "n"), "i32"
)
_PARTS = {"columns": LONG, "parts": "i32", **_TILES}
_STRIDES = dict.fromkeys(("row_stride", "total", "count", "fixed_count"), "i32")
_RUNS = dict.fromkeys(("begin", "n", "first", "group", "high", "low"), LONG)
_SCALED = dict.fromkeys(("size", "parts", "width", "begin", "part", "first", "source", "high", "low"), LONG)
_READ = {"flags": "*i1", "columns": LONG, "fixed": INT, **_TILES} | dict.fromkeys(
    ("stride", "scales", "codes", "programs", "ranks", "count", "n", "n_b", "n_c", "fixed_count"), "i32"
)
_ARRIVED = {"rows": BYTE, "flags": "*i1", "given": "*i1", "fixed": INT} | dict.fromkeys(
    ("stride", "arrived", "scales", "codes", "n_a", "n_b", "n_c", "fixed_count"), "i32"
)
_DECODED = {"table": FLOAT, "out": "*fp64"}
_NORMS = dict.fromkeys(("begin", "size", "first", "width"), LONG)
_SUBSETS = {"wrong": "*i1", **dict.fromkeys(("programs", "total", "stride"), "i32")}
_CUT = _TILES | dict.fromkeys(
    ("a", "b", "kinds", "n", "chunks", "across", "columns", "height", "width", "kept", "starts"), LONG
)
_DIGITS = {"LEVELS": 4, "TILE": 4096}

KERNELS: list[tuple[str, str, dict[str, str], dict[str, Any]]] = [
    (
        "bits",
        "_write",
        {"out": BYTE, "nbytes": "i32", "table": LONG, "a": BYTE, "b": BYTE, "c": "*i16", "d": INT},
        {"KINDS": (0, 0, 10, -1, 0, 0)},
    ),
    ("bits", "_count_bits", {"rows": BYTE, "found": INT, **_ELIAS_FANO}, {"BITS": 4096}),
    *(
        (
            "bits",
            "_read_bits",
            {**{"rows": BYTE, "keys": INT, "space": "i32", "wrong": "*i1"}, **_ELIAS_FANO, **more},
            {"BITS": 4096, "STEPS": 2},
        )
        for more in ({"found": INT}, {"edges": INT, "inner": "i32"})
    ),
    ("hashing", "_encode", {"out": BYTE, "indices": INT, "misplaced": LONG, "seeds": LONG, **_PARTS}, {}),
    (
        "hashing",
        "_read",
        {**{"out": INT, "rows": BYTE, "wrong": "*i1", "fixed": INT}, **_STRIDES, **_PARTS},
        {"FIXED": 64},
    ),
    (
        "hashing",
        "_hash_each",
        {
            "indices": INT,
            "priorities": "*bf16",
            **dict.fromkeys(("held", "length", "slots", "seed", "first", "size", "start"), LONG),
            **_TILES,
        },
        {},
    ),
    (
        "hashing",
        "_elements_of_each",
        {
            **{"out": INT, "values": "*fp16", "bound": "fp32", "like": FLOAT},
            **dict.fromkeys(("carried", "held", "address", "length", "slots", "start", "offset"), LONG),
            **_TILES,
        },
        {},
    ),
    *(
        (
            "scatter",
            "_settle",
            {"like": FLOAT, "many": "i32", "own_sign": "fp32", "sign": "fp32", **written, **added},
            {"ASCENDING": ascending, "CLEAR": ascending, "TILE": 16384, "CHUNK": 1024, "RUNS": 32, "FIXED": 64},
        )
        for ascending, written, added in (
            (True, _OWNED, {**_ELEMENTS, **_CHECKED, "x": LONG, "masked": LONG}),
            (True, _OWNED | {"out": "*bf16", "values": "*bf16"}, {**_ELEMENTS, "own_values": "*bf16", "x": LONG}),
            (False, _OWNED, {**_ELEMENTS, "x": LONG}),
            (True, _OWNED, {"own_values": FLOAT, "own_indices": INT, "x": FLOAT, "offset": "i32", "end": "i32"}),
            (True, {}, {**_ELEMENTS, "masked": LONG}),
            (False, _OWNED, _CHECKED),
        )
    ),
    *(
        (
            "select",
            "_count_digits_each",
            {"histograms": INT, "like": like, "wanted": LONG, "level": "i32", "span": "i32", **_SEVERAL},
            {"LEVELS": levels, "TILE": 4096},
        )
        for like, levels in ((FLOAT, 4), ("*fp64", 8), ("*bf16", 2))
    ),
    (
        "select",
        "_count_each",
        {
            **{"histograms": INT, "like": FLOAT, "wanted": LONG, "counts": LONG, "sums": LONG, "span": "i32"},
            **_SEVERAL,
        },
        _DIGITS,
    ),
    (
        "select",
        "_place_each",
        {
            **{"histograms": INT, "like": FLOAT, "wanted": LONG, "counts": LONG, "sums": LONG, "starts": LONG},
            **{"firsts": LONG, "indices": INT, "values": FLOAT, "span": "i32", **_SEVERAL},
        },
        _DIGITS,
    ),
    (
        "select",
        "_gather",
        {
            **{"picks": INT, "wanted": LONG, "x": FLOAT, "threshold": FLOAT, "n": "i32", "counts": INT, "ends": INT},
            **{"kept": INT, "tiles": "i32", "capacity": "i32"},
        },
        {"ROOM": 64, "GROUP": 32},
    ),
    *(
        ("sampled", *kernel)
        for like, new, levels, how, exact, written in (
            (FLOAT, "*bf16", 4, "nesterov", False, {"values": FLOAT}),
            (FLOAT, "*fp16", 4, "sum", True, {"values": "*fp16", "bound": "fp32"}),
            (FLOAT, "*bf16", 4, "fading", True, {"values": "*bf16"}),
            ("*fp64", "*fp64", 8, "sum", True, {"values": "*fp64"}),
        )
        for kernel in (
            (
                "_find",
                {
                    **{"like": like, "gradient_like": new, "numbers": like, **written},
                    **{**_SUMS, **_PLACES, **_DRAWN, **_SEVERAL},
                    **({} if exact else dict.fromkeys(("held", "slots", "seeds", "slots_at"), LONG)),
                },
                {"HOW": how, "LEVELS": levels, "STEPS": 11, "EXACT": exact},
            ),
            (
                "_sample",
                {
                    **{"sample": like, "like": like, "gradient_like": new, **_SUMS, **_TILES},
                    **dict.fromkeys(("offset", "stride", "begin"), LONG),
                },
                {"HOW": how},
            ),
            (
                "_threshold",
                {
                    **{"bars": LONG, "like": like, "gradient_like": new, "sample": like, "clear": INT, **_SUMS},
                    **{"cleared": "i32", **dict.fromkeys(("offset", "stride", "rank", "begin"), LONG)},
                },
                {"HOW": how, "LEVELS": levels, "ALONE": not exact, "CHUNK": 8192, "num_warps": 16},
            ),
        )
    ),
    *(
        (
            "accumulate",
            "_accumulate",
            {"like": like, "gradient_like": new, **_SUMS, **_KEYS, **_TILES},
            {"HOW": how},
        )
        for like, new, how in ((FLOAT, "*bf16", "nesterov"), (FLOAT, "*bf16", "fading"), ("*fp64", "*fp64", "sum"))
    ),
    *(
        ("codes", name, {**given, "scales": FLOAT, **_RUNS, **_TILES}, constants)
        for name, given, constants in (
            ("_decode", {"out": "*bf16", "codes": BYTE, "table": FLOAT}, {"LAST": 15}),
            ("_encode", {"codes": BYTE, "x": FLOAT}, {"HOW": "uniform", "GRID": (7, False), "LAST": 0}),
            ("_encode", {**_DECODED, "codes": BYTE, "x": FLOAT}, {"HOW": "ternary", "GRID": (), "LAST": 3}),
            ("_encode", {**_DECODED, "codes": BYTE, "x": FLOAT}, {"HOW": "sign", "GRID": (), "LAST": 1}),
            (
                "_encode",
                {"codes": BYTE, "x": FLOAT},
                {"HOW": "stochastic", "GRID": (20, 0x3E0, 33, 33, "stochastic"), "LAST": 0},
            ),
        )
    ),
    *(
        (
            "codes",
            "_encode_scaled",
            {"codes": BYTE, "x": FLOAT, "scales": FLOAT, **given, **_SCALED, **_TILES},
            {
                "ZERO": 1.0,
                "CLIP": clip,
                "ORDER": order,
                "HOW": how,
                "GRID": grid,
                "LAST": 3,
                "ROWS": rows,
                "COLUMNS": many,
            },
        )
        for given, order, clip, how, grid, rows, many in (
            ({}, 2, 0.0, "uniform", (7, False), 8, 512),
            ({**_DECODED, "widths": "*fp64"}, 0, 2.5, "ternary", (), 1, 4096),
            ({**_DECODED, **dict.fromkeys(("norms", "spreads", "widths"), "*fp64")}, 0, 2.5, "ternary", (), 1, 4096),
            ({**_DECODED, "x": "*bf16", "factor": "fp32", "widths": "*fp64"}, 1, 0.0, "sign", (), 1, 4096),
            ({**_DECODED, **dict.fromkeys(("norms", "spreads", "widths"), "*fp64")}, 1, 0.0, "sign", (), 1, 4096),
        )
    ),
    *(
        (
            "codes",
            "_read",
            {"out": out, "like": like, "rows": BYTE, **rest, **_READ},
            {"BITS": bits, "LAST": 15, "SUMMED": summed, "FIXED": 64},
        )
        for out, like, rest, bits, summed in (
            (FLOAT, FLOAT, {"table": FLOAT, "given": "*i1"}, 4, True),
            ("*bf16", FLOAT, {"table": FLOAT, "given": "*i1"}, 1, True),
            ("*bf16", "*bf16", {"given": "*i1", "given_b": "*i1", "given_c": "*i1"}, 0, False),
        )
    ),
    *(
        ("blocks", "_group_norms", {**given, **_NORMS, **_TILES}, {"ZERO": 0.0, **shape})
        for given, shape in (
            (
                {"out": "*fp64", "x": "*bf16", "y": "*bf16", "factor": "fp32", "also": "*fp64"},
                {"ORDER": 0, "SCALED": False, "CLIP": 2.5, "ROWS": 8, "COLUMNS": 512},
            ),
            (
                {"out": "*fp64", "x": FLOAT, "y": FLOAT},
                {"ORDER": 2, "SCALED": False, "CLIP": 0.0, "ROWS": 1, "COLUMNS": 4096},
            ),
            *(
                (
                    {"out": FLOAT, "x": "*fp64", "y": "*fp64", "widths": "*fp64"},
                    {"ORDER": order, "SCALED": True, "CLIP": clip, "ROWS": 1, "COLUMNS": 4096},
                )
                for order, clip in ((1, 0.0), (0, 2.5))
            ),
        )
    ),
    *(
        (
            "chunks",
            "_topk",
            {"like": FLOAT, "positions": "*i16", "values": FLOAT, "at": LONG, **_CUT, **given},
            {"HOW": how, "SIZES": sizes, "KINDS": len(sizes), "BITS": 31, "STEP": 16, "num_warps": warps},
        )
        for how, sizes, warps, given in (
            ("given", ((1, 64, 64, False),), 16, {}),
            ("fading", ((1, 64, 64, False), (4, 1, 256, False)), 16, {"gradient_like": "*bf16", **_SUMS}),
            ("fading", ((4, 16, 16, False), (16, 1, 64, False)), 4, {"gradient_like": "*bf16", **_SUMS}),
        )
    ),
    *(
        (
            "chunks",
            "_inverse",
            {
                **{
                    "out": "*bf16",
                    "part": "*bf16",
                    "positions": "*i16",
                    "values": FLOAT,
                    "room": FLOAT,
                    **_CUT,
                    **given,
                },
                **dict.fromkeys(("at", "wheres", "whats", "firsts", "widths", "ranks", "each", "subtract"), LONG),
                **{"most": "i32", "groups": "i32"},
            },
            {
                **{"SIZES": ((8, 16, 16, False), (16, 1, 64, False)), "KINDS": 2, "num_warps": 4},
                **{"BITS": bits, "LAST": (1 << bits) - 1, "FIXED": 64},
            },
        )
        for given, bits in (
            ({}, 0),
            (_ARRIVED | {"part": FLOAT, "like": "*bf16", "given_b": "*i1", "given_c": "*i1"}, 0),
            (_ARRIVED | {"part": FLOAT, "like": FLOAT, "table": FLOAT}, 1),
        )
    ),
    (
        "places",
        "_check",
        {"wrong": "*i1", "keys": INT, "edges": INT, "inside": INT, **dict.fromkeys(("total", "n", "count"), "i32")},
        {"LEAST": 0, "STEPS": 2},
    ),
    (
        "select",
        "_gather_each",
        {"values": FLOAT, "indices": LONG, "address": LONG, "size": LONG, "start": LONG, **_TILES},
        {},
    ),
    *(
        (
            "subsets",
            name,
            {"positions": "*i16", "table": LONG, **_TILES, **given},
            {"CHECKED": True, "DIGITS": digits, "BLOCK": 128},
        )
        for digits in (1, 2)
        for name, given in (("_number", {"out": BYTE}), ("_subset", {"rows": BYTE, **_SUBSETS}))
    ),
    (
        "accumulate",
        "_join",
        {
            **{"out": "*fp16", "like": FLOAT, "bound": "fp32"},
            **dict.fromkeys(("at", "size", "begin", "factor"), LONG),
            **_TILES,
        },
        {"TIMES": True},
    ),
    (
        "accumulate",
        "_look",
        {
            **{"like": "*fp16", "wide_like": FLOAT, "found": INT, "count": "i32", **_TILES},
            **dict.fromkeys(("mean", "wide_", "size"), LONG),
        },
        {},
    ),
    (
        "accumulate",
        "_clamp",
        {
            **{"like": "*fp16", "wide_like": FLOAT, "found": INT, "programs": "i32", "finite": "*i1", "added": FLOAT},
            **{"scale": "fp32", "bound": "fp32", **dict.fromkeys(("mean", "wide_", "size", "begin"), LONG), **_TILES},
        },
        {"ROOM": 1024},
    ),
    (
        "accumulate",
        "_subtract_rounded",
        {"x": "*bf16", "indices": INT, "values": FLOAT, "n": "i32", "high": "i32", "low": "i32"},
        {"FEW": 1024},
    ),
    (
        "exact",
        "_multiply",
        {**dict.fromkeys(("out", "a", "b"), FLOAT), **dict.fromkeys(("n", "columns", "rank"), "i32")},
        {},
    ),
]

_TARGETS = (80, 100, 90)  # the last is that of the report
_SPILLED, _SPILLED_MORE = 32, {("_topk", 100): 152, ("_find", 100): 56}  # bytes a thread, at most
# For each digit, and besides, at most so many instructions: popc, and atomics. A histogram takes most of them.
_COUNTED = {
    "_count_digits_each": ((0, 128), (0, 9)),
    "_find": ((128, 3), (8, 10)),
    "_threshold": ((128, 0), (8, 0)),
}
_FEW = (0, 2), (0, 4)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_compile_and_the_page_says_to_what() -> None:
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], env=without, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [name for name, *_ in rows] == [name for _, name, *_ in KERNELS]
    page = PAGE.read_text()
    if f"Triton {import_module('triton').__version__} " not in page:
        pytest.skip("the page is of another version of Triton")
    for name, folder, said in re.findall(r"^\| `(\w+)`(?: of (\w+))? \|.*?\| (.*) \|$", page, re.M):
        found = [numbers for kernel, where, *numbers in rows if kernel == name and folder in ("", where)]
        assert said == " | ".join(map(_span, zip(*found, strict=True))), name
    registers, spilled = ([int(row[column]) for row in rows] for column in (2, 3))
    assert f"They take {min(registers)} to {max(registers)} registers" in page
    assert f"The worst spills {max(spilled)} bytes" in page


def _span(numbers: Sequence[str]) -> str:
    """Return the least and the largest, as the page has them."""
    return "\N{EN DASH}".join(f"{number:,}" for number in sorted({min(map(int, numbers)), max(map(int, numbers))}))


def _compile(folder: str, name: str, arguments: dict[str, str], constants: dict[str, Any]) -> str:
    """Return what the report says of the kernel compiled for sm_90."""
    compiler, targets = import_module("triton.compiler"), import_module("triton.backends.compiler")
    function = getattr(import_module(f"thinwire.kernels.{folder}.triton"), name)
    constants = {"BLOCK": 1024, "TILE": 4096} | constants
    options = {"num_warps": constants.pop("num_warps", 8), "enable_fp_fusion": False}  # as they are launched
    constants |= {argument: None for argument in function.arg_names if argument not in (*arguments, *constants)}
    signature = {argument: arguments.get(argument, "constexpr") for argument in function.arg_names}
    known = {argument: constants[argument] for argument, kind in signature.items() if kind == "constexpr"}
    source = compiler.ASTSource(fn=function, signature=signature, constexprs=known)
    for capability in _TARGETS:
        target = targets.GPUTarget("cuda", capability, 32)
        compiled = compiler.compile(source, target=target, options=options)
        used, ptx = _used(compiled.asm["cubin"]), compiled.asm["ptx"]
        counts = [len(re.findall(word, ptx)) for word in (r"\bpopc", r"\b(?:atom|red)\.")]
        where = f"{name} of sm_{capability}"
        assert used["STACK"] <= _SPILLED_MORE.get((name, capability), _SPILLED), f"{where} spills {used['STACK']} bytes"
        most = [each * constants.get("LEVELS", 0) + more for each, more in _COUNTED.get(name, _FEW)]
        assert all(map(int.__le__, counts, most)), f"{where} has {counts} popc and atomics; expected at most {most}"
    popc, atomics = counts
    return f"{folder} {used['REG']} {used['STACK']} {compiled.metadata.shared} {popc} {atomics}"


def _used(cubin: bytes) -> dict[str, int]:
    """Return the registers that a thread takes, and the bytes of it that lie in memory, as STACK."""
    tool = Path(import_module("triton").__file__ or "").parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", said)}


if __name__ == "__main__":
    print("kernel folder registers spilled shared popc atomics")
    for kernel in KERNELS:
        print(kernel[1], _compile(*kernel))
