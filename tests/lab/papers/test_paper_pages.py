"""The ledger and the papers' pages: each claim has a row, tables are the ledger's, and verdicts are what runs say."""

import json
import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from thinwire_lab.bench.results import Row
from thinwire_lab.machine import TODAY, code
from thinwire_lab.papers import __main__ as program
from thinwire_lab.papers.dct.served import Served
from thinwire_lab.papers.dragonn import learning, steps
from thinwire_lab.papers.dragonn import timing as single
from thinwire_lab.papers.gtopk import timing
from thinwire_lab.papers.registry import PAPERS
from thinwire_lab.papers.shared import benches, ledger, tables
from thinwire_lab.papers.shared.benches import Benches, Place, Steps, at_every, by_workers, faster, gains, span
from thinwire_lab.papers.shared.claims import UNTESTABLE, Paper, over_seeds, spread_out, together
from thinwire_lab.papers.shared.deciding import Deciding
from thinwire_lab.papers.shared.judging import by_setting, every, larger, no_worse, sooner, worse
from thinwire_lab.papers.shared.ledger import (
    DEPENDS,
    FAILS,
    FOLDER,
    HOLDS,
    NAMES,
    OPEN,
    UNDECIDED,
    VERDICTS,
    Outcome,
    catalogue,
)
from thinwire_lab.papers.shared.material import Absent
from thinwire_lab.papers.shared.shelf import RUNS, Combined, Document, Shelf
from thinwire_lab.papers.shared.trials import FILE, Interval, Trial, Trials, Way, interval, over, steps_to

WAYS = {"dense": Way(recipe="dense()"), "topk": Way(recipe="topk(density=0.01)", batch=8)}
TRIALS = Trials(model="mlp", workers=2, steps=4, rate=0.1, ways=WAYS, seeds=(0, 1))
DATA = os.environ.get("THINWIRE_DATA")
NO_DATA = "THINWIRE_DATA names no directory with cifar10, mnist, wikitext2"
WRITES = "python -c \"import sys, pathlib; pathlib.Path(sys.argv[2]).write_text('[3]')\""


def test_every_claim_has_a_row_and_the_tables_are_the_ledgers() -> None:
    rows = ledger.read()
    assert list(rows) == list(catalogue())
    assert len(rows) == 117
    assert {row.verdict for row in rows.values()} <= set(VERDICTS)
    assert all(row.command for row in rows.values() if row.verdict != OPEN)
    assert tables.stale(rows) == []


def test_every_check_and_judge_is_of_a_claim_in_the_catalogue() -> None:
    for paper in PAPERS:
        assert {catalogue()[name].paper for name in {**paper.checks, **paper.judges}} <= {paper.name}


def test_a_table_that_strays_is_named(tmp_path: Path) -> None:
    folder, root = tmp_path / FOLDER.name, FOLDER.parent
    for page in (*(FOLDER / name / "README.md" for name in NAMES), FOLDER / "README.md", root / tables.PAGE):
        copy = tmp_path / page.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(page.read_text())
    rows = ledger.read()
    rows["G1"] = replace(rows["G1"], measured="nothing of the kind")
    assert tables.stale(rows, folder) == ["papers/gtopk/README.md"]
    tables.renew(rows, folder)
    assert tables.stale(rows, folder) == []
    assert "nothing of the kind" in (folder / "gtopk" / "README.md").read_text()


def test_a_page_has_the_clauses_that_decide_and_what_more_would() -> None:
    row = replace(
        ledger.read()["D2"],
        verdict=UNDECIDED,
        note=": here",
        measured="1.5 (1.2% to 1.9%); a | b; c",
        spread="3 seeds",
        how="so. What would decide: more seeds",
    )
    assert catalogue()["D2"].clauses == 2
    *_, criterion, verdict, ours = tables._line(row).removesuffix(" |\n").split(" | ")
    assert (criterion, verdict) == (row.criterion, "**undecided**: here; more seeds would decide")
    assert ours == "1.5 (1.2\N{EN DASH}1.9%); a \\| b (3 seeds)"


