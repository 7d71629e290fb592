"""`thinwire plan` as a user meets it: from a profile made by hand, and measured on two workers."""

import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from thinwire.exchanges import Link
from thinwire.planner import Bucket, Budget, Cost, Curve, Gradient, Profile, Timeline, decide, step_seconds
from thinwire.planner.profile import TRANSPORTS
from thinwire_lab.cli import app
from thinwire_lab.inputs import BadInput
from thinwire_lab.plan import sources, subject, worker
from thinwire_lab.plan.report import bit_rate, conclusions, every, folded, html

SLOW, FAST = Link(latency=1e-4, bandwidth=1e6), Link(latency=1e-5, bandwidth=1e11)
USER = """
import torch
from torch import nn

def step(model):
    return model(torch.ones(8, 64)).square().mean()

def build():
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 1)), step

def with_optimizer():
    module, step = build()
    return module, step, torch.optim.SGD(module.parameters(), lr=0.1)

def nothing():
    return 3

def triple():
    return nn.Linear(2, 2), step, 5

def uncallable():
    return nn.Linear(2, 2), "step"

def empty():
    return nn.ReLU(), step

def lazy():
    return nn.LazyLinear(2), step

def meta():
    return nn.Linear(64, 2, device="meta"), step

def imaginary():
    return nn.Linear(64, 2, dtype=torch.complex64), step

def vector():
    return nn.Linear(64, 2), lambda model: model(torch.ones(8, 64))

NUMBER = 3
"""


def _line(value: float, each: float = 0.0) -> Curve:
    return Curve(((1.0, value), (1e6, value + 1e6 * each)))


def _cost(ratio: float) -> Cost:
    free = _line(0.0)
    return Cost(
        encode=_line(1e-5, 1e-9), decode=_line(1e-5, 5e-10), each=free, exchange=free, nbytes=_line(16.0, 4 / ratio)
    )


def _profile(
    sizes: Mapping[str, int], link: Link, *, workers: int = 2, slowdown: float = 0.0, backend: str = "nccl"
) -> Profile:
    buckets = tuple(
        Bucket(ready=0.01 * (place + 1), gradients=(Gradient(name=name, numel=numel),))
        for place, (name, numel) in enumerate(sizes.items())
    )
    return Profile(
        world_size=workers,
        timeline=Timeline(buckets=buckets, computed=0.01 * len(sizes) + 0.002, rest=0.003),
        links=dict.fromkeys(TRANSPORTS, link),
        busy=dict.fromkeys(TRANSPORTS, FAST),
        costs={"fp16": _cost(2), "topk:0.01": _cost(80)},
        slowdown=slowdown,
        tiers=["groups of 2 ranks on one host: latency 0.10 ms, bandwidth 8 Mbit/s"],
        made={"world_size": workers, "link": "8 Mbit/s", "backend": backend},
    )


REQUEST = ("target", "model", "data", "scale", "seed", "workers", "link", "profile", "save_profile")
TWO = {"large.weight": 100_000, "small.bias": 10}


