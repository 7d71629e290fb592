"""`thinwire bench` as a user meets it: real processes, a real link where one is allowed."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_report import example
from torch import nn
from typer.testing import CliRunner

from thinwire import Budget, recipes
from thinwire_lab.bench import command, methods, options
from thinwire_lab.bench.methods import BENCHED
from thinwire_lab.bench.results import Results, Setting
from thinwire_lab.bench.session import Session
from thinwire_lab.cli import app
from thinwire_lab.inputs import BadInput
from thinwire_lab.problems import PROBLEMS

BENCH = [sys.executable, "-m", "thinwire", "bench"]
SHORT = ["--steps", "6", "--recipes", "topk,dense", "--density", "0.05"]


def _bench(*args: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BENCH, *args], capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--recipes", "dense,nope"], "unknown recipe 'nope'"),
        (["--recipes", ","], "names nothing"),
        (["--link", "fast"], "'fast'"),
        (["--link", "0mbit"], "'0mbit'"),
        (["--workers", "1"], "--workers 2 or more"),
        (["--workers", "0"], "--workers 2 or more"),
        (["--steps", "0"], "--steps is 0"),
        (["--density", "a"], "not a list of numbers"),
        (["--density", "2"], "not a share"),
        (["--density", "0"], "not a share"),
        (["--recipes", "topk:2"], "not a share"),
        (["--recipes", "topk:a"], "topk:0.01"),
        (["--recipes", "qsgd:0.1"], "takes no density"),
        (["--model", "lstm_sparse", "--data", "."], "try --recipes dense,bf16,topk,dgc,dragonn"),
        (["--extend", "0.5"], "--extend is 0.5"),
        (["--model", "nope"], "'nope'"),
        (["--model", "lstm"], "--data"),
        (["--model", "mlp", "--data", "/nonexistent"], "/nonexistent"),
        (["--model", "xml", "--scale", "-1"], "--scale"),
        (["--model", "dlrm", "--scale", "0.5"], "--scale"),
        (["--seed", "-1"], "the seed is -1; expected 0 or more"),
        (["--seed", str(2**63)], "expected 0 or more, and less than 2^63"),
        (["--shard", "-1"], "--shard is -1"),
        (["--boundary", ""], "--boundary '' is empty"),
        (["--data", __file__, "--json", __file__], "which is read; expected another name"),
        (["--seeds", "0"], "--seeds is 0"),
        (["--micro-batches", "8"], "--micro-batches are what a pipeline takes; give --pipeline STAGES"),
        (["--optimizer", "adam"], "choose one of sgd, adamw, muon"),
        (["--optimizer", "adamw", "--recipes", "dense,dgc"], "dgc takes over SGD's momentum"),
        (["--optimizer", "adamw", "--pipeline", "2", "--recipes", "dragonn"], "leave dragonn out of --recipes"),
        (["--json", "/nonexistent/out.json"], "cannot write /nonexistent/out.json"),
        (["--html", "/"], "cannot write /"),
        (["--plot", "loss.txt"], "expected .png, .svg or .pdf"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(args: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", *args])
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.startswith("thinwire bench: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout


def test_list_names_recipes_and_models() -> None:
    done = CliRunner().invoke(app, ["bench", "--list"])
    assert done.exit_code == 0
    for name in (*BENCHED, *filter(str.islower, recipes.__all__)):
        assert name in done.stdout
    for name in PROBLEMS:
        assert name in done.stdout


def test_a_recipe_may_have_a_density_of_its_own() -> None:
    asked = options.read(
        workers=2, link="none", recipes="topk,topk:0.5,fft,fft:0.3,dense", densities="0.1,0.2", steps=1, model="mlp",
        data=None, scale=1.0, seed=0, target=None, extend=1.0,
    )  # fmt: skip
    lines = [("dense", 1.0), ("topk", 0.1), ("topk", 0.2), ("topk", 0.5), ("fft", 0.15), ("fft", 0.3)]
    assert asked.rows() == [Setting(*line) for line in lines]


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [("SGD", Budget(densities=(0.02,))), ("AdamW", Budget.under("adamw", densities=(0.02,)))],
)
def test_auto_plans_for_the_optimizer_of_the_run(
    optimizer: str, expected: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(methods, "attach", lambda model, how, **options: given.update(options, how=how))
    model: Any = nn.Linear(2, 2)
    several = [getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)]
    BENCHED["auto"].install(model, several, 0.02)
    assert given == {"how": expected, "optimizer": several}


@pytest.mark.slow
def test_a_short_run_from_end_to_end(tmp_path: Path) -> None:
    done = _bench(
        *SHORT,
        "--json",
        str(tmp_path / "o.json"),
        "--html",
        str(tmp_path / "o.html"),
        "--plot",
        str(tmp_path / "o.png"),
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((tmp_path / "o.json").read_text())
    assert document["schema"] == "thinwire.bench/2"
    assert set(document) == {"schema", "environment", "rows"}
    assert [row["recipe"] for row in document["rows"]] == ["dense", "topk"]
    assert all(row["replicas_identical"] for row in document["rows"])
    dense, topk = document["rows"]
    assert set(dense) == {
        *(
            "recipe",
            "density",
            "boundary",
            "steps",
            "step_seconds",
            "split_seconds",
            "wire_bytes_per_step",
            "loss_curve",
        ),
        *("final_loss", "seconds_to_target", "speedup_vs_dense", "replicas_identical"),
    }
    assert dense["loss_curve"][0][2] == topk["loss_curve"][0][2], "the same initial weights"
    assert dense["final_loss"] < dense["loss_curve"][0][2]
    assert dense["wire_bytes_per_step"]["declared"] == dense["wire_bytes_per_step"]["dense"]
    assert topk["wire_bytes_per_step"]["declared"] < 0.2 * dense["wire_bytes_per_step"]["declared"]
    results = Results.from_json(document)
    label = "100 Mbit/s" if results.throttled else "UNTHROTTLED"
    assert label in done.stdout
    assert label in (tmp_path / "o.html").read_text()
    if results.throttled:
        _check_bytes(document)


def _check_bytes(document: dict[str, Any]) -> None:
    """Measured bytes are the declared ones and the packets' headers, within 3 % and a little to keep links alive."""
    for row in document["rows"]:
        wire = row["wire_bytes_per_step"]
        label = row["recipe"] if row["density"] == 1 else f"{row['recipe']} {row['density']:g}"
        expected = wire["declared"] * (1 + document["environment"]["protocol_overhead"][label])
        assert wire["measured"] == pytest.approx(expected, rel=0.03, abs=500)


