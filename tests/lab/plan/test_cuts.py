"""What crosses a pipeline's cuts: the rule by hand and its laws."""

import json
import math
import re
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import profile

from thinwire.exchanges import Link
from thinwire.planner import decide
from thinwire_lab.plan.cuts import BoundaryRow, Crossings, Cut, PipelinePlan, decide_boundaries

SLOW = Link(latency=0.001, bandwidth=1e6)
CUT = Cut(stage=0, dense_bytes=100_000, nbytes=4_000, codec=0.002, link=SLOW)

counts = st.integers(0, 10**9)
seconds = st.floats(0, 10)
links = st.builds(Link, latency=st.floats(0, 1), bandwidth=st.floats(1, 1e13))
cuts = st.builds(Cut, stage=st.integers(0, 5), dense_bytes=counts, nbytes=counts, codec=seconds, link=links)
crossings = st.builds(
    Crossings,
    density=st.floats(0, 1, exclude_min=True, exclude_max=True),
    micro_batches=st.integers(1, 64),
    cuts=st.lists(cuts, max_size=3).map(tuple),
)


def _row(cut: Cut, micro_batches: int = 4) -> BoundaryRow:
    (row,) = decide_boundaries(Crossings(density=0.05, micro_batches=micro_batches, cuts=(cut,)))
    return row


def _on(cut: Cut, bandwidth: float) -> Cut:
    return replace(cut, link=Link(latency=cut.link.latency, bandwidth=bandwidth))


def test_by_hand_where_it_pays() -> None:
    row = _row(CUT)
    assert row.choice == "top 5 % in bf16"
    # two ways of 96 ms less, but for 2 ms of computing, four times a step
    assert row.saves == pytest.approx(4 * (2 * 0.096 - 0.002))
    assert row.break_even == pytest.approx(2 * 96_000 / 0.002)
    took = "the round trip takes 10 ms instead of 202 ms; encoding and decoding take 2.00 ms"
    assert row.reason == f"{took}; pays below 768 Mbit/s here"


def test_by_hand_where_it_does_not() -> None:
    row = _row(_on(CUT, 1e9))
    assert (row.choice, row.saves) == ("as it is", 0.0)
    assert row.break_even == pytest.approx(96e6)
    took = "the round trip takes 2.20 ms; top 5 % in bf16 takes 2.01 ms, and 2.00 ms to compute"
    assert row.reason == f"{took}; pays below 768 Mbit/s here"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dense_bytes": 0, "nbytes": 0}, "nothing crosses here; never pays here, however slow the link"),
        ({"nbytes": 100_000}, "top 5 % in bf16 takes no fewer bytes; never pays here, however slow the link"),
        ({"nbytes": 200_000, "codec": 0.0}, "top 5 % in bf16 takes no fewer bytes; never pays here, however slow"),
    ],
)
def test_where_nothing_can_be_saved(changed: dict[str, Any], reason: str) -> None:
    row = _row(replace(CUT, **changed))
    assert not row.pays
    assert row.reason.startswith(reason)


def test_what_costs_nothing_pays_at_any_bandwidth() -> None:
    row = _row(replace(CUT, codec=0.0))
    assert row.pays
    assert row.reason.endswith("pays at any bandwidth")
    assert row.document()["break_even"] is None
    assert not _row(_on(replace(CUT, codec=0.0), math.inf)).pays


@given(cuts, st.floats(1, 1e6))
def test_a_faster_link_never_makes_sparsifying_pay_more(cut: Cut, times: float) -> None:
    slow, fast = _row(cut), _row(_on(cut, times * cut.link.bandwidth))
    assert fast.saves <= slow.saves * (1 + 1e-9)
    assert fast.pays <= slow.pays
    assert fast.break_even == slow.break_even


@given(cuts)
def test_it_pays_exactly_below_the_break_even(cut: Cut) -> None:
    row = _row(cut)
    assert row.saves >= 0
    assert row.pays == (row.saves > 0)
    if 2 <= row.break_even < 1e15:
        assert _row(_on(cut, 0.999 * row.break_even)).pays
        assert not _row(_on(cut, 1.001 * row.break_even)).pays
    else:
        assert row.pays == (row.break_even > cut.link.bandwidth)


