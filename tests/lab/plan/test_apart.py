"""What the planner says of workers that train on their own."""

import math

import pytest
import torch
from plans import cost, linear, profile

from thinwire import outer_steps
from thinwire.exchanges import Link
from thinwire.outer_steps import OuterSteps
from thinwire.planner import Budget, decide
from thinwire.reducer import Compressed, MinimumSize
from thinwire_lab.apart import OUTER_LOSSES, SCHEMES, STEPS, MeasuredApart, more_steps, of_ratio, ways

LINK = Link(latency=0.05, bandwidth=1e6)
ONE = profile({0.1: [("0", 1_000_000)]}, link=LINK, costs={}, world_size=4, rest=0.02)


def _large(steps: OuterSteps) -> Compressed:
    recipe = steps.recipe
    large = recipe.large if isinstance(recipe, MinimumSize) else recipe
    assert isinstance(large, Compressed)
    return large


@pytest.mark.parametrize("name", ["streaming_diloco", "sparseloco"])
def test_schemes_are_the_presets(name: str) -> None:
    steps, scheme = getattr(outer_steps, name)(), SCHEMES[name]
    reducer = _large(steps)
    payload = reducer.codec.encode(torch.randn(1024, 1024))
    assert 8 * payload.nbytes / 2**20 == pytest.approx(scheme.bits, rel=0.05)
    assert type(reducer.exchange) is type(scheme.exchange)
    assert (scheme.fragments, scheme.delay) == (steps.parts, steps.delay)


def test_a_step_waits_for_its_share_of_an_exchange() -> None:
    ring = 6 * (0.05 + 1e6 / 1e6)  # 2 (K − 1) messages of a quarter of 4 MB
    assert SCHEMES["diloco"].seconds(ONE, 10) == pytest.approx(0.12 + ring / 10)
    fragment = 3 * (0.05 + SCHEMES["streaming_diloco"].bits / 8 * 250_000 / 1e6)
    assert SCHEMES["streaming_diloco"].seconds(ONE, 100) == pytest.approx(0.12 + 4 * max(0.0, fragment - 0.6) / 100)
    assert SCHEMES["streaming_diloco"].seconds(ONE, 1) == pytest.approx(max(0.12 + 4 * fragment, 4 * fragment))


def test_overlap_hides_no_more_than_the_link_can_carry() -> None:
    late = profile({1e-3: [("0", 1_000_000)]}, link=Link(latency=0.0, bandwidth=1e6), costs={}, world_size=2)
    for every in (1, 2, 5, 10, 100):
        scheme = SCHEMES["streaming_diloco"]
        assert scheme.seconds(late, every) >= scheme.bits / 8 * 1e6 / 1e6 / every


def test_a_higher_loss_takes_more_steps() -> None:
    found = [of_ratio(1 + share / 100) for share in range(40)]
    assert found == sorted(found)
    assert (of_ratio(0.9), of_ratio(1.0), of_ratio(9.0)) == (1.0, 1.0, math.inf)
    assert of_ratio(1.7672 / 1.6684) == pytest.approx(1.5)  # uncompressed training was there after 200 of 300 steps


def test_between_two_measured_h_is_what_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (MeasuredApart("diloco", 10, 1.02, 1.0), MeasuredApart("diloco", 40, 1.08, 1.0))
    monkeypatch.setattr("thinwire_lab.apart.OUTER_LOSSES", rows)
    middle = more_steps("diloco", 20)
    assert middle == pytest.approx(of_ratio(math.sqrt(1.02 * 1.08)))
    assert (more_steps("diloco", 10), more_steps("diloco", 40)) == (of_ratio(1.02), of_ratio(1.08))
    assert more_steps("diloco", 5) is more_steps("diloco", 80) is more_steps("sparseloco", 20) is None


def test_what_was_measured_is_of_schemes() -> None:
    assert {row.method for row in OUTER_LOSSES} <= set(SCHEMES)


def test_the_first_at_the_loss_comes_first() -> None:
    costs = {"topk:0.01": cost(nbytes=linear(0.08, 64))}
    slow = profile({0.1: [("0", 1_000_000)]}, link=LINK, costs=costs, world_size=4)
    plan = decide(slow, Budget(names=("topk",), densities=(0.01,)))
    found = ways(plan, (10, 30), {("diloco", 30): 1.5, ("sparseloco", 30): 1.2, ("sparseloco", 10): 9.0})
    known = [way for way in found if way.more is not None]
    assert [way.until for way in found] == sorted(way.until for way in found)
    assert [way.name for way in known] == [
        way.name for way in sorted(known, key=lambda way: STEPS * way.seconds * (way.more or 0))
    ]
    assert found[0].name == "sparseloco, H 30"
    assert {way.name: way.more for way in found}["diloco, H 30"] == 1.5
    assert {way.name: way.more for way in found}["as planned, each step"] is None
    assert len(found) == 2 + len(SCHEMES) * 2
