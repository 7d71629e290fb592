"""`thinwire check --gpu`: what it counts, and that it notices what is read too early."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.futures import Future
from typer.testing import CliRunner

from thinwire.codecs import TopK
from thinwire.memories import ErrorFeedback
from thinwire.reducer.owners import ToOwners
from thinwire_lab.check.findings import Wrong
from thinwire_lab.check.gpu import proof
from thinwire_lab.check.gpu.buckets import OTHERS, PHASES, RECIPES, WORLD, Case, Work, counted
from thinwire_lab.check.gpu.counting import fake_group
from thinwire_lab.check.gpu.late import LateGroup, check_late
from thinwire_lab.check.gpu.steps import note_overlap
from thinwire_lab.cli import app
from thinwire_lab.studies.kernels import numbers

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed: pip install -e '.[triton]'"
)
CPU = torch.device("cpu")
LAUNCHES = {
    "dense": (1, 1, 0, 0),
    "bf16": (1, 1, 1, 1),
    "topk": (3, 2, 2, 3),
    "sampled_topk": (3, 2, 2, 3),
    "dgc": (3, 2, 2, 3),
    "dragonn": (5, 2, 2, 4),
    "fading": (5, 2, 2, 3),
    "orthogonal": (47, 2, 2, 3),
    "qsgd": (2, 2, 1, 1),
    "terngrad": (3, 2, 1, 1),
    "signsgd": (3, 2, 2, 2),
}
"""At most so many to encode and pack, exchange and decode a bucket in float32, of 1 to 100 tensors; and how often the
host's numbers, such as addresses and seeds, are copied to the device. Lower them with the code."""
LAYER = {
    "dense": (1, 1, 0, 0),
    "bf16": (1, 1, 1, 1),
    "topk": (4, 3, 3, 4),
    "sampled_topk": (4, 3, 3, 4),
    "dgc": (4, 4, 4, 4),
    "dragonn": (6, 4, 4, 5),
    "fading": (6, 3, 3, 4),
    "orthogonal": (189, 3, 3, 4),
    "qsgd": (3, 3, 2, 2),
    "terngrad": (4, 3, 2, 2),
    "signsgd": (4, 3, 3, 3),
}
"""With vectors so small that they are not compressed: of a GPT's layer, and of three vectors of odd lengths."""
SUMMED_APART = {"dgc", "dragonn"}  # small vectors are summed, and then cast
SUMMED_WIDE = {"fading", "orthogonal", "signsgd"}  # their sums may not fit into 16 bits, and are repaired


def _check(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "thinwire", "check", "--gpu", *options]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "160"})


W = 768
LAYERS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((W,), (W,), (3 * W, W), (3 * W,), (W, W), (W,), (W,), (W,), (4 * W, W), (4 * W,), (W, 4 * W), (W,)),
    ((1007,), (2048,), (515,)),
)
ODD: tuple[tuple[int, ...], ...] = ((1007, 3), (2049,), (5150,), (1331,), (100, 33))


def _buckets(dtype: str, sizes: int) -> Iterator[tuple[Case, bool]]:
    """Yield cases, and whether there are small tensors among others."""
    for name in RECIPES:
        for tensors, numel in [(1, 2048), (6, 12288), (100, 204800), (6, 6553344)][:sizes]:
            yield Case(recipe=name, tensors=tensors, dtype=dtype, numel=numel), False
        for shapes in LAYERS:
            yield Case(recipe=name, tensors=len(shapes), dtype=dtype, numel=0, shapes=shapes), True
        if name != "orthogonal":  # matrices of one shape are made so together
            yield Case(recipe=name, tensors=len(ODD), dtype=dtype, numel=0, shapes=ODD), False