def _line(way: Way, seed: int, loss: float) -> str:
    settings = {
        "model": "mlp", "workers": 2, "steps": 4, "recipe": way.recipe, "optimizer": "sgd()", "rate": 0.1,
        "warm_up": 20, "batch": way.batch, "schedule": "constant", "seed": seed, "thinwire": TODAY,
    }  # fmt: skip
    return json.dumps(settings | {"looks": [[2, 2 * loss, 1.0, 0.25], [4, loss, 2.0, 0.5]], "bits": 0.5})


def test_trials_are_found_by_their_settings_and_what_is_missing_is_named(tmp_path: Path) -> None:
    shelf = Shelf(folder=tmp_path)
    assert len(TRIALS.missing(shelf)) == 2
    with pytest.raises(Absent, match="dense, topk on mlp has 0 of 2"):
        TRIALS.read(shelf)
    lines = [_line(way, seed, 1.0 + seed) for way in WAYS.values() for seed in (0, 1)]
    (tmp_path / FILE).write_text("\n".join(lines[:3]))
    (missing,) = TRIALS.missing(shelf)
    assert '--recipe "topk(density=0.01)"' in missing
    assert "--batch 8" in missing
    (tmp_path / FILE).write_text("\n".join(lines))
    found = TRIALS.read(shelf)
    assert [trial.seed for trial in found["topk"]] == [0, 1]
    assert found["dense"][1].loss == 2.0
    assert found["dense"][1].accuracy == 50


def test_a_training_by_another_version_is_missing_and_read_while_there_is_no_other(tmp_path: Path) -> None:
    shelf, (way, *_) = Shelf(folder=tmp_path), WAYS.values()
    old = [json.loads(_line(way, seed, 1.0)) | {"thinwire": "0.0.1"} for seed in (0, 1)]
    (tmp_path / FILE).write_text("\n".join(map(json.dumps, old)))
    only = TRIALS.only("dense")
    assert len(only.missing(shelf)) == 1
    assert [trial.loss for trial in only.read(shelf)["dense"]] == [1.0, 1.0]
    new = [json.loads(_line(way, seed, 2.0)) | {"thinwire": TODAY} for seed in (0, 1)]
    (tmp_path / FILE).write_text("\n".join(map(json.dumps, [*old, *new])))
    assert only.missing(shelf) == ()
    assert [trial.loss for trial in only.read(shelf)["dense"]] == [2.0, 2.0]


def test_ways_of_a_seed_are_compared_by_one_version_alone(tmp_path: Path) -> None:
    dense, topk = WAYS.values()
    old = [json.loads(_line(way, seed, 1.0)) | {"thinwire": "0.0.1"} for way in (dense, topk) for seed in (0, 1)]
    new = [json.loads(_line(way, seed, 2.0)) for way, seed in ((dense, 0), (dense, 1), (topk, 1))]
    (tmp_path / FILE).write_text("\n".join(map(json.dumps, [*old, *new])))
    found = TRIALS.read(Shelf(folder=tmp_path))
    assert {name: [trial.loss for trial in series] for name, series in found.items()} == {
        "dense": [1.0, 2.0], "topk": [1.0, 2.0],
    }  # fmt: skip


def test_a_server_is_compared_by_one_version_alone(tmp_path: Path) -> None:
    served = Served(densities=(1.0, 0.1), threads=1, updates=8, seeds=(0, 1))
    setting = {"embeddings": "sparse", "optimizer": "adagrad", "rate": 0.01, "updates": 8, "threads": 1, "drain": 0}

    def line(density: float, seed: int, loss: float, version: str) -> str:
        run = {"density": density, "seed": seed, "thinwire": version, "looks": [[8, loss, 1.0, 0.1, 5]]}
        return json.dumps(setting | run)

    lines = [line(density, seed, 1.0, "0.0.1") for density in (1.0, 0.1) for seed in (0, 1)]
    lines += [line(density, seed, 2.0, TODAY) for density, seed in ((1.0, 0), (1.0, 1), (0.1, 0))]
    (tmp_path / "server.jsonl").write_text("\n".join(lines))
    found = served.read(Shelf(folder=tmp_path))
    assert {density: [run.loss for run in runs] for density, runs in found.items()} == {
        1.0: [2.0, 1.0], 0.1: [2.0, 1.0],
    }  # fmt: skip
    assert len(served.missing(Shelf(folder=tmp_path))) == 1


