"""`thinwire simulate` as a user meets it."""

import json
from pathlib import Path

import numpy as np
import pytest
from plans import profile
from typer.testing import CliRunner

from thinwire.exchanges import Link
from thinwire_lab.cli import app
from thinwire_lab.inputs import BadInput
from thinwire_lab.simulate import command, options
from thinwire_lab.simulate.options import worlds
from thinwire_lab.simulate.scaling import PLANNED

LINK = Link(latency=0.0, bandwidth=1e12)
REGIONS = "region_a,region_b,delay_ms,bandwidth_gbps\nA,B,10,0.8\nA,C,20,1.6\nB,C,30,0.4\n"


def test_workers_as_users_write_them() -> None:
    assert worlds("8..64") == (8, 16, 32, 64)
    assert worlds("3..20") == (3, 6, 12, 20)
    assert worlds("4..4") == (4,)
    assert worlds("8,2,2") == (2, 8)
    for text in ("", "a", "8..", "0..4", "8..4", "-1", "1..99999999", "2,,4", "1.5"):
        with pytest.raises(BadInput, match="--workers"):
            worlds(text)


def _simulate(*args: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["simulate", *args])
    return done.exit_code, done.stdout, done.stderr


def test_simulate_needs_no_options() -> None:
    code, said, wrong = _simulate()
    assert code == 0, wrong
    assert all(name in said for name in ("dense", "sampled_topk", "sampled_doubling", "sampled_gtopk"))


@pytest.mark.parametrize("topology", [[], ["--topology", "8x100gbit/10us,25gbit/50us"], ["--link", "1gbit/1ms"]])
def test_simulate_prints_and_writes(tmp_path: Path, topology: list[str]) -> None:
    out, plot = tmp_path / "o.json", tmp_path / "o.png"
    args = ["--workers", "1..64", "--json", str(out), "--plot", str(plot), "--html", str(tmp_path / "o.html")]
    code, said, _ = _simulate(*args, "--recipes", "dense,sampled_topk:0.001,sampled_gtopk:0.01", *topology)
    assert code == 0
    assert "the paper of DRAGONN" in said
    assert "*" in said
    assert "predicted, not measured" in said
    document = json.loads(out.read_text())
    assert document["schema"] == "thinwire.simulate/1"
    assert [row["world_size"] for row in document["rows"]] == [1, 2, 4, 8, 16, 32, 64]
    assert set(document["rows"][0]["seconds"]) == {"dense", "sampled_topk:0.001", "sampled_gtopk:0.01", PLANNED}
    assert document["rows"][0]["efficiency"]["dense"] == 1
    assert plot.read_bytes().startswith(b"\x89PNG")
    report = (tmp_path / "o.html").read_text()
    assert report.count("text-decoration-color: #008000") == 14
    assert "data:image/svg+xml" in report


def test_simulate_takes_a_profile_and_regions(tmp_path: Path) -> None:
    saved, regions, out = tmp_path / "p.json", tmp_path / "r.csv", tmp_path / "o.json"
    profile({0.018: [("0", 1_000_000), ("1", 100)]}, link=LINK, costs={}, world_size=2, rest=0.002).save(saved)
    regions.write_text(REGIONS + ",,,\n", encoding="utf-8-sig")  # as spreadsheets write it
    code, said, _ = _simulate(
        "--profile", str(saved), "--topology", str(regions), "--workers", "3", "--json", str(out)
    )  # fmt: skip
    assert code == 0
    assert "p.json: 1 M parameters in 2 tensors" in said.replace("\n", " ")
    assert "A, B, C" in said.replace("\n", " ")
    seconds = json.loads(out.read_text())["rows"][0]["seconds"]
    # the ring's slowest edge, BC: 30 ms and 5e7 bytes per second
    assert seconds["dense"] == pytest.approx(0.020 + 4 * (0.03 + 4_000_400 / 3 / 5e7))


def test_simulate_counts_days_with_and_without_outer_steps(tmp_path: Path) -> None:
    saved, out = tmp_path / "p.json", tmp_path / "o.json"
    profile({0.018: [("0", 1_000_000)]}, link=LINK, costs={}, world_size=2, rest=0.002).save(saved)
    code, said, _ = _simulate(
        "--profile", str(saved), "--link", "10mbit/50ms", "--workers", "8", "--outer", "10,100", "--tokens", "1e9",
        "--batch", "1000", "--json", str(out),
    )  # fmt: skip
    assert code == 0
    assert "days to 1e+09 tokens, 1,000 a worker and step" in said
    (row,) = json.loads(out.read_text())["rows"]
    ring = 14 * (0.05 + 4e6 / 8 / 1.25e6)
    assert row["seconds"]["dense"] == pytest.approx(0.020 + ring)
    assert row["seconds"]["diloco:H 100"] == pytest.approx(0.020 + ring / 100)
    assert row["days"] == {name: pytest.approx(125_000 * each / 86400) for name, each in row["seconds"].items()}
    assert row["best"] == "sparseloco:H 100"
    few = ["--profile", str(saved), "--link", "10mbit/50ms", "--workers", "8", "--tokens", "1e5", "--batch", "1000"]
    assert "8 0.00091*" in _simulate(*few)[1]


