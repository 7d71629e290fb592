"""Measuring: links with latency and without, what was not seen of them, and candidates and backward on busy cores."""

import itertools
import random
from collections.abc import Callable
from statistics import median_low
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from plans import cost, linear, profile
from ranks import Ranks
from torch import nn

from thinwire.exchanges import AllGather, AllReduce, Exchange, Link
from thinwire.planner import Budget, decide, step_seconds
from thinwire.planner.candidates import candidate
from thinwire.planner.probe import candidates as probe
from thinwire.planner.probe import links as probe_of_links
from thinwire.planner.probe import measure
from thinwire.planner.probe.links import LARGEST, SMALLEST, Sent, fit, ladder, told
from thinwire.planner.profile import TRANSPORTS, Cost

SIZES = (100, 10_000, 400_000)
BUDGET = 1.0
NOISE = 0.03  # of a message's time, one standard deviation; it only ever adds
JITTER = 5e-5  # seconds that a message is late on average
LATENCIES = (0.0, 1e-3, 5e-3, 25e-3, 50e-3, 100e-3)
MEGABITS = (10, 30, 100, 300, 1000)
EXCHANGES: tuple[Exchange | None, ...] = (AllReduce(), AllGather(), None)
SHARE = 4.0 / 3  # seconds for a transport


class _Wire:
    """Messages on a link, by a clock of their own."""

    def __init__(self, link: Link, exchange: Exchange | None, world_size: int, seed: int = 0) -> None:
        self.link, self.exchange, self.world_size, self.clock = link, exchange, world_size, 0.0
        self._random = random.Random(seed)

    def seconds(self, nbytes: int) -> float:
        exchange = self.exchange
        return self.link.seconds(nbytes) if exchange is None else exchange.seconds(nbytes, self.world_size, self.link)

    def send(self, size: int, runs: int) -> Sent:
        noise = [abs(self._random.gauss(0, NOISE)) for _ in range(runs)]
        took = [self.seconds(size) * (1 + each) + self._random.expovariate(1 / JITTER) for each in noise]
        self.clock += sum(took)
        return Sent(size, median_low(took))

    def probed(self, seconds: float = SHARE, most: int = LARGEST) -> tuple[Link, bool, int]:
        """Return the link that a probe finds, whether bytes told, and the largest message."""
        sent = ladder(self.send, seconds, most)
        found = fit([(s.size, s.wall) for s in sent], self.exchange, self.world_size)
        return found, told([s.wall for s in sent]), sent[-1].size


def _wires(world_size: int, seed: int) -> list[_Wire]:
    every = itertools.product(LATENCIES, MEGABITS, EXCHANGES)
    return [_Wire(Link(latency=a, bandwidth=m * 1e6 / 8), e, world_size, seed) for a, m, e in every]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_a_probe_finds_latency_and_bandwidth_within_its_time(world_size: int) -> None:
    for wire in (wire for seed in range(5) for wire in _wires(world_size, seed)):
        found, seen, most = wire.probed()
        assert seen, (wire.link, wire.exchange, most)
        assert found.bandwidth == pytest.approx(wire.link.bandwidth, rel=0.15), (wire.link, wire.exchange)
        assert found.latency == pytest.approx(wire.link.latency, rel=0.1, abs=4 * JITTER), (wire.link, wire.exchange)
        assert wire.clock < max(1.25 * SHARE, 25 * wire.seconds(SMALLEST))


@pytest.mark.parametrize("seconds", [0.01, 0.3, SHARE])
@pytest.mark.first(1)
def test_what_a_probe_has_not_seen_is_never_free(seconds: float) -> None:
    costs = {"topk:0.01": cost(encode=linear(1e-9), nbytes=linear(0.08))}
    budget, unseen = Budget(names=("topk",)), 0
    for wire in _wires(4, 1):
        for most, times in ((1 << 12, 1), (1 << 18, 30), (1 << 22, 300)):
            fast = Link(latency=wire.link.latency, bandwidth=times * wire.link.bandwidth)
            found, seen, largest = _Wire(fast, wire.exchange, 4).probed(seconds, most)
            assert largest <= max(most, SMALLEST)
            if not seen:
                unseen += 1
                here, there = (profile({0.01: [("w", 3_000_000)]}, link=each, costs=costs) for each in (found, fast))
                assert found.bandwidth <= 1.1 * fast.bandwidth  # as near as one that was seen
                assert step_seconds(here) >= 0.9 * step_seconds(there)
                assert decide(here, budget).pays >= decide(there, budget).pays
    assert unseen > 20


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_faster_network_never_predicts_a_slower_exchange(exchange: Exchange | None) -> None:
    def predicted(latency: float, bandwidth: float, nbytes: int) -> float:
        wire = _Wire(Link(latency=latency, bandwidth=bandwidth), exchange, 4)
        with patch(f"{__name__}.NOISE", 0.0), patch(f"{__name__}.JITTER", 1e-12):
            found, _, _ = wire.probed(most=1 << 22)
        return _Wire(found, exchange, 4).seconds(nbytes)

    rates = [1e6 * 1.3**power for power in range(35)]
    for nbytes in (1 << 22, 1 << 26):
        for slower, faster in itertools.pairwise(rates):
            for further, nearer in itertools.pairwise((0.1, 0.05, 0.025, 5e-3, 1e-3, 1e-4)):
                here = predicted(further, slower, nbytes)
                assert predicted(further, faster, nbytes) <= here * (1 + 1e-6)
                assert predicted(nearer, slower, nbytes) <= here * (1 + 1e-6)