@needs_triton
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("float32", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("float16", 1), ("float32", 4), ("bfloat16", 4))),
    ],
)
def test_a_bucket_launches_no_more_than_it_did(dtype: str, sizes: int) -> None:
    for case, mixed in _buckets(dtype, sizes):
        name, launched = case.recipe, counted(case)
        found = [*(launched["launches"][phase] for phase in PHASES), launched["copies"]]
        half = dtype == "float16"
        cast = dtype != "float32" and mixed and name in SUMMED_APART
        repair = 5 * (half and name in SUMMED_WIDE)
        more = (cast, 0, repair, half * mixed + 2 * (repair > 0))
        allowed = [most + each for most, each in zip((LAYER if mixed else LAUNCHES)[name], more, strict=True)]
        assert all(map(int.__le__, found, allowed)), f"{name}{' with small ones' * mixed}: {found}, at most {allowed}"


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    yield fake_group(WORLD)
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", [*RECIPES, *OTHERS])
def test_means_wait_for_what_arrives_late(name: str) -> None:
    check_late(Case(recipe=name, tensors=3, dtype="float32", numel=3 * 2048), CPU)


@pytest.mark.usefixtures("group")
def test_means_wait_for_what_owners_get_late() -> None:
    case = Case(recipe="dense", tensors=3, dtype="float32", numel=3 * 2048)
    check_late(case, CPU, make=lambda: ToOwners(memory=ErrorFeedback(), codec=TopK(density=0.01)))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["topk", "bf16", "gtopk", "owner", "s2_union"])
def test_what_is_read_too_early_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def over_at_once(self: LateGroup, x: Tensor, work: Any) -> dist.Work:
        if self._prompt:
            work()
        future: Future[list[Tensor]] = Future()
        future.set_result([x])
        return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]  # no stub

    monkeypatch.setattr(LateGroup, "_ended", over_at_once)
    with pytest.raises((Wrong, RuntimeError), match=r"PayloadError|mean differ|negative dimension"):
        check_late(Case(recipe=name, tensors=3, dtype="float32", numel=3 * 2048), CPU)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"dense", "bf16"}))  # whose sums are made in place
def test_what_was_received_a_step_before_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(_self: LateGroup, out: Tensor, mine: Tensor, _opts: Any = None) -> dist.Work:
        """Leave the receive buffer as it is, where nothing arrives, as a collective does that was aborted."""
        if arrives:
            out.view(WORLD, -1).copy_(mine.view(1, -1))
        future: Future[list[Tensor]] = Future()
        future.set_result([out])
        return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]  # no stub

    for each in ("all_gather_single", "_allgather_base"):
        monkeypatch.setattr(LateGroup, each, gather)
    work = Work(Case(recipe=name, tensors=3, dtype="float32", numel=3 * 2048), CPU)
    work.group = LateGroup(CPU)
    for arrives in (True, True, False):
        work.gradients.normal_()
        work.prepare()
        with nullcontext() if arrives else pytest.raises(RuntimeError, match="rank 0 sent a header with version 0"):
            work.step()


def test_what_a_run_took_that_was_cut_off_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", count().__next__)

    def cut_off() -> dict[str, Any]:
        raise KeyboardInterrupt

    path = tmp_path / "gpu.json"
    one = proof.Proof(CPU, True, path, Console(quiet=True), {"schema": "", "seconds": {"late": 100.0}, "parts": {}})
    with pytest.raises(KeyboardInterrupt):
        one.part("late", iter([("a", dict), ("b", cut_off)]))
    document = json.loads(path.read_text())
    assert document["parts"] == {"late": {"a": {}}}
    assert document["seconds"]["late"] > 100


def test_a_row_that_raises_says_what_in_a_line() -> None:
    def fails() -> dict[str, Any]:
        raise ValueError("no room\nfor it")

    one = proof.Proof(CPU, True, None, Console(quiet=True), {"schema": "", "seconds": {}, "parts": {}})
    one.part("late", iter([("a", fails)]))
    assert one.document["parts"] == {"late": {"a": {"error": "ValueError: no room"}}}
    assert one.failed


