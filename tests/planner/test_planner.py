"""The planner on profiles made by hand or at random: predictions, decisions, reasons."""

import itertools
import json
import math
import os
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import NOTHING, cost, linear, links, profile, profiles

from thinwire import codecs, exchanges, formats
from thinwire.exchanges import AllGather, AllReduce, Link
from thinwire.memories import ErrorFeedback
from thinwire.planner import (
    NAMES,
    Budget,
    Curve,
    Plan,
    Profile,
    break_even,
    candidate,
    decide,
    fastest,
    step_seconds,
)
from thinwire.planner.candidates import PLANNED
from thinwire.planner.decide import chosen
from thinwire.planner.profile import TRANSPORTS
from thinwire.planner.timeline import work

SLOW, FAST = Link(latency=1e-4, bandwidth=1e7), Link(latency=1e-5, bandwidth=1e9)
CHEAP = cost(encode=linear(1e-9), decode=linear(1e-9), nbytes=linear(0.08))
TOPK = {"topk:0.01": CHEAP}
BUDGET = Budget(names=("topk",))


def _single(numel: int = 1_000_000, link: Link = SLOW, **others: Any) -> Profile:
    return profile({0.05: [("w", numel)]}, link=link, costs=TOPK, **others)


# --- curves, profiles ---


def test_a_curve_goes_through_its_points() -> None:
    curve = Curve.through([(100, 2.0), (10, 1.0), (1000, 1.5)])
    assert [curve(x) for x in (1, 10, 55, 100, 1000, 2000)] == [1.0, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert Curve(((10.0, 1.0),))(20) == 2.0
    assert Curve(((10.0, 1.0), (20.0, 3.0)))(30) == 5.0


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1)), min_size=1, unique_by=lambda p: p[0]), st.data())
def test_a_curve_never_falls(points: list[tuple[int, float]], data: st.DataObject) -> None:
    curve = Curve.through(points)
    a, b = sorted(data.draw(st.tuples(st.floats(0, 2e6), st.floats(0, 2e6))))
    assert 0 <= curve(a) <= curve(b) + 1e-12


@pytest.mark.parametrize("points", [(), ((2.0, 1.0), (1.0, 2.0)), ((1.0, 2.0), (2.0, 1.0)), ((1.0, -1.0),)])
def test_a_curve_of_other_points_is_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="ascending sizes"):
        Curve(points)


@given(profiles())
@settings(max_examples=30)
def test_a_profile_survives_json(found: Profile) -> None:
    assert Profile.from_json(found.to_json()) == found


def test_what_was_not_seen_of_a_link_survives_json_and_is_known_of_a_slower_one() -> None:
    found = replace(_single(), unseen={"all_reduce": 4096})
    assert Profile.from_json(found.to_json()) == found
    bandwidth = found.links["all_reduce"].bandwidth
    assert not found.on(Link(latency=0.0, bandwidth=bandwidth / 2)).unseen
    assert found.on(Link(latency=0.0, bandwidth=bandwidth * 2)).unseen


def test_a_profile_survives_a_file(tmp_path: Path) -> None:
    _single().save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == Profile.load(str(tmp_path / "p.json")) == _single()
    with pytest.raises(TypeError, match="path is 5; expected"):
        Profile.load(5)  # type: ignore[arg-type]  # that is the point


def test_a_save_that_is_interrupted_leaves_the_profile_that_was_there(tmp_path: Path) -> None:
    _single().save(tmp_path / "p.json")
    with patch.object(Path, "replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        _single(2).save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == _single()
    assert [each.name for each in tmp_path.iterdir()] == ["p.json"]


def test_a_profile_can_be_saved_to_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    _single().save(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    assert Profile.from_json(os.read(reader, 1 << 16).decode()) == _single()
    os.close(reader)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"schema": "thinwire.profile/2"}', '{"schema": "thinwire.profile/9"}', "3", "null"]
)
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"this is not a thinwire profile: .*; expected|the profile lacks 'timeline'"):
        Profile.from_json(text)


def test_a_file_that_is_no_profile_is_named(tmp_path: Path) -> None:
    for content in (b"", b"\xff", b"[]", b"[" * 100_000):
        (tmp_path / "p.json").write_bytes(content)
        with pytest.raises(ValueError, match=rf"{re.escape(str(tmp_path / 'p.json'))}: "):
            Profile.load(tmp_path / "p.json")


