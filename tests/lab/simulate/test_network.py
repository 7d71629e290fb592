"""Networks of tiers and regions, steps between more workers than there are."""

import math
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.exchanges import (
    AllGather,
    AllReduce,
    GlobalTopKTree,
    Hops,
    Link,
    Network,
    OwnerSharded,
    RecursiveDoubling,
)
from thinwire.planner import Bucket, Cost, Curve, Gradient, Profile, Timeline
from thinwire.planner.profile import TRANSPORTS
from thinwire_lab.inputs import parse_link
from thinwire_lab.simulate.network import Limited, Regions, Tiers, ring, slowest_edge
from thinwire_lab.simulate.options import described, parse_tiers, read_regions
from thinwire_lab.simulate.scaling import PLANNED, on, scaled

EXCHANGES = (AllReduce(), AllGather(), GlobalTopKTree(), RecursiveDoubling(), OwnerSharded())
HOST, RACK, HALL = (Link(latency=a, bandwidth=b) for a, b in ((1e-5, 8e9), (5e-5, 4e9), (1e-4, 1e9)))
TIERS = Tiers(((4, HOST), (8, RACK)), HALL)  # 4 ranks a host, 2 hosts a rack
OWN = Link(latency=1e-4, bandwidth=1e9)


def _regions(*edges: tuple[float, float]) -> Regions:
    """Three places; (latency, bandwidth) of AB, AC, BC."""
    ab, ac, bc = (Link(latency=latency, bandwidth=bandwidth) for latency, bandwidth in edges)
    return Regions(("A", "B", "C"), ((OWN, ab, ac), (ab, OWN, bc), (ac, bc, OWN)))


PLACES = _regions((0.01, 4e8), (0.02, 8e8), (0.03, 2e8))


@pytest.mark.parametrize(
    ("hops", "world_size", "expected"),
    [
        # within a host, ring included: ranks' own links
        (Hops(stride=1, count=1, nbytes=1e6), 4, HOST),
        # one message leaves each host, the slowest of them the rack
        (Hops(stride=1, count=1, nbytes=1e6), 8, RACK),
        (Hops(stride=1, count=1, nbytes=1e6), 16, HALL),
        # ranks 2, 3 of each host leave it: two share 4e9
        (Hops(stride=2, count=1, nbytes=1e6), 8, Link(latency=5e-5, bandwidth=2e9)),
        # all four leave
        (Hops(stride=4, count=1, nbytes=1e6), 8, Link(latency=5e-5, bandwidth=1e9)),
        # 1, 2, 3 leave the first host, and 4, 5, 6 go round to it: three share each way
        (Hops(stride=3, count=1, nbytes=1e6), 7, Link(latency=5e-5, bandwidth=4e9 / 3)),
        # all eight of a rack share its 1e9 to the other
        (Hops(stride=8, count=1, nbytes=1e6), 16, Link(latency=1e-4, bandwidth=1e9 / 8)),
        # a tree: 0 → 1 and 4 → 5 stay, 0 → 4 leaves the host alone, 0 → 8 the rack
        (Hops(stride=1, every=2, count=1, nbytes=1e6), 16, HOST),
        (Hops(stride=4, every=8, count=1, nbytes=1e6), 16, RACK),
        (Hops(stride=8, every=16, count=1, nbytes=1e6), 16, HALL),
        # nothing goes round the end of a tree: 8 → 16 is not there among 12
        (Hops(stride=4, every=8, count=1, nbytes=1e6), 12, RACK),
    ],
)
def test_tiers_by_hand(hops: Hops, world_size: int, expected: Link) -> None:
    assert TIERS.hop(hops, world_size) == expected


@pytest.mark.parametrize(
    ("hops", "world_size", "expected"),
    [
        # a rank each: the ring is AB, BC, CA; of 1 kB the latest is slowest, and here the narrowest as well
        (Hops(stride=1, count=1, nbytes=1e3), 3, Link(latency=0.03, bandwidth=2e8)),
        # two ranks each, AABBCC: one message a pair, likewise
        (Hops(stride=1, count=1, nbytes=1e3), 6, Link(latency=0.03, bandwidth=2e8)),
        # stride 2: both of B go to C and share 2e8
        (Hops(stride=2, count=1, nbytes=1e6), 6, Link(latency=0.03, bandwidth=1e8)),
        # a tree's first level: within each region
        (Hops(stride=1, every=2, count=1, nbytes=1e6), 6, OWN),
        # where several messages of a region do not get in each other's way
        (Hops(stride=1, every=2, count=1, nbytes=1e6), 12, OWN),
        # and its second: 0 → 2 is A to B alone, 4 → 6 is not there
        (Hops(stride=2, every=4, count=1, nbytes=1e6), 6, Link(latency=0.01, bandwidth=4e8)),
    ],
)
def test_regions_by_hand(hops: Hops, world_size: int, expected: Link) -> None:
    assert PLACES.hop(hops, world_size) == expected