def test_a_document_by_another_version_is_missing_and_read_until_it_is_made_anew(tmp_path: Path) -> None:
    shelf, three = Shelf(folder=tmp_path), Document(name="three", words=WRITES)
    (command,) = three.commands
    shelf.run(command)
    made = shelf.made()
    made[command]["thinwire"] = "0.0.1"
    (tmp_path / "made.json").write_text(json.dumps(made))
    assert three.missing(shelf) == (command,)
    assert three.read(shelf) == [3]
    shelf.run(command)
    assert three.missing(shelf) == ()


def test_a_document_that_was_cut_off_is_missing_and_not_read(tmp_path: Path) -> None:
    shelf, three = Shelf(folder=tmp_path), Document(name="three", words=WRITES, complete=lambda found: len(found) == 1)
    (command,) = three.commands
    shelf.run(command)
    assert three.missing(shelf) == ()
    (tmp_path / "three.json").write_text("[]")
    assert three.missing(shelf) == (command,)
    with pytest.raises(Absent, match="three was cut off"):
        three.read(shelf)


def _trial(*losses: float, seed: int = 0) -> Trial:
    steps = range(10, 10 * len(losses) + 1, 10)
    return Trial(seed=seed, steps=steps, losses=losses, accuracies=[math.nan] * len(losses), bits=1.0)


def test_steps_to_a_target_lie_between_two_looks() -> None:
    assert _trial(4.0, 2.0, 1.0).steps_to(3.0) == 15
    assert _trial(4.0, 2.0).steps_to(1.0) == math.inf
    assert steps_to([_trial(4.0, 2.0), _trial(4.0, 3.0)], [2.0, 3.0]) == 20


def _accurate(*accuracies: float) -> list[Trial]:
    return [replace(_trial(1.0, seed=seed), accuracies=[found]) for seed, found in enumerate(accuracies)]


def test_what_lost_no_accuracy_has_none_to_bring_back() -> None:
    (paper,) = (each for each in PAPERS if each.name == "fft")
    dense = _accurate(0.5, 0.51, 0.52)
    lost = {"dense": dense, "theta 0.9": _accurate(0.4, 0.41, 0.42), "recovery": dense}
    free = {"dense": dense, "theta 0.9": dense, "recovery": _accurate(0.3, 0.31, 0.32)}
    assert paper.judges["F16"].decide(lost, free, free, free).verdict == HOLDS
    assert paper.judges["F16"].decide(lost | {"recovery": lost["theta 0.9"]}, free, free, free).verdict == FAILS
    assert paper.judges["F16"].decide(free, free, free, free).verdict == UNDECIDED


def test_an_interval_is_students() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert over([_trial(1.1), _trial(1.1)], [_trial(1.0), _trial(1.0)]).mean == pytest.approx(10)
    for diverged in (math.inf, math.nan):
        above, torn = interval([1.0, diverged]), interval([-1.0, diverged])
        assert (worse(above, 2.0), no_worse(above)) == (HOLDS, FAILS)
        assert (worse(torn, 2.0), no_worse(torn)) == (UNDECIDED, UNDECIDED)
        assert str(torn) == "diverged on a seed"


def test_verdicts_follow_from_whole_intervals() -> None:
    assert no_worse(Interval(mean=-5, half=6)) == HOLDS
    assert no_worse(Interval(mean=1, half=3)) == UNDECIDED
    assert no_worse(Interval(mean=6, half=3)) == FAILS
    assert worse(Interval(mean=6, half=3), 2.0) == HOLDS
    assert worse(Interval(mean=0, half=1), 2.0) == FAILS
    assert worse(Interval(mean=0, half=1), 0.5) == UNDECIDED
    assert worse(Interval(mean=2, half=3), 2.0) == UNDECIDED
    assert sooner((1.0, 2.0), (2.5, 3.0)) == HOLDS
    assert sooner((2.5, 3.0), (1.0, 2.0)) == FAILS
    assert sooner((1.0, 2.6), (2.5, 3.0)) == UNDECIDED
    assert sooner((1.0, 2.6), (2.5, 3.0), 1.1) == HOLDS
    assert every({"a": HOLDS, "b": FAILS, "c": UNDECIDED}) == (FAILS, ": b")
    assert by_setting({"a": HOLDS, "b": FAILS}) == (DEPENDS, ": holds on a; does not hold on b")
    assert by_setting({"a": HOLDS, "b": UNDECIDED})[0] == UNDECIDED
    places = {"P = 2 at 1gbit": HOLDS, "P = 4 at 1gbit": HOLDS, "P = 4 at 100 Mbit/s": FAILS}
    assert by_setting(places)[1] == ": holds on 1gbit (P = 2, 4); does not hold on 100 Mbit/s (P = 4)"