def _plan(tmp_path: Path, profile: Profile, *args: str, columns: int = 80) -> str:
    profile.save(tmp_path / "profile.json")
    command = ["plan", "--profile", str(tmp_path / "profile.json"), *args]
    done = CliRunner().invoke(app, command, env={"COLUMNS": str(columns)})
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def _joined(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_where_it_pays_the_plan_says_what_and_why(tmp_path: Path) -> None:
    said = _joined(_plan(tmp_path, _profile(TWO, SLOW)))
    assert "2 workers · 8 Mbit/s" in said
    assert "all-reduce latency 0.10 ms bandwidth 8 Mbit/s" in said
    assert "groups of 2 ranks on one host" in said
    assert "large.weight 100,000 400 kB topk:0.01 5.02 kB" in said
    assert "instead of 400 ms" in said
    assert re.search(r"Predicted step: [\d.]+ ms uncompressed, [\d.]+ ms as planned: [\d.]+ times as fast", said)
    assert re.search(r"Compression stops paying above [\d.]+ [GM]bit/s here", said)
    assert "Nothing pays" not in said


def test_with_outer_steps_it_says_which_way_is_first_by_which_assumptions(tmp_path: Path) -> None:
    out, page = tmp_path / "plan.json", tmp_path / "plan.html"
    files = ("--json", str(out), "--html", str(page))
    assumed = ("--outer", "10,30", "--more-steps", "sparseloco:30=1.25,diloco:30=9")
    said = _joined(_plan(tmp_path, _profile(TWO, SLOW), *assumed, *files, columns=120))
    assert "First at uncompressed training's loss: sparseloco, H 30, " in said
    assert "Steps to the same loss: from 300 steps of the byte-level GPT" in said
    assert "First at uncompressed training" in page.read_text()
    ways = {way["name"]: way for way in json.loads(out.read_text())["outer"]}
    assert ways["sparseloco, H 30"]["more"] == 1.25
    assert ways["uncompressed, each step"]["until"] == pytest.approx(1000 * ways["uncompressed, each step"]["seconds"])
    assert ways["as planned, each step"]["more"] is None
    assert "outer" not in json.loads(decide(_profile(TWO, SLOW)).to_json())


def test_where_nothing_pays_it_says_so_and_what_attach_then_does(tmp_path: Path) -> None:
    said = _joined(_plan(tmp_path, _profile(TWO, FAST)))
    assert 'Nothing pays here: thinwire.attach(model, "auto") then leaves plain DDP.' in said
    assert "Compression would pay below" in said
    assert "as planned" not in said
    assert "saves:" not in said


def test_one_worker_has_nobody_to_exchange_with(tmp_path: Path) -> None:
    said = _joined(_plan(tmp_path, _profile(TWO, SLOW), "--workers", "1"))
    assert "1 worker · 8 Mbit/s What if: the profile was measured with 2 workers" in said
    assert "only one worker: nothing to exchange" in said
    assert "all-reduce latency" not in said
    assert "Compression" not in said


def test_one_tensor(tmp_path: Path) -> None:
    said = _plan(tmp_path, _profile({"only": 1000}, SLOW))
    assert len([line for line in said.splitlines() if line.startswith("only ")]) == 1


def test_a_link_and_workers_as_if(tmp_path: Path) -> None:
    said = _joined(_plan(tmp_path, _profile(TWO, FAST), "--workers", "4", "--link", "1mbit"))
    assert "4 workers · 1 Mbit/s What if: the profile was measured with 2 workers · 8 Mbit/s." in said
    assert "bandwidth 1 Mbit/s" in said
    assert "times as fast" in said


def test_no_gradient_to_plan_for(tmp_path: Path) -> None:
    said = _joined(_plan(tmp_path, _profile({}, SLOW), "--html", str(tmp_path / "o.html")))
    assert "No gradient to plan for" in said
    assert "No gradient to plan for" in (tmp_path / "o.html").read_text()


@pytest.mark.parametrize(("given", "words"), [(math.inf, "at every bandwidth"), (0.0, "never pays here")])
def test_break_even_beyond_all_links(tmp_path: Path, given: float, words: str) -> None:
    plan = replace(decide(_profile(TWO, SLOW)), break_even=given)
    assert any(words in line for line in conclusions(plan))
    unseen = replace(plan, profile=replace(plan.profile, unseen={"all_reduce": 0}))
    assert not any(words in line for line in conclusions(unseen)), "what was not measured says nothing of bandwidths"


@pytest.mark.parametrize(
    ("bandwidth", "said"),
    [
        (12.5e6, "100 Mbit/s"),
        (0.775e9, "6.2 Gbit/s"),
        (125.0, "1 kbit/s"),
        (0.12499e9, "1 Gbit/s"),
        (1.0, "8 bit/s"),
        (1e15, "beyond measure"),
    ],
)
def test_bandwidth_is_told_as_links_are_rated(bandwidth: float, said: str) -> None:
    assert bit_rate(bandwidth) == said


@pytest.mark.parametrize(
    ("most", "said"),
    [
        (4096, "bandwidth at least 8 Mbit/s: messages of up to 4.10 kB hardly took longer than tiny ones"),
        (0, "bandwidth not measured: this profile is of an older version"),
    ],
)
def test_what_was_not_seen_of_the_network_is_said(tmp_path: Path, most: int, said: str) -> None:
    found = replace(_profile(TWO, SLOW), unseen={"all_reduce": most}, made={"measuring_seconds": 12.5})
    printed = _joined(_plan(tmp_path, found))
    assert said in printed
    assert "Measuring took 12.5 s." in printed
    assert "Nothing pays" not in printed


def _layers(count: int) -> Profile:
    names = [f"encoder.layers.{layer}.self_attention.out_projection" for layer in range(count)]
    sizes = {f"{name}.{part}": numel for name in names for part, numel in (("weight", 90_000), ("bias", 30))}
    profile = _profile(sizes, SLOW)
    (first, *_) = profile.timeline.buckets
    every_gradient = tuple(g for bucket in profile.timeline.buckets for g in bucket.gradients)
    return replace(profile, timeline=replace(profile.timeline, buckets=(replace(first, gradients=every_gradient),)))


def test_of_many_tensors_those_alike_are_folded_and_all_shows_each(tmp_path: Path) -> None:
    profile = _layers(40)
    said = _plan(tmp_path, profile)
    assert re.search(r"\d\d encoder\.layers\.\*\.self_attention\.out_projection\.weight", said)
    assert "40 small tensors" in said
    assert len(said.splitlines()) < 30
    for args in (("--all",), ("--all", "--explain")):
        every_line = _plan(tmp_path, profile, *args)
        assert sum("out_projection" in line for line in every_line.splitlines()) == 80


def test_folding_loses_no_element_and_no_byte() -> None:
    plan = decide(_layers(40))
    for lines in (folded(plan), every(plan)):
        assert sum(line.count for line in lines) == len(plan.rows)
        assert sum(line.numel for line in lines) == sum(row.numel for row in plan.rows)
        assert sum(line.nbytes for line in lines) == pytest.approx(sum(row.nbytes for row in plan.rows))
    weights = max(folded(plan), key=lambda line: line.numel)
    assert weights.count > 1
    alone = {name: given for name, given in plan.choice.items() if "weight" not in name}
    assert weights.saves == pytest.approx(step_seconds(plan.profile, alone) - plan.seconds)


def test_what_is_treated_differently_is_never_folded_together() -> None:
    plan = decide(_layers(40))
    rows = [replace(row, choice=("dense", "fp16", "topk:0.01")[place % 3]) for place, row in enumerate(plan.rows)]
    counted: Counter[str] = Counter()
    for line in folded(replace(plan, rows=rows)):
        counted[line.choice] += line.count
    assert counted == Counter(row.choice for row in rows)


@pytest.mark.parametrize("columns", [80, 120])
def test_nothing_is_wider_than_the_terminal(tmp_path: Path, columns: int) -> None:
    said = _plan(tmp_path, _layers(3), columns=columns)
    assert max(len(line) for line in said.splitlines() if not line.startswith("written")) <= columns
    names = [line for line in said.splitlines() if "out_projection.weight" in line]
    assert len(names) == 3, "names are never cut"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--profile", "PROFILE", "--model", "mlp"], "with --profile nothing is measured: leave --model out"),
        (["a.py:build", "--profile", "PROFILE"], "leave a.py:build out"),
        (["--profile", "PROFILE", "--save-profile", "x"], "leave --save-profile out"),
        (["a.py:build", "--seed", "1"], "leave --seed out"),
        (["--profile", "PROFILE", "--candidates", "fp16,nope"], "no candidate is called 'nope'"),
        (["--profile", "PROFILE", "--candidates", ","], "names nothing"),
        (["--profile", "PROFILE", "--candidates", "gtopk"], "was not measured for gtopk:0.01"),
        (["--profile", "PROFILE", "--density", "0.5"], "was not measured for topk:0.5; it has fp16, topk:0.01"),
        (["--profile", "PROFILE", "--density", "2"], "--density 2 is not a share of the elements"),
        (["--profile", "PROFILE", "--density", "a"], "not a list of numbers"),
        (["--profile", "PROFILE", "--workers", "0"], "--workers is 0"),
        (["--explain", "--workers", "1"], "expected 2 workers or more"),
        (["--profile", "PROFILE", "--link", "fast"], "'fast'"),
        (["--profile", "PROFILE", "--json", "/nonexistent/o.json"], "cannot write /nonexistent/o.json"),
        (["--save-profile", "/"], "cannot write /"),
        (["--profile", "/nonexistent"], "cannot read /nonexistent"),
        (["--profile", "EMPTY"], "expected what --save-profile wrote"),
        (["--profile", "LIST"], "expected what --save-profile wrote"),
        (["--profile", "OTHER"], "'thinwire.bench/1'; expected 'thinwire.profile/2'"),
        (["--profile", "CUT"], "expected what --save-profile wrote"),
        (["--profile", "STILL"], "links.all_reduce.bandwidth is 0.0; expected more than 0"),
        (["--profile", "LONG"], "expected what --save-profile wrote"),
        (["--profile", "LATER", "--explain"], "the profile's script is {'later': 1}"),
        (["--optimizer", "adam"], "choose one of sgd, adamw, muon"),
        (["--profile", "PROFILE", "--loss", "1.1"], "give --optimizer as well"),
        (["--candidates", "bf16,fading"], "fading takes momentum out of an optimizer; give --optimizer as well"),
        (["--candidates", "orthogonal"], "orthogonal takes momentum out of an optimizer; give --optimizer as well"),
        (
            ["--profile", "PROFILE", "--optimizer", "sgd", "--loss", "0.5"],
            "loss is 0.5; expected a finite number of at least 1",
        ),
        (
            ["--profile", "PROFILE", "--optimizer", "sgd", "--loss", "2", "--candidates", "topk"],
            "leave one of them out",
        ),
        (["--profile", "PROFILE", "--more-steps", "diloco:30=1.2"], "give --outer as well"),
        (["--profile", "PROFILE", "--outer", "0"], "numbers of 1 or more"),
        (["--profile", "PROFILE", "--outer", "30", "--more-steps", "diloco=1.2"], "as in sparseloco:30=1.2"),
        (["--profile", "PROFILE", "--outer", "30", "--more-steps", "adam:30=1.2"], "expected one of diloco"),
        (["--profile", "PROFILE", "--outer", "30", "--more-steps", ""], "as in sparseloco:30=1.2"),
        (
            ["--profile", "PROFILE", "--outer", "30", "--more-steps", "diloco:10=1.2"],
            "diloco:10 is of no H in --outer 30",
        ),
        (["--profile", "PROFILE", "--json", "PROFILE"], "which is read; expected another name"),
        ([f"{__file__}:build", "--json", __file__], "which is read; expected another name"),
        (["--profile", "PROFILE", "--outer", "30", "--more-steps", "diloco:30=0.5"], "a factor of 1 or more"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(tmp_path: Path, args: list[str], message: str) -> None:
    document = json.loads(_profile(TWO, SLOW).to_json())
    still = document | {"links": {key: {"latency": 0.0, "bandwidth": 0.0} for key in TRANSPORTS}}
    files = {"PROFILE": document, "LIST": [], "OTHER": {"schema": "thinwire.bench/1"}, "STILL": still}
    files["LONG"] = document | {"timeline": document["timeline"] | {"buckets": [{"ready": 10**400, "gradients": []}]}}
    files["LATER"] = document | {"made": document["made"] | {"script": {"later": 1}}}
    files["CUT"] = {key: value for key, value in document.items() if key != "links"}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "EMPTY").write_text("")
    named = [str(tmp_path / arg) if arg in {*files, "EMPTY"} else arg for arg in args]
    done = CliRunner().invoke(app, ["plan", *named])
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert done.stderr.startswith("thinwire plan: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout


@pytest.mark.parametrize("args", [(), ("--candidates", "topk,fp16,sampled_topk")])
def test_methods_measured_at_different_densities_are_planned_for_as_measured(
    tmp_path: Path, args: tuple[str, ...]
) -> None:
    costs = {"fp16": _cost(2), "topk:0.05": _cost(20), "sampled_topk:0.01": _cost(80)}
    assert "sampled_topk:0.01" in _plan(tmp_path, replace(_profile(TWO, SLOW), costs=costs), *args)


def test_without_error_feedback_nothing_waits(tmp_path: Path) -> None:
    said = _plan(tmp_path, _profile(TWO, SLOW), "--no-error-feedback")
    assert "fp16" in said
    assert "topk" not in said


def test_with_an_optimizer_the_plan_keeps_to_what_it_bears_and_says_what_it_costs(tmp_path: Path) -> None:
    profile = _profile(TWO, SLOW)
    allowed = _joined(_plan(tmp_path, profile, "--optimizer", "sgd"))
    assert "large.weight 100,000 400 kB dense" in allowed
    assert re.search(r"- topk:0.01, if you ask for it: it ended at 1.10 times .* loss: [\d.]+ ms a step", allowed)
    assert allowed.count("topk") == 1, "it is no reason for a tensor"
    assert "Expected loss" not in allowed, "nothing that was measured as harmless has a cost here"
    asked = _joined(_plan(tmp_path, profile, "--optimizer", "sgd", "--loss", "1.15"))
    assert "Expected loss under sgd: topk:0.01 ended at 1.10 times dense's (2.209 against 2.014)." in asked
    named = _joined(_plan(tmp_path, profile, "--optimizer", "adamw", "--candidates", "topk"))
    assert "Expected loss under adamw: topk:0.01 ended at" in named
    json_file, html_file = tmp_path / "o.json", tmp_path / "o.html"
    files = ["--json", str(json_file), "--html", str(html_file)]
    _plan(tmp_path, profile, "--optimizer", "sgd", "--loss", "1.15", *files)
    assert json.loads(json_file.read_text())["optimizer"] == "sgd"
    assert "Expected loss under sgd" in html_file.read_text()


def test_without_an_optimizer_the_plan_is_as_it_was_and_standard_error_says_how_to_name_it(tmp_path: Path) -> None:
    _profile(TWO, SLOW).save(tmp_path / "p.json")
    command = ["plan", "--profile", str(tmp_path / "p.json")]
    done = CliRunner().invoke(app, command)
    assert "topk:0.01" in done.stdout
    assert "Expected loss" not in done.stdout
    assert done.stderr.count("name yours, as in --optimizer adamw") == 1
    assert CliRunner().invoke(app, [*command, "--candidates", "topk"]).stderr == ""
    assert CliRunner().invoke(app, [*command, "--optimizer", "sgd"]).stderr == ""


def test_a_profile_that_lacks_what_the_optimizer_bears_does_not_say_that_nothing_pays(tmp_path: Path) -> None:
    said = _joined(_plan(tmp_path, _profile(TWO, SLOW), "--optimizer", "adamw"))
    assert "but not measured in this profile: bf16, qsgd, orthogonal:0.0234375. Measure again" in said
    assert "Compression never pays" not in said
    assert "Nothing pays" not in said
    named = _joined(_plan(tmp_path, _profile(TWO, SLOW), "--optimizer", "adamw", "--candidates", "fp16"))
    assert "not measured in this profile" not in named
    whole = replace(_profile(TWO, FAST), costs={name: _cost(2) for name in Budget.under("adamw").names})
    assert "Nothing pays here" in _joined(_plan(tmp_path, whole, "--optimizer", "adamw"))
    assert "not measured in this profile" not in _joined(
        _plan(tmp_path, _profile(TWO, SLOW), "--optimizer", "adamw", "--workers", "1")
    )


def test_what_is_measured_is_what_the_optimizer_bears() -> None:
    wishes = sources.wishes(densities=None, candidates=None, error_feedback=True, optimizer="sgd", loss=1.15)
    assert wishes.budget() == Budget.under("sgd", loss=1.15)
    profile = replace(_profile(TWO, SLOW), costs={"topk:0.01": _cost(80), "gtopk:0.01": _cost(80), "fp16": _cost(2)})
    assert wishes.among(profile).names == ["topk:0.01"]
    request = sources.Request(**dict.fromkeys(REQUEST), optimizer="muon")
    source = request.source()
    assert isinstance(source, sources.Measured)
    assert source.subject["optimizer"] == "muon"


def test_only_with_an_optimizer_a_profile_may_be_planned_with_fading() -> None:
    name = "fading:0.0234375"
    profile = replace(_profile(TWO, SLOW), costs={"topk:0.01": _cost(80), name: _cost(180)})
    cases = ("adamw", 1.05, ["dense", name]), ("sgd", 1.05, ["dense"]), (None, None, ["dense", "topk:0.01"])
    for optimizer, loss, expected in cases:
        wishes = sources.wishes(densities=None, candidates=None, error_feedback=True, optimizer=optimizer, loss=loss)
        assert [each.name for each in wishes.among(profile).candidates()] == expected
    chosen = decide(profile, Budget.under("adamw", loss=1.05))
    assert set(chosen.choice.values()) == {name}
    assert chosen.expected_loss.startswith(f"Expected loss under adamw: {name} ended at 1.03 times dense's")


def test_a_profile_is_planned_with_what_it_was_measured_for() -> None:
    wishes = sources.wishes(densities=None, candidates=None, error_feedback=True)
    profile = replace(_profile(TWO, SLOW), costs={"topk:0.05": _cost(15), "topk:0.002": _cost(300)})
    names = [candidate.name for candidate in wishes.among(profile).candidates()]
    assert names == ["dense", "topk:0.05", "topk:0.002"]


def test_the_json_holds_the_plan_and_the_html_needs_nothing_beside_it(tmp_path: Path) -> None:
    said = _plan(tmp_path, _profile(TWO, SLOW), "--json", str(tmp_path / "o.json"), "--html", str(tmp_path / "o.html"))
    assert f"written: {tmp_path / 'o.json'}" in said
    document = json.loads((tmp_path / "o.json").read_text())
    assert document["schema"] == "thinwire.plan/2"
    assert [row["name"] for row in document["rows"]] == list(TWO)
    page = (tmp_path / "o.html").read_text()
    assert "http" not in page
    for word in (*TWO, "times as fast", "instead of 400 ms"):
        assert word in page


def test_names_are_escaped_in_html() -> None:
    profile = _profile({"<b>&": 1000}, SLOW)
    page = html(profile, decide(profile))
    assert "&lt;b&gt;&amp;" in page
    assert "<b>" not in page


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(USER)
    return path


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("FILE", "names no function"),
        ("FILE:", "names no function"),
        (":build", "names no function"),
        ("missing.py:build", "no file missing.py"),
        ("no_such_package.module:build", "no module 'no_such_package.module'"),
        ("FILE:typo", "no function 'typo'"),
        ("FILE:NUMBER", "no function 'NUMBER'"),
        ("FILE:nothing", "returned int; expected a function that returns (module, step)"),
        ("FILE:triple", "returned int as the optimizer"),
        ("FILE:uncallable", "returned str as the step"),
        ("FILE:lazy", "weight waits for a first batch"),
        ("FILE:meta", "weight is on meta"),
        ("FILE:imaginary", "weight is complex"),
    ],
)
def test_a_model_of_the_users_that_is_none(
    user_file: Path, target: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(BadInput, match=re.escape(message)):
        subject.of_user(target.replace("FILE", str(user_file)))


def test_a_step_that_returns_no_loss(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    given = subject.of_user(f"{user_file}:vector")
    with pytest.raises(BadInput, match=re.escape("returned Tensor of shape (8, 2); expected the loss")):
        given.loss(given.module)


def test_an_error_in_what_the_user_imports_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imports_more.py").write_text("import no_such_thing")
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
        subject.of_user("imports_more:build")


@pytest.mark.slow
def test_a_users_model_measured_saved_and_planned_again(user_file: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    measure = ["plan", f"{user_file}:with_optimizer", "--candidates", "fp16", "--link", "none"]
    done = CliRunner().invoke(app, [*measure, "--save-profile", str(saved)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "2 workers" in done.stdout
    assert "2,113 parameters" in _joined(done.stdout)
    profile = Profile.load(saved)
    assert profile.world_size == 2
    assert set(profile.costs) == {"fp16"}
    assert {g.name for g in profile.timeline.gradients} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    again = CliRunner().invoke(app, ["plan", "--profile", str(saved)])
    assert again.exit_code == 0, again.output
    assert _joined(again.stdout) == _joined(done.stdout).replace(f"written: {saved} ", "")


@pytest.mark.slow
def test_the_documented_example_runs(tmp_path: Path) -> None:
    guide = Path(__file__).parents[3] / "docs" / "how-to" / "plan.md"
    (example,) = re.findall(r"```python\n(# train\.py\n.*?)```", guide.read_text(), flags=re.DOTALL)
    (tmp_path / "train.py").write_text(example)
    command = ["plan", f"{tmp_path / 'train.py'}:build", "--candidates", "fp16", "--link", "none"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, (done.output, done.exception)
    assert re.search(r"^0\.weight +401,408 ", done.stdout, flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(("build", "message"), [("empty", "no parameter takes a gradient"), ("vector", "the loss")])
def test_what_workers_refuse_is_bad_input(user_file: Path, build: str, message: str) -> None:
    done = CliRunner().invoke(app, ["plan", f"{user_file}:{build}", "--link", "none"])
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("optimizer", "named", "expected"),
    [
        (torch.optim.AdamW, False, ("bf16", "qsgd", "orthogonal:0.0234375")),
        (torch.optim.NAdam, False, ("bf16", "qsgd")),  # momentum cannot be moved out of it
        (torch.optim.AdamW, True, Budget().names),
        (None, False, Budget().names),
    ],
)
def test_the_optimizer_that_build_returns_says_what_may_be_chosen(
    optimizer: Callable[..., torch.optim.Optimizer] | None, named: bool, expected: Sequence[str]
) -> None:
    module = nn.Linear(4, 4)
    several = [] if optimizer is None else [optimizer(module.parameters(), lr=0.1)]
    built = subject.Subject("mine", module, lambda model: model(torch.ones(4)).sum(), None, several)
    budget = worker._budget(Budget(), built, named=named)
    assert tuple(budget.names) == tuple(expected)
    assert budget.optimizer == (optimizer and "adamw")
    asked = Budget.under("sgd")
    assert worker._budget(asked, built, named=named) == asked, "what the user says comes first"


def test_the_optimizer_is_kept_with_the_model(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (found,) = subject.of_user(f"{user_file}:with_optimizer").optimizers
    assert isinstance(found, torch.optim.SGD)
    assert not subject.of_user(f"{user_file}:build").optimizers


@pytest.mark.slow
def test_one_worker_is_measured_too(user_file: Path) -> None:
    source = sources.Measured(kind="user", subject={"target": f"{user_file}:build"}, workers=1, rate=None)
    known = source.known(sources.wishes(densities=None, candidates="fp16", error_feedback=True))
    assert not decide(known.profile, known.budget).pays


@pytest.mark.slow
def test_under_torchrun_the_first_rank_speaks_for_the_group(user_file: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*torchrun, "-m", "thinwire", "plan", f"{user_file}:build", "--candidates", "fp16"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Predicted step") == 1
    assert "2 workers · UNTHROTTLED" in done.stdout