def test_a_message_is_no_faster_than_any_link_on_its_way() -> None:
    narrow = Tiers(((4, Link(latency=0.0, bandwidth=1e6)),), HALL)
    assert narrow.hop(Hops(stride=4, count=1, nbytes=1e6), 8) == Link(latency=1e-4, bandwidth=1e6)


def test_a_group_larger_than_the_world_is_all_of_it() -> None:
    assert Tiers(((10**30, HOST),), HALL).hop(Hops(stride=1, count=1, nbytes=1e6), 8) == HOST


def test_which_message_is_slowest_depends_on_its_size() -> None:
    far, narrow = (0.1, 1e9), (0.001, 1e6)
    places = _regions(far, narrow, (0.0, 1e9))
    assert places.hop(Hops(stride=1, count=1, nbytes=1.0), 3).latency == 0.1
    assert places.hop(Hops(stride=1, count=1, nbytes=1e9), 3).bandwidth == 1e6


def test_own_link_bounds_what_leaves_a_region() -> None:
    places = _regions((0.01, 1e12), (0.01, 1e12), (0.01, 1e12))
    assert places.hop(Hops(stride=1, count=1, nbytes=1e6), 3).bandwidth == OWN.bandwidth


def test_ranks_fill_regions_evenly() -> None:
    lone = Regions(("A", "B"), ((OWN, HALL), (HALL, OWN)))
    # AAABB: 2 → 3 and 4 → 0 leave; with stride 2 ranks 1, 2 go to B, and 3, 4 to A
    assert lone.hop(Hops(stride=2, count=1, nbytes=1e6), 5).bandwidth == HALL.bandwidth / 2


@pytest.mark.parametrize("exchange", [AllReduce(), AllGather(), GlobalTopKTree()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 31, 64])
def test_tiers_of_equal_links_are_a_link_where_nothing_is_shared(
    exchange: AllReduce | AllGather | GlobalTopKTree, world_size: int
) -> None:
    alike = Tiers(((8, HALL), (32, HALL)), HALL)
    assert exchange.seconds(1e6, world_size, alike) == exchange.seconds(1e6, world_size, HALL)


def test_tiers_of_equal_links_share_their_uplinks() -> None:
    alike = Tiers(((8, HALL),), HALL)
    # with 16 ranks on 2 hosts, min(s, 16 − s, 8) ranks of a host send s away: 1, 2, …, 7, 8, 7, …, 1 share its way out
    flows = [min(s, 16 - s) for s in range(1, 16)]
    messages = OwnerSharded().hops(1e6, 16)
    expected = sum(
        m.count * (HALL.latency + m.nbytes * f / HALL.bandwidth) for m, f in zip(messages, flows, strict=True)
    )
    assert OwnerSharded().seconds(1e6, 16, alike) == pytest.approx(expected)


seconds_and_rates = st.builds(
    Link, latency=st.floats(0, 1, allow_subnormal=False), bandwidth=st.floats(1e3, 1e12, allow_subnormal=False)
)
factors = st.tuples(st.floats(0, 1), st.floats(1, 100))


def _faster(link: Link, by: tuple[float, float]) -> Link:
    return Link(latency=link.latency * by[0], bandwidth=link.bandwidth * by[1])


@given(
    links=st.lists(seconds_and_rates, min_size=3, max_size=3),
    which=st.integers(0, 2),
    by=factors,
    sizes=st.tuples(st.integers(2, 5), st.integers(2, 4)),
    world_size=st.integers(1, 70),
    nbytes=st.floats(1, 1e9),
)
@settings(max_examples=80)
def test_a_faster_tier_never_costs_time(
    links: list[Link], which: int, by: tuple[float, float], sizes: tuple[int, int], world_size: int, nbytes: float
) -> None:
    def tiers(found: list[Link]) -> Tiers:
        return Tiers(((sizes[0], found[0]), (sizes[0] * sizes[1], found[1])), found[2])

    better = [_faster(link, by) if place == which else link for place, link in enumerate(links)]
    for exchange in EXCHANGES:
        before = exchange.seconds(nbytes, world_size, tiers(links), 8 * nbytes)
        after = exchange.seconds(nbytes, world_size, tiers(better), 8 * nbytes)
        assert after <= before * (1 + 1e-12)


