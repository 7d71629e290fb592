"""`thinwire check` finds what is broken, survives it, and says so."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import RECIPES
from ranks import Ranks
from torch import Tensor
from typer.testing import CliRunner

from thinwire import kernels
from thinwire.codecs import TopK
from thinwire.exchanges import AllGather, Exchanged, all_gather
from thinwire.memories import ErrorFeedback, NoMemory
from thinwire.payloads import Payload
from thinwire.recipes import METHODS
from thinwire.reducer import Compressed, Reducer
from thinwire_lab.check import command as check_command
from thinwire_lab.check import exchanges, supervision, training
from thinwire_lab.check.cases import CASES
from thinwire_lab.check.findings import Finding, Wrong, looked_into, merged
from thinwire_lab.check.kernels import KERNELS, Limits, check_kernel
from thinwire_lab.check.launch import Launch
from thinwire_lab.check.material import Kit
from thinwire_lab.check.report import Report
from thinwire_lab.check.sections import Asked, Section
from thinwire_lab.check.waits import counted
from thinwire_lab.cli import app

CPU = torch.device("cpu")
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
ALL = Asked(device="cuda")
SMALL = Limits(sizes=(1, 2, 63, 1000))
LONG = {"accumulate_hashed_slots", "chunk_settle", "codes_encode", "numbers_read", "settle"}
"""Kernels that are tried in many combinations."""


def found(name: str = "row", *, ok: bool | None = True, said: str = "") -> Finding:
    return Finding(section="kernels", name=name, ok=ok, said=said)


# --- kernels ---


def _kernel(name: str, device: torch.device = CPU, limits: Limits = SMALL) -> Finding:
    return looked_into("kernels", name, partial(check_kernel, name, device, limits))


def test_every_kernel_has_a_case() -> None:
    assert set(CASES) == set(KERNELS)
    assert "select" in KERNELS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in KERNELS])
def test_every_kernel_passes(name: str, device: str) -> None:
    finding = _kernel(name, torch.device(device))
    own = device == "cuda" or KERNELS[name].cpu is not KERNELS[name].reference
    assert finding.ok is (True if own else None), finding.said
    assert finding.figures["largest"] == 1000
    assert finding.figures["ran"]


def _misses_the_last(x: Tensor, k: int) -> Tensor:
    return kernels.largest.reference(x, k).clamp(max=998)


def _raises(x: Tensor, k: int) -> Tensor:
    raise RuntimeError("no such instruction\nand a long story")


def _returns_int64(x: Tensor, k: int) -> Tensor:
    return kernels.largest.reference(x, k).long()


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (_misses_the_last, "at 1000 of float32, normal: 1 of 1000 differ, first at 999: 998, expected 999"),
        (_raises, "at 1 of float32, normal: RuntimeError: no such instruction"),
        (_returns_int64, "at 1 of float32, normal: is 0 of int64, expected 0 of int32"),
    ],
)
def test_a_kernel_broken_on_purpose_is_found(monkeypatch: pytest.MonkeyPatch, broken: Any, said: str) -> None:
    monkeypatch.setattr(kernels.largest, "cpu", broken)
    finding = _kernel("largest")
    assert finding.ok is False
    assert finding.said == said


def test_a_write_outside_of_the_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def spills(outs: list[Tensor], *args: Any) -> None:
        kernels.scatter_add.reference(outs, *args)
        out = outs[0]
        assert out._base is not None
        out._base[out.storage_offset() + out.numel()] = 0

    monkeypatch.setattr(kernels.scatter_add, "cpu", spills)
    finding = _kernel("scatter_add")
    assert "wrote outside of its result" in finding.said


@pytest.mark.parametrize(("name", "place"), [("scatter_add", 3), ("row_sums", 0), ("select", 0)])
def test_a_kernel_that_spoils_its_input_is_found(monkeypatch: pytest.MonkeyPatch, name: str, place: int) -> None:
    kernel = getattr(kernels, name)

    def spoils(*args: Any) -> Any:
        args[place].mul_(0.5)
        return kernel.reference(*args)

    monkeypatch.setattr(kernel, "cpu", spoils)
    assert "changed an argument that it may only read" in _kernel(name).said


def _spoilt(x: Tensor, how: str) -> None:
    """Change the last element of a result, or all signs."""
    if how == "negated":
        x.neg_() if x.is_floating_point() else x.add_(1)
    elif x.is_floating_point():
        x[-1:] = torch.where(x[-1:].isfinite(), x[-1:] * 1.5 + 1, 0)
    else:
        x[-1:] ^= 1


def _results(arguments: Sequence[Any], returned: Any) -> list[Tensor]:
    found = []
    for each in (*arguments, returned):
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, tuple | list):
            found += _results(each, None)
    return found


@pytest.mark.parametrize("how", ["last", "negated"])
@pytest.mark.parametrize("name", [name for name, each in KERNELS.items() if each.cpu is not each.reference])
def test_whatever_a_kernel_gets_wrong_is_found(monkeypatch: pytest.MonkeyPatch, name: str, how: str) -> None:
    plain, (trial, *_) = KERNELS[name].cpu, CASES[name].make(Kit(CPU), 1000)
    args = list(trial.args)
    count = len(_results([args[place] for place in trial.writes], plain(*args)))
    for number in range(count):
        spoilt: set[int] = set()

        def wrong(*args: Any, number: int = number, spoilt: set[int] = spoilt) -> Any:
            returned = plain(*args)
            result = _results([args[place] for place in trial.writes], returned)[number]
            spoilt.add(result.numel())
            _spoilt(result.view(-1), how)
            return returned

        monkeypatch.setattr(KERNELS[name], "cpu", wrong)
        assert _kernel(name).ok is False or spoilt == {0}, f"result {number}"


def test_a_size_that_would_take_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = _kernel("merge", CPU, Limits(sizes=(1000, 1 << 18), seconds=0.0))
    assert finding.ok
    assert finding.figures["largest"] == 1000
    assert "262,144 would take long" in finding.said


# --- exchanges ---


def _exchanged(name: str) -> Finding:
    return looked_into("exchanges", name, partial(exchanges.check_exchange, name, CPU))


def test_every_recipe_that_encodes_has_an_exchange() -> None:
    for name, method in METHODS.items():
        assert (name in exchanges.ROWS) == (name != "powersgd"), name
        if name in exchanges.ROWS:
            assert isinstance(method.large(), Compressed)


@pytest.mark.parametrize("name", exchanges.ROWS)
def test_exchanges_pass(ranks: Ranks, name: str) -> None:
    for found in ranks.run(3, _exchanged, name):
        assert found.ok, found.said
        assert found.figures["sent_bytes"] > 0


def _broken_exchange(how: Callable[[Tensor, int], Tensor]) -> Finding:
    """Change what a rank makes of the buffers that have arrived."""

    def made(mine: Payload, buffers: Tensor, *_: object) -> Payload:
        total = received(mine, buffers, None)
        return total.with_values(how(total.values, dist.get_rank()))

    received = all_gather.received
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_gather, "received", made)
        return _exchanged("topk")


def _one_rank_off(values: Tensor, rank: int) -> Tensor:
    return values + rank


def _too_much(values: Tensor, rank: int) -> Tensor:
    return values * 1.01


@pytest.mark.parametrize(("how", "said"), [(_one_rank_off, "different sum"), (_too_much, "1.0e-02 from what all")])
def test_a_sum_that_is_wrong_is_found(ranks: Ranks, how: Any, said: str) -> None:
    assert any(found.ok is False and said in found.said for found in ranks.run(2, _broken_exchange, how))


def _boasting() -> Finding:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_gather, "Exchanged", lambda sent_bytes, **rest: Exchanged(sent_bytes=sent_bytes / 2, **rest))
        return _exchanged("qsgd")


def test_bytes_that_are_not_the_buffers_are_found(ranks: Ranks) -> None:
    assert all("bytes were reported; the buffers" in found.said for found in ranks.run(2, _boasting))


# --- recipes ---


def _checked(name: str, steps: int) -> Finding:
    return looked_into("recipes", name, partial(training.check_recipe, name, CPU, steps))


def test_every_recipe_has_a_row() -> None:
    assert set(METHODS) < set(training.NAMES)


@pytest.mark.parametrize("name", ["dense", "fp16", "topk", "dgc", "gtopk", "powersgd", training.DENSE])
def test_recipes_pass(ranks: Ranks, name: str) -> None:
    for finding in ranks.run(2, _checked, name, 4):
        assert finding.ok, finding.said
        assert finding.figures["sent_bytes"] > 0
        assert finding.figures["through"] == "DDP"


def _clocked() -> Finding:
    """Check a recipe whose books take a second at each step, and all else none."""
    clock = [0.0]

    def slow(*_: object) -> None:
        clock[0] += 1.0

    with (
        patch.object(time, "perf_counter", lambda: clock[0]),
        patch.multiple(training._Books, offer=slow, apply=slow, lost=lambda *_: 0.0),
    ):
        return _checked("dense", 4)


def test_figures_of_a_step_are_of_that_alone(ranks: Ranks) -> None:
    elements = sum(p.numel() for p in training._model(CPU).parameters())
    for finding in ranks.run(2, _clocked):
        assert finding.ok, finding.said
        assert finding.figures["step_ms"] == 0.0
        assert finding.figures["sent_bytes"] == finding.figures["steps"] * 4 * elements


class _Refusing:
    def __init__(self, *_: object) -> None:
        raise ValueError("DDP cannot be had")


def _without_ddp() -> Finding:
    with patch.object(training, "DistributedDataParallel", _Refusing):
        return _checked("topk", 4)


def test_where_ddp_refuses_replicas_are_checked(ranks: Ranks) -> None:
    for finding in ranks.run(2, _without_ddp):
        assert finding.ok, finding.said
        assert finding.said.startswith("by replicate, as DDP refused; 4 steps")


def _forgetful(name: str) -> Reducer:
    return Compressed(memory=NoMemory(), codec=TopK(density=0.05), exchange=AllGather())


def _with_recipe(make: Any, name: str) -> Finding:
    with patch.object(training, "recipe", make):
        return _checked(name, 4)


def test_gradients_that_get_lost_are_found(ranks: Ranks) -> None:
    for finding in ranks.run(2, _with_recipe, _forgetful, "topk"):
        assert finding.ok is False
        assert "were neither applied nor kept" in finding.said


def test_what_is_not_plain_ddp_is_found(ranks: Ranks) -> None:
    for finding in ranks.run(2, _with_recipe, _forgetful, training.DENSE):
        assert "from plain DDP's" in finding.said


def _commits_at_once() -> Finding:
    retain = ErrorFeedback.retain

    def careless(self: ErrorFeedback, *args: Any) -> None:
        retain(self, *args)
        self.commit()

    with patch.object(ErrorFeedback, "retain", careless):
        return _checked("topk", 4)


def test_a_step_that_cannot_be_skipped_is_found(ranks: Ranks) -> None:
    for finding in ranks.run(2, _commits_at_once):
        assert finding.ok is False
        assert "skipped step" in finding.said


def test_what_raises_is_a_row(ranks: Ranks) -> None:
    assert ranks.run(1, _with_recipe, _no_recipe, "topk")[0].said == "OSError: no luck"


def _no_recipe(name: str) -> Reducer:
    raise OSError("no luck\nat all")


# --- processes ---


def _worked(section: Section, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    monkeypatch.setattr(supervision, "WORKER", "lab.check.broken_worker")
    told: list[Finding] = []
    every = supervision.work(section, Launch.found(), "cpu", told.append)
    assert sorted(map(str, told)) == sorted(map(str, every))
    return every


@pytest.mark.slow
def test_rows_that_break_their_process_do_not_end_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_STARTING", 20.0)
    rows = ["works", "aborts", "raises", "hangs", "works too"]
    every = _worked(Section(title="kernels", kind="kernels", rows=rows, limit=1.0), monkeypatch)
    assert [finding.name for finding in every] == rows
    assert [finding.ok for finding in every] == [True, False, False, False, True]
    assert every[1].said == "killed by SIGABRT: Fatal Python error: Aborted"
    assert every[2].said == "RuntimeError: it broke"
    assert every[3].said == "no answer within 1 s"


@pytest.mark.slow
def test_a_process_that_dies_while_joining_costs_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ["rank 1 cannot join", "works", "works too"]
    section = Section(title="recipes", kind="recipes", rows=rows, limit=20.0, backend="gloo", world=2)
    every = _worked(section, monkeypatch)
    assert [finding.ok for finding in every] == [False, True, True]
    assert every[0].said.startswith("rank 1: killed by SIGABRT")


@pytest.mark.slow
def test_all_ranks_go_on_after_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ["works", "raises on rank 1", "works too"]
    section = Section(title="recipes", kind="recipes", rows=rows, limit=30.0, backend="gloo", world=2)
    every = _worked(section, monkeypatch)
    assert [finding.ok for finding in every] == [True, False, True]
    assert every[1].said == "rank 1: RuntimeError: it broke"


def test_rows_are_dealt_to_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(lane: Section, *_: object) -> dict[int, object]:
        return dict.fromkeys(range(len(lane.rows)), lane.rows)

    monkeypatch.setattr(supervision, "_run", rows)
    dealt = supervision.run(Section(title="", kind="", rows="abcde", limit=1.0, lanes=2), None, "cpu", print)  # type: ignore[arg-type]  # not asked for
    assert dict[int, object](dealt) == {0: "ace", 2: "ace", 4: "ace", 1: "bd", 3: "bd"}


def test_the_cause_is_told_and_not_what_follows() -> None:
    closed = found(ok=False, said="RuntimeError: Connection closed by peer")
    assert merged({0: closed, 1: found(ok=False, said="ValueError: 5"), 2: found()}).said == "rank 1: ValueError: 5"
    assert merged({0: closed, 1: found()}).said == "rank 0: RuntimeError: Connection closed by peer"
    assert merged({0: closed}).said == "RuntimeError: Connection closed by peer"
    assert merged({0: found(said="well"), 1: found(said="good")}).said == "well"


# --- host waits ---


def test_waits_are_counted_wherever_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("synchronize", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    said = " ".join(["called a synchronizing", "CUDA operation"])
    with counted(torch.device("cuda")) as waits:
        for _ in range(2):
            warnings.warn(said, stacklevel=1)
        os.write(2, f"[W Functions.cpp:32] Warning: {said} (function warn_or_error_on_sync)\n".encode())
    assert waits.count == 3
    assert sum(waits.places.values()) == 2
    assert waits.plus(waits).figures(2)["host_waits"] == 3
    with counted(CPU) as none:
        pass
    assert none.count == 0


def test_a_recipe_waits_at_most_once_more_than_plain_ddp() -> None:
    figures = {"host_waits": 3.0, "plain_ddp_host_waits": 2.0, "waits_at": {"thinwire/a.py:7": 3}}
    training.refuse_waits(figures, in_rounds=False)
    figures["host_waits"] = 3.5
    training.refuse_waits(figures, in_rounds=True)
    with pytest.raises(Wrong, match=r"waits 3\.5 times a step, expected 3 at most: at thinwire/a\.py:7"):
        training.refuse_waits(figures, in_rounds=False)


def test_recipes_that_may_wait_are_those_of_several_rounds() -> None:
    assert {name for name in training.NAMES if training.in_rounds(name)} == {
        name for name, case in RECIPES.items() if name == case.method.name and case.rounds
    }


# --- what is asked, and what is shown ---


def test_sections_by_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def titles(asked: Asked, launched: int | None = None) -> list[str]:
        return [section.title for section in asked.sections(launched)]

    def both(group: str) -> list[str]:
        return [f"exchanges, {group}", f"recipes, {group}"]

    assert titles(Asked(device="cpu")) == ["machine", "kernels", "speed, 2^24 elements", *both("gloo of 3")]
    assert titles(Asked(device="cpu", quick=True), 5)[-1] == "recipes, gloo of 5"
    assert titles(Asked(device="cpu", only=["dgc"]), 5) == ["machine", *both("gloo of 5")]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert titles(Asked(device="cuda"))[-4:] == [*both("nccl of 1"), *both("gloo of 2")]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert titles(Asked(device="cuda"), 2)[-1:] == ["recipes, gloo of 2"]
    assert "recipes, nccl of 2" not in titles(Asked(device="cuda"), 2), "NCCL takes one rank a GPU"


def reported(*findings: Finding, asked: Asked = ALL, ranks: int = 1, complete: bool = True) -> Report:
    began = datetime(2026, 11, 24, 9, 30, tzinfo=UTC)
    versions = {"torch": "2.11"}
    return Report(
        findings=findings, versions=versions, asked=asked, ranks=ranks, began=began, seconds=1.0, complete=complete
    )


def test_a_report_says_what_was_asked() -> None:
    report = reported(found(), asked=Asked(device="cpu", quick=True, only=["dgc", "merge"]), ranks=3)
    assert report.conclusion == "✓ 1 checks passed, in 1.0 s (quick, only dgc,merge)"
    assert "2026-11-24 09:30 UTC, 3 ranks of torchrun, cpu" in report.html()
    document = report.document()
    assert document["asked"] == {"device": "cpu", "quick": True, "only": ["dgc", "merge"]}
    assert (document["ranks"], document["began"]) == (3, "2026-11-24T09:30:00+00:00")


def test_a_report_says_what_failed_in_a_line_to_paste() -> None:
    device = Finding(section="machine", name="device", ok=True, said="a GPU")
    bad = found("select", ok=False, said="at 63: <wrong>")
    report = reported(device, found(), bad, found(ok=None))
    (line,) = report.pasted()
    assert line == "thinwire check: kernels: select: at 63: <wrong> [a GPU; torch 2.11]"
    assert report.conclusion == "✗ 2 checks passed, 1 failed, in 1.0 s"
    page = report.html()
    assert "at 63: &lt;wrong&gt;" in page
    assert "THINWIRE_BACKEND=reference" in page
    assert [report.document()[key] for key in ("passed", "issue")] == [False, [line]]


def test_a_report_of_a_check_that_was_cut_short_has_not_passed() -> None:
    report = reported(found(), complete=False)
    assert report.conclusion == "not complete: 1 checks passed so far, in 1.0 s"
    assert [report.document()[key] for key in ("passed", "complete")] == [False, False]
    assert "not complete" in report.html()


def _check(*args: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["check", *args])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--only", "nothing"], "--only 'nothing' is part of no row's name"),
        (["--only", "merge,nothing"], "--only 'nothing' is part of no row's name"),
        (["--only", ","], "expected parts of names"),
        (["--json", "one", "--html", "./one"], "cannot write two things to one file"),
        (["--device", "tpu"], "--device 'tpu': expected cpu or cuda"),
        (["--device", ""], "--device '': expected cpu or cuda"),
        (["--json", "/nowhere/at.json"], "cannot write"),
    ],
)
def test_what_cannot_be_used_is_refused(args: list[str], said: str) -> None:
    code, _, wrong = _check(*args)
    assert code == 2
    assert said in wrong


def test_other_hosts_need_not_have_the_folder_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Launch(address=("", 0), store=None, rank=1, world=2)  # type: ignore[arg-type]  # nobody asks it
    monkeypatch.setattr(Launch, "found", lambda: ended)
    monkeypatch.setattr(Launch, "verdict", lambda *_: 0)
    monkeypatch.setattr(Asked, "sections", lambda *_: [Section(title="machine", kind="machine", rows=[], limit=1)])
    monkeypatch.setattr(check_command, "work", lambda *_: [])
    assert _check("--device", "cpu", "--html", "/nowhere/at.html") == (0, "", "")


@pytest.mark.slow
def test_check_alone(tmp_path: Path) -> None:
    paths = [tmp_path / "o.json", tmp_path / "o.html"]
    code, said, wrong = _check(
        "--device", "cpu", "--quick", "--only", "merge,dense", "--json", str(paths[0]), "--html", str(paths[1])
    )
    assert code == 0, said + wrong
    assert "checks passed" in said
    assert "recipes, gloo of 2" in wrong
    document = json.loads(paths[0].read_text())
    assert document["schema"] == "thinwire.check/1"
    assert document["passed"]
    assert {"merge", "dense", "versions"} <= {finding["name"] for finding in document["findings"]}
    assert all(title in paths[1].read_text() for title in ("machine", "kernels", "recipes, gloo of 2"))


@pytest.mark.slow
def test_check_exits_with_1_where_something_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "WORKER", "lab.check.broken_worker")
    monkeypatch.setattr(Asked, "_all", lambda *_: [Section(title="kernels", kind="kernels", rows=["raises"], limit=9)])
    code, said, wrong = _check("--quick")
    assert code == 1
    assert "thinwire check: kernels: raises: RuntimeError: it broke [" in said
    assert "✗ kernels: raises" in wrong


@pytest.mark.slow
def test_a_check_that_is_interrupted_blames_no_row() -> None:
    with subprocess.Popen(
        [sys.executable, "-Pm", "thinwire", "check"],
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),  # as a background job has not
    ) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("kernels"))
        time.sleep(1)
        os.killpg(process.pid, signal.SIGINT)
        said = process.stdout.read()
    assert process.returncode == 130
    assert "✗" not in said


@pytest.mark.slow
def test_check_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "thinwire", "check"]
    done = subprocess.run(
        [*command, "--device", "cpu", "--quick", "--only", "merge,dense"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recipes, gloo of 3" in done.stdout
    assert done.stdout.count("checks passed") == 1, "rank 0 alone prints"