@given(cuts, st.floats(0, 10))
def test_a_dearer_codec_never_pays_more_and_latency_changes_nothing(cut: Cut, more: float) -> None:
    row = _row(cut)
    assert _row(replace(cut, codec=cut.codec + more)).saves <= row.saves
    later = _row(replace(cut, link=Link(latency=cut.link.latency + more, bandwidth=cut.link.bandwidth)))
    assert (later.choice, later.saves) == (row.choice, row.saves)


@given(cuts, st.integers(1, 64))
def test_savings_are_in_proportion_to_micro_batches_and_the_choice_is_not(cut: Cut, micro_batches: int) -> None:
    one, many = _row(cut, 1), _row(cut, micro_batches)
    assert many.choice == one.choice
    assert many.saves == pytest.approx(micro_batches * one.saves)


@given(crossings)
def test_what_was_measured_survives_json(found: Crossings) -> None:
    again = Crossings.of(json.loads(json.dumps(asdict(found))))
    assert again == found
    assert decide_boundaries(again) == decide_boundaries(found)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"link": Link(latency=0.0, bandwidth=0.0)}, "the link behind stage 0 carries nothing"),
        ({"link": Link(latency=0.0, bandwidth=1e-300)}, "carries nothing"),
        ({"link": Link(latency=0.0, bandwidth=0.0), "dense_bytes": 0, "nbytes": 0}, "carries nothing"),
        ({"dense_bytes": -1}, "dense_bytes is -1; expected an integer"),
        ({"dense_bytes": 1 << 80}, "dense_bytes is 1208925819614629174706176"),
        ({"stage": -1}, "stage is -1"),
        ({"codec": math.nan}, "codec is nan; expected a finite number of seconds"),
        ({"codec": math.inf}, "codec is inf; expected a finite number of seconds"),
        ({"codec": -1.0}, "codec is -1.0; expected a finite number of seconds"),
    ],
)
def test_cuts_that_cannot_be(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(CUT, **changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"density": 0.0}, "density is 0.0; expected a share of activations"),
        ({"density": 1.0}, "density is 1.0"),
        ({"density": math.nan}, "density is nan"),
        ({"micro_batches": 0}, "micro_batches is 0; expected an integer of at least 1"),
    ],
)
def test_crossings_that_cannot_be(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Crossings(**{"density": 0.05, "micro_batches": 4, "cuts": (CUT,), **changed})


def test_what_is_no_whole_number_counts_nothing() -> None:
    not_whole: list[Any] = [1.5, True]
    for wrong in not_whole:
        with pytest.raises(TypeError, match=f"nbytes is {wrong}; expected an integer"):
            replace(CUT, nbytes=wrong)
    with pytest.raises(TypeError, match=r"micro_batches is 2\.5; expected an integer of at least 1"):
        Crossings(density=0.05, micro_batches=2.5, cuts=(CUT,))  # type: ignore[arg-type]  # that is the point


def test_a_plan_says_where_it_pays_and_holds_each_stages_plan() -> None:
    stage = decide(profile({0.01: [("a", 10)]}, link=SLOW, costs={}))
    found = Crossings(density=0.05, micro_batches=4, cuts=(CUT, replace(CUT, stage=1, codec=1.0)))
    plan = PipelinePlan(stages=[stage] * 3, crossings=found, boundaries=decide_boundaries(found))
    assert plan.verdict == "top 5 % in bf16 at 1 of 2 cuts saves up to 760.0 ms a step"
    document = json.loads(json.dumps(plan.document()))
    assert document["schema"] == "thinwire.pipeline-plan/1"
    assert document["pays"]
    assert [row["choice"] for row in document["boundaries"]] == ["top 5 % in bf16", "as it is"]
    assert [own["schema"] for own in document["stages"]] == ["thinwire.plan/2"] * 3
    assert all(own["boundaries"] == [] for own in document["stages"])
    none = plan._replace(boundaries=[row for row in plan.boundaries if not row.pays])
    assert none.verdict == "sparsifying pays at no cut"
    assert not none.document()["pays"]