@given(
    edges=st.lists(st.tuples(st.floats(0, 1), st.floats(1e3, 1e12)), min_size=3, max_size=3),
    which=st.integers(0, 2),
    by=factors,
    world_size=st.integers(1, 40),
    nbytes=st.floats(1, 1e9),
)
@settings(max_examples=80)
def test_a_faster_pair_of_regions_never_costs_time(
    edges: list[tuple[float, float]], which: int, by: tuple[float, float], world_size: int, nbytes: float
) -> None:
    better = [(a * by[0], b * by[1]) if place == which else (a, b) for place, (a, b) in enumerate(edges)]
    for exchange in EXCHANGES:
        before = exchange.seconds(nbytes, world_size, _regions(*edges), 8 * nbytes)
        assert exchange.seconds(nbytes, world_size, _regions(*better), 8 * nbytes) <= before * (1 + 1e-12)


@given(st.lists(st.floats(0.001, 1), min_size=15, max_size=15))
@settings(max_examples=25)
def test_the_ring_of_regions_is_the_best_of_all(delays: list[float]) -> None:
    left = iter(delays)
    delay = [[0.0] * 6 for _ in range(6)]
    for a in range(6):
        for b in range(a):
            delay[a][b] = delay[b][a] = next(left)
    links = tuple(tuple(Link(latency=x, bandwidth=1e9) for x in row) for row in delay)
    found = [int(name) for name in ring(Regions(tuple("012345"), links), nbytes=0.0).names]

    def worth(order: list[int]) -> tuple[float, float]:
        total = sum(delay[a][b] for a, b in zip(order, [*order[1:], order[0]], strict=True))
        return slowest_edge(order, delay), round(total, 9)

    assert sorted(found) == list(range(6))
    assert worth(found) == min(worth([0, *rest]) for rest in permutations(range(1, 6)))


def test_more_regions_than_can_be_ordered_are_refused() -> None:
    many = Regions(tuple(map(str, range(13))), ((OWN,) * 13,) * 13)
    with pytest.raises(ValueError, match="13 regions"):
        ring(many)


@pytest.mark.parametrize("groups", [((0, HOST),), ((1, HOST),), ((4, HOST), (6, RACK)), ((4, HOST), (4, RACK))])
def test_absurd_tiers_are_refused(groups: tuple[tuple[int, Link], ...]) -> None:
    with pytest.raises(ValueError, match="multiple of the one before"):
        Tiers(groups, HALL)


def test_links_of_regions_are_square() -> None:
    with pytest.raises(ValueError, match="expected a square"):
        Regions(("A", "B"), ((OWN, OWN),))
    with pytest.raises(ValueError, match="expected a square"):
        Regions((), ())


def test_hops_of_no_stride_are_refused() -> None:
    with pytest.raises(ValueError, match="stride"):
        TIERS.hop(Hops(stride=0, count=1, nbytes=1), 4)


def test_without_bandwidth_a_message_never_arrives() -> None:
    dead = Link(latency=0, bandwidth=0)
    assert AllReduce().seconds(1e6, 8, Tiers(((4, HOST),), dead)) == math.inf
    assert AllReduce().seconds(1e6, 4, Tiers(((4, HOST),), dead)) < math.inf


NAME = "topk:0.01"
FREE = Curve(((1.0, 0.0),))


def _profile(latency: float = 0.0, *numels: int) -> Profile:
    """20 ms a step; 1 ms to encode a tensor, 8 bytes for one of 100 elements."""
    gradients = tuple(Gradient(name=f"{place}", numel=numel) for place, numel in enumerate(numels or (1_000_000, 100)))
    encode = Curve(((1.0, 0.001), (1e9, 0.001)))
    nbytes = Curve(((1e6, 8e4),))
    return Profile(
        world_size=2,
        timeline=Timeline(buckets=(Bucket(ready=0.018, gradients=gradients),), computed=0.018, rest=0.002),
        links=dict.fromkeys(TRANSPORTS, Link(latency=latency, bandwidth=1e12)),
        costs={NAME: Cost(encode=encode, decode=FREE, each=FREE, exchange=FREE, nbytes=nbytes)},
    )


