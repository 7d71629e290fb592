"""How the figures of a handle are added up."""

import copy
import math

import pytest
import torch

from thinwire.trace import Figures, Meter, Recorder, count, listen


def test_exchanges_that_overlap_count_once() -> None:
    meter = Meter()
    meter.begin(0)
    for start, end in ((5.0, 6.0), (1.0, 2.0), (1.5, 3.0), (1.6, 1.7)):
        meter.took("exchange", start, end)
    for _ in range(2):
        meter.took("encode", 1.0, 1.5)
    assert meter.stats().step.exchange_ms == 3000
    assert meter.stats().step.encode_ms == 1000


def test_a_step_begins_with_its_number() -> None:
    meter = Meter()
    assert meter.stats().step.steps == 0
    for step, amount in ((0, 1.0), (0, 2.0), (1, 4.0), (3, 8.0)):
        meter.begin(step)
        meter.add("sent_bytes", amount)
        meter.add("dense_bytes", 2 * amount)
    stats = meter.stats()
    assert (stats.step.sent_bytes, stats.total.sent_bytes) == (8.0, 15.0)
    assert (stats.step.steps, stats.total.steps) == (1, 3)
    assert stats.total.ratio == 0.5


def test_the_total_ratio_is_of_the_steps_that_were_asked_for() -> None:
    meter, gradient = Meter(), torch.full((9,), 2.0)
    for step, waiting in enumerate((0.0, 1.0, 3.0)):
        meter.begin(step)
        meter.gradient(gradient, world_size=2, scale=0.5)
        ratio = meter.stats(lambda: [torch.full((9,), waiting)]).step.residual_ratio  # noqa: B023 - called at once
        assert math.isnan(ratio) if step == 0 else ratio == waiting
    meter.begin(3)
    meter.gradient(gradient, world_size=2, scale=0.5)
    meter.begin(4)
    assert meter.stats().total.residual_ratio == pytest.approx(math.sqrt((1 + 9) / 2))


def test_nothing_is_known_of_nothing() -> None:
    figures = Meter().stats().total
    assert figures.steps == 0
    assert all(math.isnan(x) for x in (figures.ratio, figures.density, figures.residual_ratio))
    assert figures.sent_bytes == Figures().sent_bytes == 0


def test_a_copy_starts_from_zero() -> None:
    meter = Meter()
    meter.begin(0)
    meter.add("sent_bytes", 1.0)
    assert copy.deepcopy(meter).stats().total.sent_bytes == 0


def test_whoever_stops_listening_stops_alone() -> None:
    with listen(Recorder()) as outer:
        with listen(Recorder()):  # has recorded the same by its end: nothing
            pass
        count("sent_bytes", 1.0)
    assert outer.totals == {"sent_bytes": 1.0}