def test_seeds_that_agree_give_a_verdict_and_from_where_to_where_their_figures_go() -> None:
    rows = [
        {"verdict": HOLDS, "figure": f"{x} at 0.5, {y} % of 2^27", "how": "so"} for x, y in ((3, 7), (1, 7), (2, 7))
    ]
    found = together(rows)
    assert (found.verdict, found.measured, found.note) == (HOLDS, "2 (1 to 3) at 0.5, 7 % of 2^27", "")
    found = together([*rows, {**rows[0], "verdict": FAILS}])
    assert (found.verdict, found.note) == (UNDECIDED, ": seed by seed holds, holds, holds, does not hold")


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        (("1.1e+00, 2", "9.0e-01, 2", "1.3e+00, 2"), "1.1e+00 (9.0e-01 to 1.3e+00), 2"),
        (("-5%", "+5%", "12%"), "+5% (-5% to 12%)"),
        (("1,000", "200"), "1,000 (200 to 1,000)"),
        (("worst 3 (a)", "worst 2 (b)"), "seed by seed worst 3 (a) / worst 2 (b)"),
        (("yes", "yes"), "yes"),
        (
            ("0.5 (3.body.0.weight), 12.", "0.7 (3.body.0.weight), 14."),
            "0.7 (0.5 to 0.7) (3.body.0.weight), 14 (12 to 14).",
        ),
        (("0.5 (13.body.weight)", "0.7 (15.body.weight)"), "seed by seed 0.5 (13.body.weight) / 0.7 (15.body.weight)"),
    ],
)
def test_figures_of_several_seeds_become_one(figures: Sequence[str], said: str) -> None:
    assert spread_out(figures) == said


def test_a_claim_that_one_seed_could_not_judge_is_open(tmp_path: Path) -> None:
    documents = [Document(name=name, words="x", seeds=(seed,)) for seed, name in enumerate("ab")]
    row = {"id": "F8", "verdict": HOLDS, "figure": "", "how": ""}
    for each, rows in zip(documents, ([row], [{**row, "verdict": UNTESTABLE}]), strict=True):
        (tmp_path / f"{each.name}.json").write_text(json.dumps({"claims": rows}))
    both = Combined(documents=documents, combine=over_seeds)
    assert not both.read(Shelf(folder=tmp_path))
    assert replace(both, documents=documents[:1]).read(Shelf(folder=tmp_path))["F8"].verdict == HOLDS
    assert both.seeds == (0, 1)
    assert replace(both, enough=1).shrunk().seeds == (0,)


def _cell(link: str, choice: Mapping[str, str], plan: float) -> dict[str, Any]:
    measured = {"the plan": [plan, plan, 1.01 * plan], "sampled_topk:0.01": [1.0, 1.0, 1.0]}
    return {"link": link, "choice": choice, "measured": measured}


def test_leaving_tensors_out_is_judged_where_a_plan_does() -> None:
    some = {"a": "sampled_topk:0.01", "b": "sampled_topk:0.01"}
    cells = [_cell("1gbit", some, 0.8), _cell("100mbit", some, 1.0), _cell("none", {}, 1.0)]
    cells += [_cell("300mbit", {"a": "sampled_topk:0.01"}, 0.5), _cell("300mbit", {**some, "c": "fp16"}, 0.5)]
    found = list(steps.leaving_out({"cells": cells}))
    assert [(each.link, each.compressed, each.verdict) for each in found] == [
        ("1gbit", 2, HOLDS),
        ("100mbit", 2, UNDECIDED),
    ]
    assert found[0].gain == pytest.approx(1.25)


def test_the_target_is_what_both_dgc_and_hashed_slots_reach() -> None:
    ways = {"dgc": [_trial(2.0, 1.0), _trial(2.0, 1.0)], "hashed": [_trial(2.0, 1.5), _trial(2.0, math.nan)]}
    assert learning.steps(ways)["dgc"] == steps_to(ways["dgc"], [1.5, 1.0])
    assert math.isinf(learning.steps(ways)["hashed"])