def test_a_step_by_hand() -> None:
    (found,) = scaled(_profile(), ["dense", NAME], [8], Link(latency=0.001, bandwidth=1e8))
    # 14 messages of 4,000,400 / 8 bytes
    assert found.seconds["dense"] == pytest.approx(0.020 + 14 * (0.001 + 500_050 / 1e8))
    # 1 ms to encode; 7 messages of 80,000 bytes; then 14 of 400 / 8 for the small tensor
    assert found.seconds[NAME] == pytest.approx(0.020 + 0.001 + 7 * (0.001 + 0.0008) + 14 * (0.001 + 50 / 1e8))
    assert found.efficiency("dense") == pytest.approx(0.020 / found.seconds["dense"])
    assert found.best == NAME


def test_one_worker_pays_nothing() -> None:
    (found,) = scaled(_profile(0.5), ["dense", NAME], [1], TIERS)
    assert set(found.seconds.values()) == {found.alone}
    assert found.alone == pytest.approx(0.020)
    assert {found.efficiency(name) for name in found.seconds} == {1.0}


def test_the_planner_is_about_as_fast_as_the_best() -> None:
    for found in scaled(_profile(), ["dense", NAME], [2, 8, 64], Link(latency=0.001, bandwidth=1e8)):
        assert found.seconds[PLANNED] <= 1.03 * found.seconds[found.best] * (1 + 1e-9)


def test_messages_take_no_less_than_what_was_measured() -> None:
    slow = _profile(0.25)
    (found,) = scaled(slow, ["dense"], [8], Tiers((), Link(latency=0.001, bandwidth=1e8)))
    assert found.seconds["dense"] == pytest.approx(0.020 + 14 * (0.25 + 500_050 / 1e8))
    (wide,) = scaled(slow, ["dense"], [8], Link(latency=0.0, bandwidth=math.inf))
    assert wide.seconds["dense"] == pytest.approx(0.020 + 14 * (0.25 + 500_050 / 1e12))
    limited = Limited(TIERS, Link(latency=1.0, bandwidth=1.0))
    assert limited.hop(Hops(stride=1, count=1, nbytes=1), 4) == Link(latency=1.0, bandwidth=1.0)


def test_without_a_network_links_are_those_of_the_profile() -> None:
    profile = _profile(0.25)
    assert on(profile, None, 64) == replace(profile, world_size=64)


def test_a_model_without_parameters_takes_what_it_computes() -> None:
    empty = replace(_profile(), timeline=Timeline(buckets=(), computed=0.018, rest=0.002))
    for found in scaled(empty, ["dense", NAME], [1, 4096], TIERS):
        assert set(found.seconds.values()) == {found.alone}


def test_a_step_that_would_never_end_is_refused() -> None:
    with pytest.raises(ValueError, match="a step with dense takes inf s; expected a finite time"):
        scaled(_profile(1e308, 4096), ["dense"], [8])


def test_what_the_profile_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no costs of 'fp16'; expected some of dense, topk:0\.01"):
        scaled(_profile(), ["fp16"], [8])
    with pytest.raises(ValueError, match="no candidate is called 'nope'"):
        scaled(_profile(), ["nope"], [8])
    with pytest.raises(ValueError, match="world_size is 0"):
        scaled(_profile(), ["dense"], [0])


@given(
    links=st.lists(seconds_and_rates, min_size=2, max_size=2),
    by=factors,
    which=st.integers(0, 1),
    world_size=st.integers(1, 40),
)
@settings(max_examples=40)
def test_a_faster_network_never_raises_a_predicted_step(
    links: list[Link], by: tuple[float, float], which: int, world_size: int
) -> None:
    def step(found: list[Link]) -> dict[str, float]:
        network: Network = Tiers(((4, found[0]),), found[1])
        return dict(scaled(_profile(), ["dense", NAME], [world_size], network)[0].seconds)

    before, after = step(links), step([_faster(x, by) if i == which else x for i, x in enumerate(links)])
    assert all(after[name] <= before[name] * (1 + 1e-12) for name in ("dense", NAME))
    assert after[PLANNED] <= before[PLANNED] * 1.03 * (1 + 1e-9)  # which may take the kinder of two


