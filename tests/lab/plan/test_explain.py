"""`thinwire plan --explain`: what each way to train sends over a network."""

from dataclasses import replace

import pytest
from plans import cost, linear, profile

from thinwire.exchanges import Link
from thinwire.planner import Budget, decide
from thinwire_lab.inputs import BadInput
from thinwire_lab.plan.explain import Explained, sent

N, RANKS = 1_000_000, 4
SLOW = profile(
    {0.1: [("0", N)]},
    link=Link(latency=0.01, bandwidth=1e7),
    costs={"topk:0.01": cost(encode=linear(1e-9), decode=linear(1e-9), nbytes=linear(0.06))},
    world_size=RANKS,
)
BUDGET = Budget(names=("topk",), densities=(0.01,))


def test_what_each_way_sends_and_how_long_it_takes() -> None:
    ways = {way.name: way for way in sent(decide(SLOW, BUDGET))}
    assert ways["DDP in float32"].nbytes == pytest.approx(2 * 3 / 4 * 4 * N)
    assert ways["DDP in float32"].exchange == pytest.approx(6 * (0.01 + N / 1e7))
    assert ways["thinwire.attach as planned"].nbytes == pytest.approx(3 * 0.06 * N)
    assert ways["thinwire.attach as planned"].exchange == pytest.approx(3 * (0.01 + 0.06 * N / 1e7))
    native = ways["FSDP2 in bfloat16"]
    assert native.nbytes == pytest.approx(3 / 4 * 6 * N)
    assert native.exchange == pytest.approx(6 * 0.01 + native.nbytes / 1e7)
    ratios = [
        ways[f"the same, gathers={name}, qsgd"].nbytes / native.nbytes for name in ("Lossless()", "Differences()")
    ]
    assert ratios == pytest.approx([0.549, 0.173], abs=1e-3), "as measured: 0.52 to 0.6, and 0.174"


def test_frozen_parameters_are_gathered_and_not_reduced() -> None:
    lora = replace(SLOW, made={**SLOW.made, "frozen_elements": 99 * N})
    plain, frozen = (sent(decide(found, BUDGET)) for found in (SLOW, lora))
    gained = [after.nbytes / before.nbytes for before, after in zip(plain, frozen, strict=True)]
    assert gained[:3] == [1, 1, 1], "DDP sends gradients alone"
    assert gained[3] == pytest.approx((400 + 2) / 6), "FSDP2 gathers all"
    assert gained[5] == 1, "once, and never again"


def test_what_helps_most() -> None:
    said = Explained().conclusion(decide(SLOW, BUDGET))
    assert "DDP: with thinwire.attach as planned the exchange takes 48 ms instead of 660." in said
    fast = SLOW.on(Link(latency=0.0, bandwidth=1e12), world_size=RANKS)
    assert (
        Explained()
        .conclusion(decide(replace(fast, links={t: Link(latency=0.0, bandwidth=1e12) for t in fast.links}), BUDGET))
        .count("nothing here helps much")
        == 3
    )


def test_a_single_worker_sends_nothing() -> None:
    with pytest.raises(BadInput, match="2 workers or more"):
        sent(decide(SLOW.on(world_size=1), BUDGET))