def test_a_profile_with_a_field_spoilt_is_refused() -> None:
    raw = json.loads(_single().to_json())
    for key, value in (("links", {}), ("timeline", {"buckets": 3}), ("world_size", 0), ("costs", {"topk:0.01": {}})):
        with pytest.raises(ValueError, match=r"profile|expected"):
            Profile.from_json(json.dumps(raw | {key: value}))
    with pytest.raises(ValueError, match="no candidate is called 'later'; expected one of dense"):
        Profile.from_json(json.dumps(raw | {"costs": {"later": raw["costs"]["topk:0.01"]}}))


def test_without_a_budget_a_plan_takes_what_was_measured() -> None:
    costs = {"terngrad": cost(nbytes=linear(0.25)), "fading:0.0234375": cost(nbytes=linear(0.01))}
    found = profile({0.1: [("w", 1_000_000)]}, link=Link(latency=0.0, bandwidth=1e7), costs=costs)
    assert decide(found).choice == {"w": "terngrad"}
    assert decide(found, Budget()).choice == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [("world_size", 2.5), ("world_size", True), ("slowdown", -3), ("made", {"world_size": 0})],
)
def test_a_profile_that_makes_no_sense_is_refused(key: str, value: object) -> None:
    raw = json.loads(_single().to_json())
    with pytest.raises(ValueError, match="expected"):
        Profile.from_json(json.dumps(raw | {key: value}))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("made", "backend"), {}, "made.backend is {}; expected a str"),
        (("made", "settings"), True, "made.settings is True; expected a Sequence, each a str"),
        (("made", "measuring_seconds"), [1], "made.measuring_seconds is [1]; expected a finite number of seconds"),
        (("made", "script"), "x", "made.script is 'x'; expected a Mapping"),
        (("made", "island"), {"ranks": 2}, "made.island lacks 'latency'"),
        (("made", "island", "ranks"), 0, "made.island.ranks is 0; expected an integer of at least 1"),
        (("made", "island", "bandwidth"), 0, "made.island.bandwidth is 0; expected more than 0"),
        (("links", "all_reduce", "bandwidth"), 0, "links.all_reduce.bandwidth is 0; expected more than 0"),
        (("links", "all_reduce", "bandwidth"), -1.0, "links.all_reduce.bandwidth is -1.0; expected bytes per second"),
        (("links", "all_gather", "latency"), math.inf, "links.all_gather.latency is inf; expected a finite number"),
        (("links", "all_gather", "latency"), 10**400, "links.all_gather.latency is '1000"),
        (("timeline", "computed"), math.nan, "timeline.computed is nan; expected a finite number of seconds"),
        (("timeline", "buckets", 0, "ready"), "x", "timeline.buckets[0].ready is 'x'; expected a finite number"),
        (("timeline", "buckets", 0, "gradients", 0, "numel"), 10**400, "gradients[0].numel is '1000"),
        (("links", "all_gather", "bandwidth"), 10**400, "links.all_gather.bandwidth is '1000"),
        (("timeline", "buckets", 0), 3, "timeline.buckets is (3,); expected a tuple"),
        (("costs", "topk:0.01", "decode", "points"), [[1]], "costs.topk:0.01.decode.points is ((1,),); expected"),
        (("costs", "topk:0.01", "each"), None, "costs.topk:0.01.each is None; expected a Curve"),
    ],
)
def test_what_is_damaged_in_a_profile_is_named(path: tuple[Any, ...], value: object, said: str) -> None:
    found = replace(_single(), made={"island": {"ranks": 2, "latency": 0.0, "bandwidth": 1e9}})
    place = raw = json.loads(found.to_json())
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=re.escape(said)):
        Profile.from_json(json.dumps(raw))


def test_a_profile_that_is_built_is_checked_like_one_that_is_read() -> None:
    with pytest.raises(ValueError, match=r"made.backend is 5; expected a str"):
        replace(_single(), made={"backend": 5})
    with pytest.raises(ValueError, match="no candidate is called 'later'; expected one of dense"):
        replace(_single(), costs={"later": CHEAP})