def test_goodput_with_faults(tmp_path: Path) -> None:
    saved, out = tmp_path / "p.json", tmp_path / "o.json"
    profile({0.018: [("0", 1_000_000)]}, link=LINK, costs={}, world_size=2, rest=0.002).save(saved)
    code, said, _ = _simulate(
        "--profile", str(saved), "--workers", "8,512", "--outer", "100", "--faults", "1d/5min", "--json", str(out)
    )
    assert code == 0
    assert "goodput" in said
    for row in json.loads(out.read_text())["rows"]:
        for name, share in _played(row["world_size"]).items():
            assert row["goodput"][name] == pytest.approx(row["efficiency"][name] * share, 0.02)


def test_the_best_goodput_has_the_star(tmp_path: Path) -> None:
    saved = tmp_path / "p.json"  # all is hidden, so outer steps are no faster, but lose less
    profile({0.010: [("0", 1_000)]}, link=LINK, costs={}, world_size=2, rest=0.010).save(saved)
    _, said, _ = _simulate(
        "--profile", str(saved), "--workers", "512", "--outer", "100", "--faults", "1d/5min", "--recipes", "dense"
    )
    (figures,) = (line.split() for line in said.partition("goodput, %")[2].splitlines() if line.startswith("    512"))
    assert [figure.endswith("*") for figure in figures[:2]] == [False, False], "neither the workers nor dense"
    assert sum(figure.endswith("*") for figure in figures) == 1


def _played(workers: int, between: float = 86400.0, gone: float = 300.0, faults: int = 20_000) -> dict[str, float]:
    """Play faults one by one: in a group that stands still for each, and in one that waits for 4 s and goes on."""
    dice = np.random.default_rng(0)
    until = dice.exponential(between / workers, faults)  # the next of any worker
    alone = dice.exponential(between, faults)  # the next of one, as often
    noticed = until.sum() / (until.sum() + 4.0 * faults)
    return {
        "dense": until.sum() / (until.sum() + gone * faults),
        "diloco:H 100": noticed * alone.sum() / (alone.sum() + (gone + 1.0) * faults),  # half of 2 s of steps is lost
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--workers", "0"], "--workers '0'"),
        (["--workers", "many"], "such as 8..4096"),
        (["--link", "fast"], "'fast'"),
        (["--link", "0gbit"], "'0gbit'"),
        (["--topology", "8x"], "'8x'"),
        (["--topology", "8x100gbit/10us"], "joins its groups"),
        (["--topology", "8x100gbit,10gbit", "--link", "1gbit"], "exclude each other"),
        (["--topology", "/nonexistent.csv"], "cannot read /nonexistent.csv"),
        (["--profile", "/nonexistent.json"], "cannot read /nonexistent.json"),
        (["--profile", __file__], "expected what a Profile's save() wrote"),
        (["--recipes", "fp16"], "no costs of 'fp16'"),
        (["--recipes", "nope"], "'nope'"),
        (["--recipes", ","], "names nothing"),
        (["--outer", "0"], "numbers of 1 or more"),
        (["--outer", "9" * 400], "up to 1,000,000,000"),
        (["--tokens", "-1"], "--tokens is -1.0"),
        (["--batch", "0"], "--batch 0"),
        (["--tokens", "1", "--batch", "9" * 400], "the latter below 2^63"),
        (["--batch", "64"], "give --tokens as well"),
        (["--faults", "often"], "such as 24h/5min"),
        (["--faults", "0h/5min"], "--faults '0h/5min'"),
        (["--faults", "1h/" + "9" * 400 + "h"], "such as 24h/5min"),
        (["--json", "/nonexistent/out.json"], "cannot write /nonexistent/out.json"),
        (["--plot", "out.txt"], "expected .png"),
        (["--plot", "out.pgf"], "expected .png"),
        (["--profile", __file__, "--json", __file__], "which is read; expected another name"),
        (["--topology", __file__, "--html", __file__], "which is read; expected another name"),
        (["--html", "/"], "cannot write /"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(args: list[str], message: str) -> None:
    code, said, complaint = _simulate(*args)
    assert code == 2
    assert message in complaint
    assert complaint.startswith("thinwire simulate: ")
    assert len(complaint.strip().splitlines()) == 1
    assert not said


def test_files_are_written_though_nobody_reads_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object, **__: object) -> None:
        raise SystemExit(1)  # as rich does where a pipe such as `| head` has closed

    monkeypatch.setattr(command, "_print", closed)
    code, _, _ = _simulate("--workers", "8", "--json", str(tmp_path / "out.json"))
    assert code == 1
    assert json.loads((tmp_path / "out.json").read_text())["rows"]


def test_the_legend_has_room_beside_the_figure() -> None:
    asked = options.read(workers="8,16", link=None, topology=None, profile=None, recipes=None, outer="30")
    figure = command.scales_figure(asked.scales(), asked.title)
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 10
    assert legend.get_window_extent().width <= figure.bbox.width


@pytest.mark.parametrize("recipes", ["dense,sampled_topk:0.001", "sampled_topk:0.001,sampled_gtopk:0.001"])
def test_the_axis_of_times_has_numbers_however_alike_they_are(recipes: str) -> None:
    asked = options.read(workers="8,16", link=None, topology=None, profile=None, recipes=recipes)
    figure = command.scales_figure(asked.scales(), asked.title)
    figure.canvas.draw()
    low, high = figure.axes[0].get_ylim()
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels() if low <= label.get_position()[1] <= high]
    assert len(list(filter(None, shown))) >= 2