def _probed_up_to_an_odd_size() -> list[int]:
    """Probe where bytes take no time, so that messages grow to the largest: of three ranks, a third of it."""
    group = dist.group.WORLD
    assert group is not None

    def timed(run: Callable[[], object], _: object) -> tuple[float, float]:
        run()
        return 1.0, 0.0

    with patch.object(probe_of_links, "_timed", timed), patch.object(probe_of_links, "USUAL", 1 << 9):
        return list(probe_of_links.probe_links(group, torch.device("cpu"), most=4000).unseen.values())


def test_a_model_whose_bytes_the_ranks_do_not_divide_is_probed(ranks: Ranks) -> None:
    assert ranks.run(3, _probed_up_to_an_odd_size) == [[4000, 1333, 4000]] * 3


def test_equal_times_bound_the_bandwidth_by_what_noise_may_hide() -> None:
    found = fit([(256, 1e-3), (4096, 1e-3), (65536, 9e-4)], None, 2)
    assert found.latency == pytest.approx(1e-3, rel=0.01)
    assert 65536 / 1e-3 < found.bandwidth < 30 * 65536 / 1e-3
    assert fit([(256, 1e-3)], None, 2).bandwidth == pytest.approx(256 / 1e-3)


def test_a_late_message_does_not_make_bytes_free() -> None:
    points = [(1 << 20, 0.3), (1 << 22, 0.26), (1 << 24, 0.25)]
    assert fit([(256, 0.2), *points], None, 2).bandwidth < 2 * (1 << 24) / 0.05


def _link(latency: float) -> dict[Any, Link]:
    return {transport: Link(latency=latency, bandwidth=1.25e6) for transport in TRANSPORTS}


def test_a_first_call_that_compiles_costs_no_sizes(ranks: Ranks) -> None:
    (sizes,) = ranks.run(1, _slow_at_first)
    assert sizes == [100, 10_000, 400_000]


def _slow_at_first() -> list[float]:
    now, step = [0.0], probe._step

    def slow(*arguments: Any) -> Any:
        now[0] += 1e-3 if now[0] else BUDGET
        return step(*arguments)

    with patch.object(probe, "_step", slow), patch.object(probe, "time", SimpleNamespace(perf_counter=lambda: now[0])):
        return [size for size, _ in _probed(1e-4, SIZES).encode.points]


def _probed(latency: float, sizes: tuple[int, ...]) -> Cost:
    group, wanted = dist.group.WORLD, [candidate("sampled_topk:0.01")]
    assert group is not None
    found = probe.probe_candidates(wanted, group, torch.device("cpu"), _link(latency), sizes, seconds=BUDGET)
    return found["sampled_topk:0.01"]


def test_where_a_trip_is_long_candidates_take_few_of_them_and_two_sizes(ranks: Ranks) -> None:
    for calls, sizes in ranks.run(2, _far):
        assert calls == 5
        assert sizes[0] == 100
        assert len(sizes) == 2


def _far() -> tuple[int, list[float]]:
    calls, step = [0], probe._step

    def counted(*arguments: Any) -> Any:
        calls[0] += 1
        return step(*arguments)

    with patch.object(probe, "_step", counted):
        found = _probed(0.6, SIZES)
    return calls[0], [size for size, _ in found.encode.points]


def test_of_ranks_the_slowest_counts_and_of_repeats_the_fastest(ranks: Ranks) -> None:
    """They share processors, and wait for each other; whatever else runs there only ever adds."""
    first, second = ranks.run(2, _uneven)
    assert first == second == pytest.approx((2.0, 1.0, 7.0), abs=0.1)  # messages take the rest


def _uneven() -> tuple[float, ...]:
    """Steps of one tensor: seconds to encode and decode it, and of all, of this rank, busy in the first."""
    encode, decode = (2.0, 0.5) if dist.get_rank() else (0.1, 1.0)
    repeats = itertools.cycle([30.0, 0.0])

    def step(*arguments: Any) -> tuple[float, float, float]:
        busy = next(repeats)
        return encode + busy, decode + busy, 10.0 + 3 * busy

    with patch.object(probe, "_step", step):
        found = _probed(1e-9, (1 << 21,))
    return tuple(curve(1 << 21) for curve in (found.encode, found.decode, found.exchange))


def test_of_repeats_on_busy_cores_the_least_counts(ranks: Ranks) -> None:
    for computed, rest in ranks.run(2, _disturbed):
        assert (computed, rest) == (1.0, 2.0)


def _disturbed() -> tuple[float, float]:
    """A step takes 1 second and an update 2, but where somebody else has the cores."""
    model, group, now = nn.Linear(2, 1), dist.group.WORLD, [0.0]
    late = itertools.cycle([30.0, 0.0, 9.0, 4.0])
    assert group is not None

    def taking(seconds: float) -> Callable[[], None]:
        def run() -> None:
            now[0] += seconds + next(late)

        return run

    def step() -> torch.Tensor:
        taking(1.0)()
        return model(torch.ones(1, 2)).sum()

    def stamped(_: object) -> Any:
        at = now[0]
        return SimpleNamespace(at=at, since=lambda earlier: at - earlier.at)

    def timed(run: Callable[[], object], _: object) -> float:
        before = now[0]
        run()
        return now[0] - before

    with patch.object(measure, "stamp", stamped), patch.object(measure, "timed", timed):
        parameters = dict(model.named_parameters())
        found = measure.probe_backward(step, parameters, [], group, update=taking(2.0))
    assert set(found.ready.values()) == {found.computed}
    return found.computed, found.rest