@pytest.mark.parametrize(("key", "value"), [("numel", -5), ("numel", 1.5), ("itemsize", 0)])
def test_a_gradient_that_makes_no_sense_is_refused(key: str, value: float) -> None:
    raw = json.loads(_single().to_json())
    raw["timeline"]["buckets"][0]["gradients"][0][key] = value
    with pytest.raises(ValueError, match="expected"):
        Profile.from_json(json.dumps(raw))


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf, "x"])
def test_times_that_make_no_sense_are_refused(value: object) -> None:
    raw = json.loads(_single().to_json())
    for key in ("computed", "rest"):
        spoilt = raw | {"timeline": raw["timeline"] | {key: value}}
        with pytest.raises(ValueError, match=r"expected|could not convert"):
            Profile.from_json(json.dumps(spoilt))


def test_on_another_link_messages_are_no_faster_than_processors() -> None:
    busy = dict.fromkeys(TRANSPORTS, Link(latency=0.0, bandwidth=5e8))
    there = replace(_single(), busy=busy).on(Link(latency=0.5, bandwidth=1e12), world_size=9)
    assert there.world_size == 9
    assert set(there.links.values()) == {Link(latency=0.5, bandwidth=5e8)}
    slower = _single().on(Link(latency=0.0, bandwidth=1e3))
    assert set(slower.links.values()) == {Link(latency=SLOW.latency, bandwidth=1e3)}