@pytest.mark.parametrize(
    ("device", "quick", "largest"), [("cuda", False, 1 << 27), ("cuda", True, 1 << 20), ("cpu", True, 1000)]
)
def test_kernels_are_compared_up_to_the_largest_size(
    device: str, quick: bool, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[str]()

    def written(_: str, *options: str, to: str) -> dict[str, list[object]]:
        given.extend(options)
        return {"rows": []}

    monkeypatch.setattr(proof, "_written", written)
    proof._kernels(
        proof.Proof(torch.device(device), quick, None, Console(quiet=True), {"schema": "", "seconds": {}, "parts": {}})
    )
    assert max(numbers(given[given.index("--sizes") + 1])) == largest


def test_what_backward_hides_is_what_a_step_is_not_longer_by() -> None:
    rows: list[dict[str, Any]] = [
        {"name": name, "optimizer": optimizer, "ms": ms}
        for name, optimizer, ms in (("plain DDP", "SGD", 50.0), ("topk", "SGD", 54.0), ("fading", "AdamW", 60.0))
    ]
    bucket = {"elements": 6_553_600, "busy_ms": {"encode": 0.3, "decode": 0.1}}
    note_overlap([*rows, {"name": "qsgd", "optimizer": "SGD", "error": "it failed"}], {"topk": bucket, "qsgd": bucket})
    numel = 126_000_000
    assert rows[1]["busy_ms"] == pytest.approx(0.4 * numel / 6_553_600, rel=0.01)
    assert rows[1]["hidden"] == pytest.approx(1 - 4 / rows[1]["busy_ms"])
    assert not any("hidden" in row for row in (rows[0], rows[2]))  # nothing to compare with


def test_options_that_it_does_not_take_are_refused() -> None:
    done = CliRunner().invoke(app, ["check", "--gpu", "--interpreted", "--only", "topk"])
    assert done.exit_code == 2
    assert "--gpu takes --quick, --interpreted and --json alone" in done.stderr


def test_without_a_gpu_it_says_what_to_do() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = CliRunner().invoke(app, ["check", "--gpu", "--quick"])
    assert done.exit_code == 2
    assert "torch sees no GPU here; with --interpreted it runs without one" in done.stderr


@needs_triton
@pytest.mark.slow
def test_it_runs_whole_through_the_interpreter_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    done = _check("--interpreted", "--quick", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert set(document["parts"]) == {"late", "freed", "steps", "ranks", "network", "kernels", "buckets"}  # as on a GPU
    assert {row["section"] for row in document["parts"]["ranks"]["thinwire check --quick"]["rows"]} > {
        "exchanges, gloo of 2",
        "recipes, gloo of 2",
    }
    network = document["parts"]["network"]["1gbit"]
    assert "left_out" in network or [row["name"] for row in network["rows"]] == ["plain DDP", "bf16", "topk"]
    assert {row["recipe"] for row in document["launches"]} == set(RECIPES)
    assert all(row["encode"] > 0 for row in document["launches"])
    each = [tuple(row[key] for key in ("recipe", "tensors", "dtype", "elements")) for row in document["launches"]]
    assert len(set(each)) == len(each)
    failed = next(iter(document["parts"]["buckets"]))
    document["parts"]["buckets"][failed] = {"error": "it was busy"}
    lost, _ = document["parts"]["buckets"].popitem()
    kept = next(iter(document["parts"]["late"].values()))
    kept["marked"] = True
    path.write_text(json.dumps(document))
    again = _check("--interpreted", "--quick", "--json", str(path))
    assert again.returncode == 0
    found = json.loads(path.read_text())
    assert lost in found["parts"]["buckets"]
    assert "launches" in found["parts"]["buckets"][failed]
    assert kept in found["parts"]["late"].values()
    refused = _check("--interpreted", "--json", str(path))
    assert refused.returncode == 2
    assert "its quick is True; expected False" in refused.stderr
