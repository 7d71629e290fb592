"""`thinwire_lab.studies.kernels` from end to end, small; and that what is wrong gets no speed."""

import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import Kernel
from thinwire_lab.studies.kernels.material import Material
from thinwire_lab.studies.kernels.rows import Row, document
from thinwire_lab.studies.kernels.runner import CASES, Plan, Runner
from thinwire_lab.studies.kernels.targets import concerned, targets
from thinwire_lab.studies.kernels.work import Place, alike, by_reference

PROGRAM = "thinwire_lab.studies.kernels"

TARGETS = {
    "encode_ef",
    "decode",
    "offset_float_encode",
    "offset_float_decode",
    "fft_encode",
    "wire_fp16",
    "wire_offset8",
}
UNTIMED = {"accumulate", "accumulate_each", "accumulate_momentum"}  # plain torch on the CPU too
KERNELS = {name for name, kernel in vars(kernels).items() if isinstance(kernel, Kernel)} - UNTIMED
FIELDS = {
    *("name", "backend", "d", "density", "workers", "seconds", "floor_seconds"),
    *("ratio_to_floor", "ratio_to_torch", "bits_per_kept", "correct"),
}


def _run(*arguments: str, breaking: str = "") -> "subprocess.CompletedProcess[str]":
    """Run the script; `breaking` is executed before it."""
    code = "\n".join(("import runpy", breaking, f"runpy.run_module({PROGRAM!r}, run_name='__main__')"))
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def _plan(names: Sequence[str]) -> Plan:
    return Plan(
        names=names,
        sizes=[5000, 20_000],
        densities=[1e-3, 1e-2],
        workers=[2, 3],
        device=torch.device("cpu"),
        repeats=1,
        budget=0.0,
    )


def _rows(*names: str) -> list[Row]:
    return list(Runner(_plan(names)).rows(lambda _: None))


@pytest.mark.slow
def test_the_whole_run_small(tmp_path: Path) -> None:
    done = _run(
        *("--json", "--sizes", "2^10,0.01M", "--densities", "1e-3,0.05", "--workers", "2,3", "--repeats", "1"),
        *("--seconds", "0", "--output", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png")),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "x.json").read_text())
    assert found["schema"] == "thinwire.kernels/1"
    about = {"device", "processor", "torch", "numba", "triton", "code", "thinwire", "python"}
    assert set(found["environment"]) >= about
    assert {row["name"] for row in found["rows"]} == set(CASES)
    assert {row["d"] for row in found["rows"]} == {1024, 10_000}
    assert all(set(row) >= FIELDS and row["correct"] and row["backend"] == "cpu" for row in found["rows"])
    assert all(set(row["seconds"]) == {"p20", "p50", "p80"} for row in found["rows"])
    assert {row["workers"] for row in found["rows"] if row["name"] == "decode"} == {2, 3}
    assert (tmp_path / "x.png").stat().st_size > 10_000
    assert "encode_ef over residual.add_(g)" in done.stderr


def test_every_kernel_and_every_target_has_a_row() -> None:
    assert set(CASES) >= TARGETS
    assert set(CASES) >= KERNELS


@pytest.mark.slow
def test_a_kernel_that_differs_gets_no_speed_and_the_run_ends_with_1() -> None:
    breaking = (
        "from thinwire.kernels import largest; right = largest.cpu; largest.cpu = lambda x, k: right(x, k).flip(0)"
    )
    done = _run("--json", "--only", "largest,select", "--sizes", "1000", "--densities", "0.01", breaking=breaking)
    assert done.returncode == 1, done.stderr[-2000:]
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["select"]["correct"]
    assert rows["select"]["seconds"]
    assert not rows["largest"]["correct"]
    assert all(
        rows["largest"][name] is None for name in ("seconds", "floor_seconds", "ratio_to_floor", "ratio_to_torch")
    )
    assert "largest, at 1,000 elements: differs from the reference" in done.stderr


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_row_would_notice_its_kernel_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value off in whatever the kernels return or write."""
    for kernel in (getattr(kernels, each) for each in sorted(KERNELS)):
        monkeypatch.setattr(kernel, "cpu", _spoiled(kernel.cpu))
    rows = _rows(name)
    assert rows
    assert not any(row.correct or row.seconds for row in rows)


def _spoiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def spoiled(*args: Any) -> Any:
        found = kernel(*args)
        for tensor in _tensors(args[0] if found is None else found):
            if tensor.numel():
                tensor.view(-1)[tensor.numel() // 2] += 1
        return found

    return spoiled


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, tuple | list):
        return [tensor for each in found for tensor in _tensors(each)]
    return [found] if isinstance(found, Tensor) else []


def test_what_raises_is_not_correct_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(kernels.select, "cpu", fails)
    assert {(row.correct, row.why) for row in _rows("select")} == {(False, "RuntimeError: no such thing")}


def test_the_reference_runs_where_it_is_asked_for() -> None:
    x = torch.ones(3)
    with by_reference():
        assert kernels.largest.backend(x, 1) == kernels.pack_bits.backend(x, 1) == "reference"
    assert kernels.largest.backend(x, 1) == "cpu"


def test_alike() -> None:
    x = torch.tensor([1.0, torch.nan])
    assert alike((x, x.int()), (x + 1e-7, x.int()))
    assert not alike(x, x + 1e-3)
    assert not alike(x, x.double())
    assert not alike((x,), (x, x))
    assert not alike(torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_picks_of_workers_ascend_and_lie_apart() -> None:
    material = Material(1000, torch.device("cpu"))
    parts = [material.picks(1000, 50, worker, 4) for worker in range(4)]
    for indices, values in parts:
        assert bool((indices[1:] > indices[:-1]).all())
        assert (int(indices[0]), int(indices[-1])) >= (0, 0)
        assert int(indices[-1]) < 1000
        assert torch.equal(values.abs().sort().values, parts[0][1].abs().sort().values)
    assert len({tuple(indices.tolist()) for indices, _ in parts}) == 4


def test_targets_are_read_off_the_largest_size() -> None:
    row = replace(
        _rows("encode_ef")[0], d=2000, ratio_to_floor=1.2, ratio_to_torch=30.0, ratio_to_mask=5.0, density=1e-3
    )
    rows = [replace(row, d=1000, ratio_to_floor=9.0), row, replace(row, density=1e-2, ratio_to_floor=8.0)]
    found = {target.what: target for target in targets(on_gpu=False)}
    measured = {what: target.figure(concerned(rows)) for what, target in found.items()}
    assert measured["encode_ef over residual.add_(g)"] == 1.2
    assert found["encode_ef over residual.add_(g)"].met(1.2)
    assert not found["encode_ef, times faster than mask and nonzero"].met(5.0)
    assert measured["fft_encode over rfft"] is None
    assert document(rows, {})["rows"][1]["ratio_to_torch"] == 30.0


def test_a_place_knows_its_threshold() -> None:
    material = Material(100_000, torch.device("cpu"))
    place = Place(material=material, numel=100_000, density=0.01, workers=2)
    assert place.picks == 1000
    assert int((place.gradient().abs() >= place.threshold()).sum()) == pytest.approx(1000, rel=0.15)


@pytest.mark.parametrize(
    "arguments",
    [("--only", "nothing"), ("--sizes", "many"), ("--sizes", "0"), ("--densities", "2"), ("--device", "tpu")],
)
def test_options_that_make_no_sense_are_refused(
    arguments: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(PROGRAM, run_name="__main__")
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err