@pytest.mark.parametrize(("latency", "bandwidth"), [(-1, 1), (math.nan, 1), (math.inf, 1), (0, -1), (0, math.nan)])
def test_an_absurd_link_is_refused(latency: float, bandwidth: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        Link(latency=latency, bandwidth=bandwidth)


def test_buckets_are_cut_as_ddp_does() -> None:
    """In order of readiness, the first closed by 1000 bytes, others by 2000."""
    single = {0.3: [("c", 300)], 0.1: [("a", 100)], 0.2: [("b", 150)], 0.4: [("d", 250)], 0.5: [("e", 1)]}
    cut = profile(single, link=FAST, costs={}).timeline.cut([1000, 2000])
    assert [[g.name for g in bucket.gradients] for bucket in cut.buckets] == [["a", "b"], ["c", "d"], ["e"]]
    assert [bucket.ready for bucket in cut.buckets] == [0.2, 0.4, 0.5]


# --- prediction ---


def test_a_step_by_hand() -> None:
    """Two buckets, the first hidden behind backward; the second waits for it on the wire."""
    found = profile({0.10: [("a", 250_000)], 0.12: [("b", 25_000)]}, link=SLOW, costs=TOPK, rest=0.005)
    first = 2 * 3 * (1e-4 + 1e6 / 4 / 1e7)
    second = 2 * 3 * (1e-4 + 1e5 / 4 / 1e7)
    assert first > 0.02
    assert step_seconds(found) == pytest.approx(0.10 + first + second + 0.005)
    small = 3 * (1e-4 + 0.08 * 250_000 / 1e7)
    assert small < 0.02
    encode = decode = 1e-9 * 250_000
    late = 0.12 + encode  # encoding holds up backward
    assert step_seconds(found, {"a": "topk:0.01"}) == pytest.approx(late + second + 0.005)
    compressed = step_seconds(found, "topk:0.01")
    last = 3 * (1e-4 + 0.08 * 25_000 / 1e7) + 1e-9 * 25_000
    assert compressed == pytest.approx(late + 1e-9 * 25_000 + last + 0.005)
    assert decode < last


def test_latencies_of_two_collectives_in_flight_overlap_and_their_bytes_do_not() -> None:
    link = Link(latency=0.1, bandwidth=1e7)
    one = profile({0.10: [("a", 250_000)]}, link=link, costs={}, world_size=2)
    two = profile({0.10: [("a", 250_000)], 0.12: [("b", 250_000)]}, link=link, costs={}, world_size=2)
    alone = 2 * (0.1 + 0.5e6 / 1e7)
    assert step_seconds(two) == pytest.approx(0.10 + 2 * alone)
    one, two = (replace(each, made={"backend": "gloo"}) for each in (one, two))
    assert step_seconds(one) == pytest.approx(0.10 + alone)
    assert step_seconds(two) == pytest.approx(0.10 + 2 * alone - 0.1)


def test_gathers_on_gloo_wait_for_each_others_bytes_alone() -> None:
    link, costs = Link(latency=0.1, bandwidth=1e7), {"topk:0.01": cost(nbytes=linear(0.08))}
    two = profile({0.10: [("a", 250_000)], 0.12: [("b", 250_000)]}, link=link, costs=costs, world_size=2)
    two = replace(two, made={"backend": "gloo"})
    assert step_seconds(two, "topk:0.01") == pytest.approx(0.12 + 0.1 + 0.02e6 / 1e7)


def test_decoding_waits_for_the_decoding_before() -> None:
    dear = {"topk:0.01": cost(decode=linear(1e-6), nbytes=linear(0.08))}
    found = profile({0.1: [("a", 100_000)], 0.11: [("b", 1000)]}, link=FAST, costs=dear)
    first = 0.1 + AllGather().seconds(8000, 4, FAST) + 0.1
    assert step_seconds(found, "topk:0.01") == pytest.approx(first + 1e-3)


def test_communication_that_takes_cores_holds_up_what_it_overlaps_and_nothing_else() -> None:
    busy = dict.fromkeys(TRANSPORTS, Link(latency=1e-3, bandwidth=1e15))
    two = {0.10: [("a", 1000)], 0.12: [("b", 1000)]}
    free, taken = (profile(two, link=FAST, costs={}, busy=busy, slowdown=slowdown) for slowdown in (0.0, 2.0))
    alone = AllReduce().seconds(4000, 4, FAST)
    assert step_seconds(taken) - step_seconds(free) == pytest.approx(min(alone, 2 * 6e-3))


def test_more_workers_decode_more() -> None:
    each = {"topk:0.01": replace(CHEAP, each=linear(1e-8))}
    there = profile({0.0: [("w", 10_000)]}, link=FAST, costs=each, world_size=8, made={"world_size": 2})
    here = replace(there, made={"world_size": 8})
    assert work("topk:0.01", there.timeline.gradients, there).decode == pytest.approx(1e-5 + 6e-4)
    assert work("topk:0.01", here.timeline.gradients, here).decode == pytest.approx(1e-5)


@pytest.mark.parametrize(("itemsize", "fp16", "topk"), [(2, 2.0, 0.06), (4, 2.0, 0.08), (8, 2.0, 0.12)])
def test_bytes_of_other_dtypes(itemsize: int, fp16: float, topk: float) -> None:
    """What is recoded takes the same bytes of any dtype; what is picked travels in its own."""
    costs = {"fp16": cost(nbytes=linear(2.0)), "topk:0.01": cost(nbytes=linear(0.08))}
    found = profile({0.0: [("w", 100_000)]}, link=FAST, costs=costs)
    (gradient,) = found.timeline.gradients
    there = [replace(gradient, itemsize=itemsize)]
    assert work("fp16", there, found).nbytes == pytest.approx(fp16 * 100_000)
    assert work("topk:0.01", there, found).nbytes == pytest.approx(topk * 100_000)


def test_a_payload_is_never_taken_to_be_larger_than_the_tensor() -> None:
    found = profile({0.0: [("w", 10)]}, link=FAST, costs={"topk:0.01": cost(nbytes=linear(0, 1e6))})
    assert work("topk:0.01", found.timeline.gradients, found).nbytes == 40 + 64


@given(profiles(), links, st.floats(1, 1e3), st.floats(0, 1), st.data())
@settings(max_examples=200)
def test_a_faster_network_never_raises_a_predicted_time(
    found: Profile, link: Link, times: float, share: float, data: st.DataObject
) -> None:
    faster = Link(latency=share * link.latency, bandwidth=times * link.bandwidth)
    here, there = (replace(found, links=dict.fromkeys(TRANSPORTS, each)) for each in (link, faster))
    names = ["dense", *found.costs]
    choice = {g.name: data.draw(st.sampled_from(names)) for g in found.timeline.gradients}
    assert step_seconds(there, choice) <= step_seconds(here, choice) * (1 + 1e-9)


@given(profiles(most_buckets=3), st.floats(1, 1e3), st.floats(0, 1))
@settings(max_examples=60)
def test_a_faster_network_never_raises_the_time_of_the_fastest_plan(found: Profile, times: float, share: float) -> None:
    links = {t: Link(latency=share * link.latency, bandwidth=times * link.bandwidth) for t, link in found.links.items()}
    here, there = (
        step_seconds(each, fastest(each, [candidate(name) for name in found.costs]))
        for each in (found, replace(found, links=links))
    )
    assert there <= here * (1 + 1e-9)


# --- search ---


@given(profiles(most_buckets=3))
@settings(max_examples=60)
def test_the_fastest_is_the_fastest_of_all(found: Profile) -> None:
    """Against every way to give each bucket's tensors from some size on to one candidate."""
    ways = []
    for bucket in found.timeline.buckets:
        names = [g.name for g in bucket.gradients]
        sizes = {g.name: g.numel for g in bucket.gradients}
        options = [dict.fromkeys(names, "dense")]
        for name, size in itertools.product(found.costs, sizes.values()):
            options.append({who: name if sizes[who] >= size else "dense" for who in names})
        ways.append(options)
    best = min(
        step_seconds(found, {name: given for option in way for name, given in option.items()})
        for way in itertools.product(*ways)
    )
    every = [candidate(name) for name in found.costs]
    with patch.object(import_module("thinwire.planner.decide"), "_MANY", math.inf):
        assert step_seconds(found, fastest(found, every)) == pytest.approx(best, rel=1e-9)
    assert step_seconds(found, fastest(found, every)) <= best * (1 + 2e-3)  # where paths are dropped


def test_a_planned_step_may_take_no_time_at_all() -> None:
    found = profile({0.0: [("w", 1000)]}, link=SLOW, costs={"topk:0.01": cost()})
    free = replace(found, links={**found.links, "all_gather": Link(latency=0.0, bandwidth=math.inf)})
    plan = decide(free, BUDGET)
    assert (plan.pays, plan.seconds) == (True, 0.0)
    assert "0.0 ms a step instead of" in plan.verdict


def test_what_is_hidden_behind_backward_stays_uncompressed() -> None:
    found = profile({0.01: [("early", 100_000)], 0.2: [("late", 100_000)]}, link=SLOW, costs=TOPK)
    assert decide(found, BUDGET).choice == {"late": "topk:0.01"}
    assert fastest(found, [candidate("topk:0.01")]) == {"late": "topk:0.01"}, "what gains nothing is left out"


def test_small_tensors_that_cost_more_than_they_save_stay_uncompressed() -> None:
    dear = {"topk:0.01": cost(encode=linear(0, 1e-3), nbytes=linear(0.08))}
    found = profile({0.1: [("large", 1_000_000), ("small", 100)]}, link=SLOW, costs=dear)
    assert decide(found, BUDGET).choice == {"large": "topk:0.01"}


# --- decisions ---


@given(
    st.integers(1000, 1_000_000), st.integers(2, 64), links, st.floats(0, 1e-7), st.floats(0.005, 0.5)
)  # without overlap the planner's rule is the paper's
def test_a_tensor_is_compressed_by_the_rule_of_dragonn(
    numel: int, world_size: int, link: Link, slope: float, share: float
) -> None:
    costs = {"topk:0.01": cost(encode=linear(slope), nbytes=linear(4 * share))}
    found = profile({0.0: [("w", numel)]}, link=link, costs=costs, world_size=world_size)
    t_full = 2 * (world_size - 1) * (link.latency + 4 * numel / (world_size * link.bandwidth))
    t_spr = (world_size - 1) * (link.latency + share * 4 * numel / link.bandwidth)
    t_comp = slope * numel
    if not math.isclose(t_comp, t_full - t_spr, rel_tol=1e-6, abs_tol=1e-9):
        assert bool(decide(found, BUDGET, tolerance=0).choice) == (t_comp < t_full - t_spr)


def test_the_saving_of_an_all_gather_ends_at_2_over_the_share() -> None:
    """DRAGONN's Eq. 1: γ = 0.02 pays up to K = 100 however slow the link."""
    costs = {"topk:0.01": cost(nbytes=linear(0.08))}
    found = profile({0.0: [("w", 1_000_000)]}, link=Link(latency=0.0, bandwidth=1e3), costs=costs)
    pays = [decide(found.on(None, world_size=world), BUDGET, tolerance=0).pays for world in (99, 101)]
    assert pays == [True, False]


def test_of_two_about_as_fast_the_kinder_to_the_loss_is_taken() -> None:
    costs = {"fp16": cost(nbytes=linear(2.0)), "topk:0.01": cost(nbytes=linear(1.99))}
    found = profile({0.1: [("w", 1_000_000)]}, link=SLOW, costs=costs, world_size=2)
    budget = Budget(names=("fp16", "topk"))
    assert set(decide(found, budget).choice.values()) == {"fp16"}
    assert set(chosen(found, budget, 0.0).values()) == {"topk:0.01"}


def test_nothing_pays_on_a_fast_network() -> None:
    plan = decide(_single(10_000, FAST), BUDGET)
    assert not plan.pays
    assert plan.seconds == plan.dense_seconds
    assert "nothing pays" in plan.verdict
    assert plan.reducer().memories() == plan.reducer().memories()


def test_one_worker_has_nobody_to_exchange_with() -> None:
    plan = decide(_single(world_size=1), BUDGET)
    assert (plan.pays, plan.break_even, plan.seconds) == (False, 0.0, 0.05)
    assert "one worker" in plan.rows[0].reason


def test_an_empty_model_has_an_empty_plan() -> None:
    plan = decide(profile({}, link=SLOW, costs={}), BUDGET)
    assert (plan.rows, plan.pays, plan.seconds) == ((), False, 0.0)


def test_links_that_carry_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"links.all_reduce.bandwidth is 0.0; expected more than 0"):
        _single(link=Link(latency=0.0, bandwidth=0.0))


