"""What gTop-k and DRAGONN predict from their own figures, beside what the planner makes of them."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.exchanges import AllGather, AllReduce, Link
from thinwire_lab.papers.dct import simulate as dct_simulate
from thinwire_lab.papers.dragonn import model as dragonn
from thinwire_lab.papers.dragonn import simulate as dragonn_simulate
from thinwire_lab.papers.fft import simulate as fft_simulate
from thinwire_lab.papers.gtopk import model as gtopk
from thinwire_lab.papers.gtopk import simulate as gtopk_simulate
from thinwire_lab.papers.s2 import simulate as s2_simulate
from thinwire_lab.papers.shared.implied import gain, share
from thinwire_lab.simulate.published import LINK, XML

APPS = {
    "gtopk": gtopk_simulate.app,
    "dragonn": dragonn_simulate.app,
    "fft": fft_simulate.app,
    "s2": s2_simulate.app,
    "dct": dct_simulate.app,
}


def test_table_1_of_gtopk() -> None:
    for row in gtopk.times():
        assert row.gather_formula == pytest.approx(row.gather_theirs, abs=0.005)
        assert row.tree_ours == pytest.approx(row.tree_theirs, abs=0.005)
        levels = math.log2(row.workers)
        assert row.gather_ours - row.gather_formula == pytest.approx(0.436 * (row.workers - 1 - levels))
    theirs, ring_of = gtopk.crossings()
    assert theirs == pytest.approx(7.5, abs=0.05)
    assert ring_of - 1 == pytest.approx(2 * math.log2(ring_of))  # one message is as long as another


def test_the_order_of_gtopks_methods_is_theirs() -> None:
    for system in gtopk.SYSTEMS:
        (found,) = system.predicted()
        seconds = [found.seconds[name] for name in gtopk.NAMES]
        assert seconds == sorted(seconds, reverse=True), system.name
        assert system.seconds == sorted(system.seconds, reverse=True)
        assert seconds[2] == pytest.approx(system.seconds[2]), "from which the rest was taken"
        assert max(system.implied) < gtopk.LINK.bandwidth


def test_implied_bandwidths_reproduce_what_was_published() -> None:
    for system in gtopk.SYSTEMS:
        dense, gather = (Link(latency=gtopk.ALPHA, bandwidth=bandwidth) for bandwidth in system.implied)
        assert system.rest + AllReduce().seconds(4 * system.numel, 32, dense) == pytest.approx(system.seconds[0])
        assert system.rest + AllGather().seconds(0.008 * system.numel, 32, gather) == pytest.approx(system.seconds[1])


def test_dragonn_at_16_gpus() -> None:
    (at,) = dragonn.speeds((16,))
    nbytes = 4 * 4096 * 30938
    assert at.full == pytest.approx(0.025 + 30 / 16 * nbytes / 3.125e9)
    assert at.dragonn == pytest.approx(0.025 + 0.0132 * nbytes / 2**29 + 15 * 0.002 * nbytes / 3.125e9)
    assert at.full > at.dgc > at.dragonn
    assert at.bound == pytest.approx(13.2, abs=0.05)
    assert dragonn.SPEEDUPS["dragonn"] > at.bound > at.full / at.dragonn > at.full / at.dgc


def test_the_gain_of_an_all_gather_ends_at_1000_gpus() -> None:
    assert dragonn.last_gather() == pytest.approx(1000)
    n = 4.0 * XML
    dense, gather = (e.seconds(s, 1000, LINK) for e, s in ((AllReduce(), n), (AllGather(), 0.002 * n)))
    assert dense == pytest.approx(gather)


def test_what_dragonns_figures_imply() -> None:
    known = dragonn.implied()
    # 15 (2/16 − 0.002) 2²¹ / 3.125e9
    assert known.compression == pytest.approx(15 * 0.123 * 2**21 / 3.125e9)
    assert known.compression - known.overhead == pytest.approx(0.0354 / 256)
    assert known.dense_bandwidth < LINK.bandwidth / 2
    assert known.dgc_decode > 0


def test_a_share_and_a_gain_are_each_others_inverse() -> None:
    # half a step is communication, of which a quarter is left: 1 / (0.5 + 0.125)
    assert gain(0.5, 0.25) == pytest.approx(1.6)
    assert share(1.6, 0.25) == pytest.approx(0.5)
    assert share(5.0, 0.5) > 1


def test_one_share_of_a_dense_step_predicts_all_of_table_2() -> None:
    for line in fft_simulate.lines():
        computing, sent = 1 - line.implied, line.implied / fft_simulate.RATIOS[line.method]
        assert 1 / (computing + sent) == pytest.approx(line.published)
        assert line.predicted >= line.published * (1 - 1e-9)
    gather, ring = fft_simulate.exchanges("AlexNet")
    assert gather == pytest.approx(7 * 250e6 * 8 / 56e9)
    assert gather / ring == pytest.approx(4)


def test_the_computing_that_s2s_gains_want_reproduces_them() -> None:
    for model in s2_simulate.MODELS:
        for method, published in model.gains.items():
            computing = model.computing(method)
            assert (computing + model.longer(method)) / (computing + 1) == pytest.approx(published)
    resnet, _ = s2_simulate.MODELS
    assert resnet.sketch == pytest.approx(30 / 16 * 94.8e6 * (1 / 64 + 1 / 1024) / 125e6)


def test_what_dcts_savings_imply_is_within_a_step() -> None:
    assert all(line.saved < line.implied < 1 for line in dct_simulate.lines())


@pytest.mark.parametrize("paper", APPS)
def test_a_paper_is_printed_drawn_and_written(tmp_path: Path, paper: str) -> None:
    out, plot = tmp_path / "o.json", tmp_path / "o.png"
    done = CliRunner().invoke(APPS[paper], ["--json", str(out), "--plot", str(plot)])
    assert done.exit_code == 0
    words = {
        "gtopk": ("231.65", "7.5", "403"),
        "dragonn": ("22.4", "13.2"),
        "fft": ("2.26", "1.99", "250 ms"),
        "s2": ("4.05", "4.15", "367 ms"),
        "dct": ("37.1%", "16%"),
    }[paper]
    assert all(word in done.stdout for word in words)
    assert json.loads(out.read_text())["paper"] == paper
    assert plot.exists()


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_printed() -> None:
    done = CliRunner().invoke(APPS["gtopk"], ["--plot", "/"])
    assert done.exit_code == 2
    assert "cannot write /" in done.stderr
    assert not done.stdout