def _exchange(name: str, world: int, behind: float, **more: float) -> dict[str, Any]:
    """Return a row of a document on exchanges; `more` are other seconds, by name."""
    times = {"seconds": behind, **more}
    quantiles = {key: dict.fromkeys(("p20", "p50", "p80"), each) for key, each in times.items()}
    return {"exchange": name, "world_size": world, "link": "10 Mbit/s", "predicted_seconds": 1.0, **quantiles}


def test_a_tree_is_judged_by_its_messages() -> None:
    few, slow, soon, many = (
        {"rows": [_exchange("tree", world, 3.0, message_seconds=each)]}
        for world, each in ((4, 1.1), (4, 2.0), (4, 0.5), (32, 1.5))
    )
    found = [timing.tree_costs(each, {"rows": []}).verdict for each in (few, slow, soon)]
    assert found == [HOLDS, FAILS, UNDECIDED]
    assert timing.tree_costs(few, many).verdict == DEPENDS


def test_8_workers_and_32_must_agree_on_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(few: str, tree: float, gather: float = 2.0, dense: float = 3.0) -> str:
        monkeypatch.setattr(timing, "_as_the_model", lambda _: few)
        times = {"tree": tree, "all-gather": gather, "dense": dense}
        rows = [_exchange(name, world, each) for name, each in times.items() for world in (16, 32)]
        return timing.scales(text, {"rows": rows}).verdict

    text = benches.TEXT_STEPS.read(Shelf())
    assert [judged(HOLDS, tree) for tree in (1.0, 2.0, 2.5, 4.0)] == [HOLDS, UNDECIDED, DEPENDS, DEPENDS]
    assert judged(FAILS, 2.5, gather=3.0, dense=2.0) == FAILS, "dense is a rival, too"
    assert judged(FAILS, 1.0) == DEPENDS
    assert judged(UNDECIDED, 1.0) == UNDECIDED
    monkeypatch.setattr(timing, "_as_the_model", lambda _: UNDECIDED)
    assert timing.scales(text, {"rows": []}).verdict == UNDECIDED


def test_a_lead_on_links_too_fast_for_ours_is_computed_from_coding_and_bytes() -> None:
    coding = {"mask": {"encode": 2.0, "decode one by one": 7.0}, "hashed": {"encode": 1.0, "decode": 1.0}}
    rows = [
        {"route": route, "world": 5, "density": 0.001, "bytes": 4, "sent": 25e9 / 8 / 4, **times}
        for route, times in coding.items()
    ]
    assert single._computed_lead({"routes": rows}, 5) == (2 + 7 + 1) / (1 + 1 + 1), "four payloads arrive in a second"


def test_a_document_is_made_once_judged_and_noted(tmp_path: Path) -> None:
    paper, shelf = Paper(name="gtopk"), Shelf(folder=tmp_path)
    three = Document(name="three", words=WRITES)

    @paper.judge("G1", three)
    def decide(found: list[int]) -> Outcome:
        return Outcome(verdict=HOLDS, measured=str(found[0]), how="by hand")

    deciding = Deciding.of([paper], ["gtopk"])
    assert deciding.rows(shelf) == {}
    (command,) = deciding.commands(shelf)
    shelf.run(command)
    assert deciding.commands(shelf) == []
    assert deciding.rows(shelf)["G1"].measured == "3"
    assert set(shelf.made()[command]) == {"date", "seconds", "thinwire", "code", "torch", "processor"}


def test_a_command_that_needs_data_says_so_and_one_that_fails_leaves_nothing(tmp_path: Path) -> None:
    shelf = Shelf(folder=tmp_path)
    assert "needs data" in str(shelf.try_to_run("python -m thinwire_lab.papers.gradients --data DATA"))
    assert "status 3" in str(shelf.try_to_run("python -c 'raise SystemExit(3)'"))
    assert shelf.made() == {}
    with pytest.raises(subprocess.CalledProcessError):
        shelf.run("python -c 'raise SystemExit(3)'")


@pytest.mark.slow
def test_programs_need_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert Shelf(folder=tmp_path).try_to_run("thinwire bench --list") is None