@pytest.mark.slow
def test_the_same_seed_trains_the_same(tmp_path: Path) -> None:
    losses = []
    for name in ("a", "b"):
        _bench("--steps", "3", "--recipes", "dgc", "--link", "none", "--json", str(tmp_path / name))
        losses.append(
            [loss for *_, loss in Results.from_json(json.loads((tmp_path / name).read_text())).rows[0].loss_curve]
        )
    assert losses[0] == losses[1]


def _start(json_file: Path) -> "subprocess.Popen[str]":
    densities = ",".join(str(0.01 * i) for i in range(1, 51))
    command = [*BENCH, "--steps", "10", "--recipes", "topk", "--density", densities, "--json", str(json_file)]
    pipe = subprocess.PIPE
    # A test run started in the background ignores SIGINT, and its children would too.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, preexec_fn=heed)


def _descendants(pid: int) -> set[int]:
    """Return the processes below `pid`."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found: set[int] = set()
    while fresh := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= fresh
    return found


def _wait(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


def _gone(pids: set[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() and "Z" not in _state(pid) for pid in pids)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("interrupt", 130), ("kill a worker", 1)])
def test_whatever_ends_a_run_keeps_finished_rows_and_leaves_nothing_behind(tmp_path: Path, end: str, code: int) -> None:
    file = tmp_path / "o.json"
    with _start(file) as bench:
        _wait(file.exists, 500)  # half a minute where nothing else runs
        children = _descendants(bench.pid)
        victim, blow = (bench.pid, signal.SIGINT) if end == "interrupt" else (max(children), signal.SIGKILL)
        os.kill(victim, blow)
        output, errors = bench.communicate(timeout=500)
    assert bench.returncode == code, (output, errors)
    assert len(children) >= 3
    _wait(lambda: _gone(children), 300)
    results = Results.from_json(json.loads(file.read_text()))
    assert results.rows
    assert results.incomplete is not None
    assert "topk 0.01" in output
    assert len(errors.strip().splitlines()) == 1


@pytest.mark.parametrize("asked", [{"slow": 2.0}, {"kill": True}])
def test_under_torchrun_no_worker_is_slowed_down_or_killed(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "run", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match="--slow and --kill take processes of their own: leave torchrun out"):
        options.read(workers=None, link=None, recipes=None, densities="0.01", outer="10", **asked)


@pytest.mark.slow
def test_under_torchrun_the_group_is_used_as_it_is(tmp_path: Path) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "thinwire",
    ]
    command = [*torchrun, "bench", *SHORT, "--json", str(tmp_path / "o.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # On a busy machine any DDP script on Gloo may abort after its last line.
    assert done.returncode == 0 or "terminate called without an active exception" in done.stderr
    assert done.stdout.count("UNTHROTTLED") >= 1, done.stderr
    results = Results.from_json(json.loads((tmp_path / "o.json").read_text()))
    assert [row.label for row in results.rows] == ["dense", "topk 0.05"]
    assert not results.throttled
    assert all(row.replicas_identical for row in results.rows)


USUAL: dict[str, Any] = {
    "workers": None, "link": None, "recipes": None, "densities": "0.01", "steps": 300, "model": "transformer",
    "data": None, "scale": 1.0, "seed": 0, "target": None, "extend": 1.5,
}  # fmt: skip


def test_who_asks_for_nothing_in_particular_sees_adamw_too() -> None:
    sgd, adamw = options.read(**USUAL).acts
    assert (sgd.optimizer, sgd.recipes, sgd.steps) == ("sgd", options.DEFAULT, 300)
    assert adamw.optimizer == "adamw"
    assert {"dense", "bf16", "topk", "fading", "torch_powersgd"} == set(adamw.recipes)
    assert adamw.steps < sgd.steps
    assert (adamw.rate, adamw.workers, adamw.model) == (sgd.rate, sgd.workers, sgd.model)


@pytest.mark.parametrize(
    "asked", [{"optimizer": "adamw"}, {"workers": 4}, {"steps": 20}, {"recipes": "dense,topk"}, {"link": "1gbit"}]
)
def test_who_asks_for_something_gets_that_alone(asked: dict[str, Any]) -> None:
    assert options.read(**USUAL | asked).then is None


def test_rows_are_printed_though_an_error_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(session: Session, *_: object, **__: object) -> None:
        session._rows.append(example().rows[0])
        raise ConnectionError("another rank is gone")

    _Sessions(monkeypatch)
    monkeypatch.setattr(Session, "run", run)
    plot = tmp_path / "o.png"
    plot.write_text("of another run")
    with pytest.raises(ConnectionError, match="another rank is gone"):
        command.run(options.read(**USUAL), json=tmp_path / "o.json")
    assert "First at the target loss" in capsys.readouterr().out
    assert Results.from_json(json.loads((tmp_path / "o.json").read_text())).rows
    monkeypatch.setattr(Session, "run", lambda *_, **__: _interrupt())
    assert command.run(options.read(**USUAL), plot=plot) == 130
    assert "written" not in capsys.readouterr().out


def _interrupt() -> None:
    raise KeyboardInterrupt


class _Sessions:
    """Stands in for the workers' part of a session."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends_in: str = "") -> None:
        self.trained: list[str] = []

        def run(session: Session, workers: object, watcher: object, on_row: Any) -> None:
            session._link = "a link"
            if session.options.optimizer == ends_in:
                raise KeyboardInterrupt
            self.trained.append(session.options.optimizer)
            on_row()

        monkeypatch.setattr(Session, "run", run)
        monkeypatch.setattr(command, "started", lambda *_: nullcontext(SimpleNamespace(label="a link")))
        monkeypatch.setattr(command, "_describe", lambda _: "a model")


def test_between_its_acts_a_run_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str | None]()
    _Sessions(monkeypatch)
    monkeypatch.setattr(options.Options, "rows", lambda _: [])
    monkeypatch.setattr(command, "_save", lambda _, results: said.append(results.acts[-1].incomplete))
    command.run(options.read(**USUAL))
    assert said == ["INCOMPLETE: the run goes on. Only finished rows are shown.", None, None]


@pytest.mark.parametrize(
    ("ends_in", "written"), [("", ["sgd", "adamw"]), ("adamw", ["sgd", "adamw"]), ("sgd", ["sgd"])]
)
@pytest.mark.first(1)
def test_both_acts_are_in_one_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends_in: str, written: list[str]
) -> None:
    sessions = _Sessions(monkeypatch, ends_in)
    command.run(options.read(**USUAL), json=tmp_path / "o.json", html=tmp_path / "o.html")
    results = Results.from_json(json.loads((tmp_path / "o.json").read_text()))
    assert [act.environment["optimizer"] for act in results.acts] == written
    assert sessions.trained == [name for name in written if name != ends_in]
    page = (tmp_path / "o.html").read_text()
    assert all(act.title in page for act in results.acts)