@pytest.mark.parametrize("link", [Link(latency=1e308, bandwidth=1.0), Link(latency=0.0, bandwidth=5e-324)])
def test_a_step_that_would_never_end_is_refused(link: Link) -> None:
    with pytest.raises(ValueError, match="a step with dense takes inf s; expected a finite time"):
        decide(_single(link=link), BUDGET)


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, math.nan])
def test_a_tolerance_that_is_no_share_is_refused(tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance"):
        decide(_single(), BUDGET, tolerance=tolerance)


def test_the_break_even_divides_paying_from_not_paying() -> None:
    found = replace(_single(), busy=dict.fromkeys(TRANSPORTS, Link(latency=0.0, bandwidth=1e15)))
    limit = break_even(found, BUDGET, 0.03)
    pays = [
        bool(set(chosen(found.on(Link(latency=0.0, bandwidth=limit * x)), BUDGET, 0.03).values()) - {"dense"})
        for x in (0.99, 1.01)
    ]
    assert pays == [True, False]


def test_a_break_even_may_be_nowhere_or_everywhere() -> None:
    dear = {"topk:0.01": cost(encode=linear(0, 1e9), nbytes=linear(0.08))}
    assert break_even(replace(_single(), costs=dear), BUDGET, 0.03) == 0.0
    far = _single(link=Link(latency=1.0, bandwidth=1e7))
    assert (
        break_even(replace(far, busy=dict.fromkeys(TRANSPORTS, Link(latency=0.0, bandwidth=1e15))), BUDGET, 0.0)
        == math.inf
    )


# --- what a plan says ---


def test_every_tensor_has_a_reason_and_a_saving() -> None:
    found = profile({0.01: [("early", 100_000)], 0.2: [("late", 100_000)]}, link=SLOW, costs=TOPK, world_size=2)
    plan = decide(found, BUDGET)
    early, late = plan.rows
    assert "hidden behind backward" in early.reason
    assert "instead of 40 ms" in late.reason
    assert late.saves == pytest.approx(step_seconds(found) - step_seconds(found, plan.choice), rel=0.1)
    assert early.saves == 0
    assert late.dense_bytes == 400_000
    assert late.nbytes == pytest.approx(8000)
    assert all(row.reason for row in plan.rows)


def test_a_plan_says_what_would_help_more() -> None:
    slow = decide(_single(link=Link(latency=0.0, bandwidth=1e5)), BUDGET)
    assert any("ten times the bandwidth" in line for line in slow.advice)
    fast = decide(_single(1000, FAST), BUDGET)
    assert any("computing alone" in line for line in fast.advice)


def test_a_plan_as_json_holds_everything() -> None:
    plan = decide(_single(), BUDGET)
    raw = json.loads(plan.to_json())
    assert raw["pays"] is True
    assert raw["rows"][0]["choice"] == "topk:0.01"
    assert Profile.from_json(json.dumps(raw["profile"])) == plan.profile


def test_a_plan_at_work_uses_one_memory() -> None:
    plan: Plan = decide(_single(), BUDGET)
    memory = ErrorFeedback()
    assert memory in plan.reducer(memory).memories()


# --- candidates ---


def test_every_candidate_has_its_own_name() -> None:
    budget = Budget(
        densities=(0.1, 0.01), names=("fp16", "qsgd", "terngrad", "topk", "gtopk", "owner", "s2_union", "s2_reducer")
    )
    found = budget.candidates()
    assert found[0].name == "dense"
    assert len({each.name for each in found}) == len(found) == 14
    assert all(candidate(each.name) == each for each in found)
    assert "topk:0.1" in {each.name for each in found}
    elements = {f"{how}{family}" for how in ("", "sampled_") for family in ("topk", "gtopk", "doubling", "owner")}
    sparse = {f"{name}:DENSITY" for name in elements | {"s2_union", "s2_reducer"}}
    sparse |= {"fading:DENSITY", "orthogonal:DENSITY"}
    assert {*NAMES} == {"dense", "bf16", "fp16", "qsgd", "qsgd_l2", "terngrad"} | sparse


@pytest.mark.parametrize("name", [name.replace("DENSITY", "0.02") for name in NAMES])
def test_a_candidate_is_what_the_method_of_its_name_does_with_a_large_tensor(name: str) -> None:
    family, _, density = name.partition(":")
    large = PLANNED[family].large(float(density) if density else None)
    found = candidate(name)
    assert (found.codec, found.exchange, found.feedback) == (large.codec, large.exchange, large.memory.stateful)


_TOPK, _SAMPLED = codecs.TopK(density=0.02), codecs.SampledThreshold(density=0.02)
_BLOCKS = codecs.BlockTopK(density=0.02, block=32)


@pytest.mark.parametrize(
    ("name", "codec", "exchange"),
    [
        ("topk:0.02", _TOPK, exchanges.AllGather()),
        ("sampled_topk:0.02", _SAMPLED, exchanges.AllGather()),
        ("gtopk:0.02", _TOPK, exchanges.GlobalTopKTree()),
        ("sampled_gtopk:0.02", _SAMPLED, exchanges.GlobalTopKTree()),
        ("doubling:0.02", _TOPK, exchanges.RecursiveDoubling()),
        ("sampled_doubling:0.02", _SAMPLED, exchanges.RecursiveDoubling()),
        ("sampled_owner:0.02", _SAMPLED, exchanges.OwnerSharded()),
        ("s2_union:0.02", _BLOCKS, exchanges.UnionAllReduce()),
        ("s2_reducer:0.02", _BLOCKS, exchanges.UnionAllReduce(packed=codecs.CountSketch(rows=3, ratio=0.5))),
        ("qsgd", codecs.Cast(values=formats.Levels(bits=4, norm="max")), exchanges.AllGather()),
        ("qsgd_l2", codecs.Cast(values=formats.Levels(bits=4, norm="l2")), exchanges.AllGather()),
    ],
)
def test_what_a_candidate_is_made_of(name: str, codec: codecs.Codec, exchange: exchanges.Exchange) -> None:
    assert (candidate(name).codec, candidate(name).exchange) == (codec, exchange)


def test_a_budget_left_alone_selects_by_sampled_thresholds() -> None:
    names = ["dense", "bf16", "qsgd_l2", "sampled_topk:0.01", "sampled_doubling:0.01", "sampled_gtopk:0.01"]
    assert [each.name for each in Budget().candidates()] == names


def test_without_error_feedback_nothing_is_left_for_later() -> None:
    assert not any(each.feedback for each in Budget(error_feedback=False).candidates())


@pytest.mark.parametrize("name", ["", "topk", "topk:", "topk:x", "topk:0", "topk:2", "nonsense", "fp16:0.1"])
def test_an_unknown_candidate_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="candidate"):
        candidate(name)


def test_a_budget_checks_what_it_is_given() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        Budget(names=("nonsense",))
    with pytest.raises(ValueError, match="densities is"):
        Budget(densities=(0.0,))


def test_all_gather_is_what_topk_travels_by() -> None:
    assert candidate("topk:0.01").exchange == AllGather()
    assert NOTHING(5) == 0.0