def test_steps_are_judged_and_told_place_by_place(tmp_path: Path) -> None:
    def steps(seconds: float) -> Steps:
        times = {"p20": seconds, "p50": seconds, "p80": seconds}
        return Steps(environment={}, rows={"dense": _row(times), "topk 0.01": _row(dict.fromkeys(times, 1.0))})

    found = {Place(*place): steps(factor) for place, factor in (((2, "1gbit"), 2.0), ((4, "1gbit"), 0.5))}
    assert gains(found, "topk 0.01") == "1gbit (P = 2, 4) 2.00, 0.50"
    assert faster(found, "topk 0.01") == "1gbit 0.50\N{EN DASH}2.00"
    assert span((0.1, 0.3), ".0%") == "10\N{EN DASH}30%"
    assert [span(each, ".0%") for each in ((0.1, 0.1), (-0.1, 0.3))] == ["10%", "-10% to 30%"]
    rule = at_every(found, lambda each: each.ahead("topk 0.01"))
    assert rule == {"P = 2 at 1gbit": HOLDS, "P = 4 at 1gbit": FAILS}
    assert at_every(found, lambda each: each.ahead("topk 0.01"), links=("100mbit",)) == {}
    assert by_workers(found) == {}, "there is one link alone"
    assert found[Place(2, "1gbit")].gain("topk 0.01") == (2.0, 2.0)
    assert larger((2.0, 3.0), (1.0, 1.5)) == HOLDS
    assert larger((1.0, 2.0), (1.5, 3.0)) == UNDECIDED
    assert list(at_every(found, lambda each: each.ahead("topk 0.01"), workers=(4,))) == ["P = 4 at 1gbit"]
    benches = Benches.of("transformer", "topk", at_four="dgc")
    assert len(benches.missing(Shelf(folder=tmp_path))) == len(benches.commands) == 6
    assert "dense,topk,dgc" in benches[4, "1gbit"].commands[0]
    assert "dense,topk " in benches[2, "1gbit"].commands[0]
    assert [place.workers for place in benches.shrunk().places] == [4, 4]


def _row(times: Mapping[str, float]) -> Row:
    """Return a recipe's row of a real document with other times."""
    document = json.loads((RUNS / "bench-xml-4-1gbit.json").read_text())
    return Row.from_json(document["rows"][0] | {"step_seconds": times})


def test_a_row_whose_run_is_gone_or_damaged_is_named(tmp_path: Path) -> None:
    for document in RUNS.iterdir():
        if document.name not in ("sweep.json", "server.jsonl"):
            (tmp_path / document.name).write_bytes(document.read_bytes())
    (tmp_path / "layers.json").write_text("{")
    said = " ".join(Deciding.of(PAPERS, []).unfounded(ledger.read(), Shelf(folder=tmp_path)))
    for problem in ("sweep.json has not been run", "server.jsonl has 0 of", "layers.json is not JSON"):
        assert problem in said


def test_a_verdict_without_a_judge_is_named() -> None:
    rows = ledger.read()
    deciding = replace(Deciding.of(PAPERS, ["G1"]), judges={})
    assert list(deciding.unfounded(rows, Shelf())) == [f"G1: no judge says that it is {rows['G1'].verdict!r}"]
    rows["G2"] = replace(rows["G2"], measured="nothing of the kind")
    assert list(Deciding.of(PAPERS, ["G2"]).unfounded(rows, Shelf())) == ["G2: its runs say otherwise: measured"]


def test_claims_are_asked_for_by_name_or_paper() -> None:
    assert [*Deciding.of(PAPERS, ["D11"]).names] == ["D11"]
    assert len(Deciding.of(PAPERS, ["s2"]).names) == 16
    done = CliRunner().invoke(program.app, ["list", "G1", "--open"])
    assert done.exit_code == 0, done.output
    assert CliRunner().invoke(program.app, ["list", "g1", "S2"]).exit_code == 0
    assert CliRunner().invoke(program.app, ["list", "Q1"]).exit_code == 1
    assert CliRunner().invoke(program.app, ["run", "G1", "--data", "/no/such"]).exit_code == 2


def test_the_ledger_is_what_the_tables_and_runs_say_by_command() -> None:
    done = CliRunner().invoke(program.app, ["check"])
    assert done.exit_code == 0, done.output


