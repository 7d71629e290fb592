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
from thinwire.collectives import room
from thinwire.exchanges import all_gather
from thinwire.integrations.attachments.attachment import Attached
from thinwire.kernels import memory
from thinwire.memories import ErrorFeedback
from thinwire.reducer.owners import ToOwners
from thinwire_lab.check.findings import Wrong
from thinwire_lab.check.gpu import first, halves, held, large, layouts, proof
from thinwire_lab.check.gpu.buckets import OTHERS, PHASES, RECIPES, WORLD, Case, Work, counted
from thinwire_lab.check.gpu.counting import fake_group, gpu_path
from thinwire_lab.check.gpu.late import LateGroup, check_aborted, check_constants, check_late
from thinwire_lab.check.gpu.page import page_of, tables
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
def test_what_was_received_a_step_before_is_noticed(name: str) -> None:
    work = Work(Case(recipe=name, tensors=3, dtype="float32", numel=3 * 2048), CPU)
    work.group = LateGroup(CPU, prompt=True)
    for work.group.silent in (False, False, True):
        work.gradients.normal_()
        work.prepare()
        silent = pytest.raises(RuntimeError, match="rank 0 sent a header with version 0")
        with silent if work.group.silent else nullcontext():
            work.step()


@needs_triton
@pytest.mark.usefixtures("group")
def test_what_passes_for_what_did_not_arrive_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(recipe="topk", tensors=1, dtype="float32", numel=1088)
    with gpu_path():
        check_aborted(case, CPU)
        monkeypatch.setattr(all_gather, "places", lambda ranks, nbytes, to: room(ranks * nbytes, to).view(ranks, -1))
        with pytest.raises(Wrong, match="a step before has passed"):
            check_aborted(case, CPU)


@needs_triton
@pytest.mark.usefixtures("group")
def test_a_constant_that_another_stream_reads_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case, read = Case(recipe="topk", tensors=2, dtype="float32", numel=2176), set[int]()
    with gpu_path():
        check_constants(case, CPU, steps=1)
        plain = memory.kept.__call__

        def early(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            x: Tensor = plain(self, *args, **kwargs)
            again = memory._sent is not sent and id(x) in read
            read.add(id(x))
            return torch.zeros_like(x) if again else x

        sent = memory._sent
        monkeypatch.setattr(memory.kept, "__call__", early)
        with pytest.raises(Wrong, match="elements of the mean differ"):
            check_constants(case, CPU, steps=1)


@pytest.mark.usefixtures("group")
def test_memory_that_grows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case, kept = Case(recipe="topk", tensors=3, dtype="float32", numel=3 * 2048), list[Tensor]()
    assert len(held.measured(case, CPU, 6, 2)["allocated_bytes"]) == 6
    monkeypatch.setattr(Work, "end", lambda self: kept.append(self.flat.clone()))
    with pytest.raises(Wrong, match="allocated_bytes grow from"):
        held.measured(case, CPU, 6, 2)


@pytest.mark.usefixtures("group")
def test_an_element_of_a_large_bucket_that_is_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in large.TINY.values():
        assert large.checked(case, CPU)["delivered"] == round(case.numel * case.density)
    plain = Work.end

    def lose(self: Work) -> None:
        plain(self)
        (residuals,) = [memory.state() for memory in self.recipe.memories() if memory.stateful]
        residuals["tensor 0"]["residual"][self.flat == 0] = 0

    monkeypatch.setattr(Work, "end", lose)
    with pytest.raises(Wrong, match="is neither delivered nor kept whole"):
        large.checked(large.TINY["n = 2^11 - 1"], CPU)


def test_a_large_bucket_for_which_there_is_no_room_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**9, 10**11))
    found = large.checked(large.LARGE["n = 2^31 - 1"], torch.device("cuda"))
    assert found == {"left_out": "1 GB are free; expected 64"}


@needs_triton
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
@pytest.mark.usefixtures("group")
def test_a_host_that_waits_for_a_new_layout_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layouts.checked(CPU, 1) == {"layouts": 1, "steps": 3}
    plain = Work.step
    monkeypatch.setattr(Work, "step", lambda self: (plain(self), self.flat.max().item()))
    with pytest.raises(RuntimeError, match="_local_scalar_dense"):
        layouts.checked(CPU, 1)


def test_first_steps_are_timed_in_a_process_of_their_own() -> None:
    found = first.measured(Case(recipe="dense", tensors=1, dtype="float32", numel=1088), CPU, 2)
    assert (found["recipe"], len(found["steps_s"])) == ("dense", 2)


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", ["bfloat16", "scaled"])
def test_ranks_train_in_16_bits(kind: str) -> None:
    found = halves.compared(kind, CPU, ["topk"])
    assert "error" not in found
    assert (found["rows"][0]["skipped"] > 0) == (kind == "scaled")


@pytest.mark.usefixtures("group")
def test_ranks_that_drift_apart_in_16_bits_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attached, "differing_parameters", lambda _: ["0.weight"])
    with pytest.raises(Wrong, match="replicas differ after 12 steps"):
        halves.trained("dense", "bfloat16", CPU)


PAGE = Path(__file__).parents[3] / "docs/measurements/gpu.md"


@pytest.mark.parametrize("title", ["A bucket of 25 MiB", "Kernels beside their floors", "A training step"])
def test_the_page_has_the_tables_of_its_json(title: str) -> None:
    assert tables(json.loads(PAGE.with_suffix(".json").read_text()))[title] in PAGE.read_text()


def test_a_page_says_what_failed_and_what_was_left_out() -> None:
    parts = {"late": {"topk": {"error": "Wrong: it was early"}}, "network": {"links": {"left_out": "one GPU"}}}
    found = page_of({"device": "a GPU", "versions": {"torch": "2"}, "parts": parts, "seconds": {"late": 3.0}})
    assert "- late, topk: Wrong: it was early\n- Not run: network, links: one GPU." in found
    assert "| `late` | 1 | 1 | 3 |" in found


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
    assert "--gpu takes --quick, --interpreted, --json and --page alone" in done.stderr


def test_without_a_gpu_it_says_what_to_do() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = CliRunner().invoke(app, ["check", "--gpu", "--quick"])
    assert done.exit_code == 2
    assert "torch sees no GPU here; with --interpreted it runs without one" in done.stderr


@needs_triton
@pytest.mark.slow
def test_it_runs_whole_through_the_interpreter_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    path, page = tmp_path / "gpu.json", tmp_path / "gpu.md"
    done = _check("--interpreted", "--quick", "--json", str(path), "--page", str(page))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert len(document["parts"]) == len(proof._PARTS)  # as on a GPU
    assert "## What would a step take elsewhere?" in page.read_text()
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