@pytest.mark.parametrize(
    ("text", "latency", "bandwidth"),
    [
        ("1gbit", 0.0, 1.25e8),
        ("1gbit/5ms", 0.005, 1.25e8),
        (" 100 Mbit/s / 0.4 ms", 0.0004, 1.25e7),
        ("400gbit/10us", 1e-5, 5e10),
        ("8kbps/1s", 1.0, 1e3),
    ],
)
def test_links_as_users_write_them(text: str, latency: float, bandwidth: float) -> None:
    found = parse_link(text)
    assert found.latency == pytest.approx(latency)
    assert found.bandwidth == bandwidth


@pytest.mark.parametrize("text", ["", "fast", "0gbit", "-1gbit", "1gbit/", "1gbit/-5ms", "1gbit/5", "10MB/s", "none"])
def test_bad_links(text: str) -> None:
    with pytest.raises(ValueError, match="expected a rate above 0"):
        parse_link(text)


@pytest.mark.parametrize(
    ("link", "text"),
    [
        (Link(latency=5e-5, bandwidth=3.125e9), "25 Gbit/s, 0.05 ms"),
        (Link(latency=0, bandwidth=1.25e7), "100 Mbit/s, 0 ms"),
        (Link(latency=1, bandwidth=1e3), "8 kbit/s, 1000 ms"),
        (Link(latency=0, bandwidth=math.inf), "inf Tbit/s, 0 ms"),
    ],
)
def test_links_as_users_read_them(link: Link, text: str) -> None:
    assert described(link) == text


def test_tiers_as_users_write_them() -> None:
    found = parse_tiers("8x100gbit/10us, 4 x 25gbit/50us,10gbit")
    assert [size for size, _ in found.groups] == [8, 32]
    assert [link.bandwidth for _, link in found.groups] == [12.5e9, 3.125e9]
    assert found.beyond == Link(latency=0.0, bandwidth=1.25e9)
    assert parse_tiers("1gbit") == Tiers((), Link(latency=0.0, bandwidth=1.25e8))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8x100gbit", "does not say which link joins"),
        ("100gbit,10gbit", "not a group"),
        ("1x100gbit,10gbit", "not a group"),
        ("0x100gbit,10gbit", "not a group"),
        ("8xfast,10gbit", "expected a rate"),
        ("8x100gbit,", "expected a rate"),
    ],
)
def test_bad_tiers(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_tiers(text)


HEADER = "region_a,region_b,delay_ms,bandwidth_gbps\n"
CSV = HEADER + "A,B,10,0.8\nA,C,20,1.6\nB,C,30,0.4\n"


def test_regions_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "regions.csv"
    path.write_text(CSV)
    found = read_regions(path, OWN)
    assert found.names == ("A", "B", "C")
    assert found.links[0][1] == found.links[1][0] == Link(latency=0.01, bandwidth=1e8)
    assert found.links[1][2] == Link(latency=0.03, bandwidth=5e7)
    assert found.links[2][2] == OWN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "starts with ''"),
        (HEADER, "a row per pair"),
        ("a,b,c\n1,2,3\n", "starts with 'a,b,c'"),
        (HEADER + "A,B,10\n", "is not a pair"),
        (HEADER + "A,B,10,0.8,1\n", "is not a pair"),
        (HEADER + "A,B,ten,0.8\n", "is not a pair"),
        (HEADER + "A,A,10,0.8\n", "two regions"),
        (HEADER + "A,B,0,0.8\n", "above 0"),
        (HEADER + "A,B,10,-1\n", "above 0"),
        (HEADER + "A,B,nan,1\n", "above 0"),
        (HEADER + "A,B,10,inf\n", "above 0"),
        (HEADER + "A,B,10,1\nB,A,10,1\n", "A and B twice"),
        (HEADER + "A,B,10,1\nA,C,10,1\n", "lacks B and C"),
        ("\udc80", "not CSV"),
    ],
)
def test_bad_files_of_regions(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "regions.csv"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        read_regions(path, OWN)


def test_partners_that_swap_within_a_host_stay_there() -> None:
    near, far = Link(latency=1e-6, bandwidth=1e10), Link(latency=1e-3, bandwidth=1e8)
    hosts = Tiers(((2, near),), far)
    assert hosts.hop(Hops(stride=1, count=1, nbytes=1e6, swap=True), 4) == near
    assert hosts.hop(Hops(stride=1, count=1, nbytes=1e6), 4) == far
    both = hosts.hop(Hops(stride=2, count=1, nbytes=1e6, swap=True), 4)
    assert both == Link(latency=1e-3, bandwidth=5e7)