@pytest.mark.slow
@pytest.mark.timeout(900)  # minutes where there is a core for all
@pytest.mark.parametrize(
    "claim",
    [
        pytest.param("S10", id="trainings"),
        pytest.param("G8", id="collectives over links"),
        pytest.param("F2", id="layers"),
        pytest.param("D19", id="steps over links"),
        pytest.param("T11", id="a server"),
        pytest.param("S14", id="exchanges"),
        pytest.param("D12", id="routes"),
        pytest.param("T14", id="pipelines"),
        pytest.param("T13", id="boundaries"),
        pytest.param("T16", id="activations"),
        pytest.param("D16", id="a plan"),
        pytest.param("T12", id="a hybrid of servers"),
        pytest.param("D6", id="gradients", marks=pytest.mark.skipif(DATA is None, reason=NO_DATA)),
    ],
)
def test_a_smoke_of_each_kind_of_run_is_judged_and_keeps_no_verdict(claim: str) -> None:
    before = ledger.LEDGER.read_bytes()
    done = CliRunner().invoke(program.app, ["run", claim, "--quick", *(["--data", DATA] if DATA else [])])
    assert done.exit_code == 0, done.output
    assert "1 of 1 claims could be judged" in done.output
    assert ledger.LEDGER.read_bytes() == before


def test_a_ledger_that_is_none_is_refused_and_a_new_one_begins_with_ours(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    for text in ("{", "[]", "{}", '{"rows": [{"id": "G1"}]}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a ledger"):
            ledger.read(path)
    row = json.loads(ledger.LEDGER.read_text())["rows"][0]
    for changed in ({"id": "G99"}, {"verdict": "maybe"}):
        path.write_text(json.dumps({"rows": [row | changed]}))
        with pytest.raises(ValueError, match="expected claims of the catalogue"):
            ledger.read(path)
    new = tmp_path / "new.json"
    program._renew(Deciding.of(PAPERS, ["G9"]), Shelf(), new)
    assert ledger.read(new) == ledger.read()


def test_a_row_says_rates_in_words_and_commands_as_they_are_typed() -> None:
    outcome = Outcome(verdict=HOLDS, measured="100mbit 1.5, 10gbit 2", note=": on 1gbit", how="a link of 1 Gbit/s")
    row = ledger.judged(catalogue()["G1"], outcome, (), ["thinwire bench --link 100mbit"])
    assert (row.measured, row.note) == ("100 Mbit/s 1.5, 10 Gbit/s 2", ": on 1 Gbit/s")
    assert (row.how, row.command) == ("a link of 1 Gbit/s", ("thinwire bench --link 100mbit",))


def test_what_other_sources_of_this_version_wrote_is_run_anew_if_asked(tmp_path: Path) -> None:
    way, *_ = WAYS.values()
    lines = [json.loads(_line(way, seed, 1.0)) | {"thinwire": TODAY, "code": "other"} for seed in (0, 1)]
    (tmp_path / FILE).write_text("\n".join(map(json.dumps, lines)))
    only = TRIALS.only("dense")
    assert only.missing(Shelf(folder=tmp_path)) == ()
    assert only.missing(Shelf(folder=tmp_path, anew=True)) == only.commands
    (tmp_path / FILE).write_text("\n".join(json.dumps(line | {"code": code()}) for line in lines))
    assert only.missing(Shelf(folder=tmp_path, anew=True)) == ()


def test_programs_that_go_on_where_a_file_ends_begin_anew(tmp_path: Path) -> None:
    says = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(' '.join(sys.argv[2:]))"
    shelf = Shelf(folder=tmp_path, anew=True)
    shelf.run(f'python -c "{says}" papers/runs/said --resume thinwire_lab.studies.convergence')
    assert (tmp_path / "said").read_text() == "thinwire_lab.studies.convergence --anew"


def test_notes_that_are_gone_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "RUNS", FOLDER / "elsewhere")
    done = CliRunner().invoke(program.app, ["check"])
    assert done.exit_code == 1
    assert "papers/elsewhere/made.json is not there" in done.output


def test_a_short_run_is_judged() -> None:
    trial = _trial(2.0, 1.0)  # no look is within a fifth of it
    assert learning._loss_at_a_fifth(trial) == 2.0
    cell = {"model": "mlp", "link": "none", "choice": {}, "measured": {"the plan": [1.0, 1.0], "dense": [1.0, 1.0]}}
    assert steps.choosing_never_hurts({"cells": [cell]}).verdict == HOLDS
