"""From events to rows: what counts, what does not, and how the time to a target is found."""

import math
from typing import Any

import pytest

from thinwire_lab.bench.results import Memory, Row, Setting
from thinwire_lab.bench.rows import HEADER_BYTES, Record, first_at, percentiles


def _step(step: int, **changes: float) -> dict[str, Any]:
    parts = {"compute": 0.3, "encode": 0.1, "exchange": 0.5, "decode": 0.1} | {
        key: value for key, value in changes.items() if key in ("compute", "exchange")
    }
    event = {
        "kind": "step",
        "step": step,
        "total": sum(parts.values()),
        "sent_bytes": 1000.0,
        "dense_bytes": 4000.0,
        **parts,
    }
    return event | {"measured": 1132, "packets": 2} | changes


def _record(steps: int = 8, skip: int = 2, recipe: str = "topk") -> Record:
    record = Record(Setting(recipe, 1.0 if recipe == "dense" else 0.01), steps, skip)
    record.add({"kind": "loss", "step": 0, "seconds": 0.0, "bytes": 0, "loss": 5.0})
    for step in range(steps):
        record.add(_step(step, compute=0.3 + 0.01 * step))
    record.add({"kind": "loss", "step": steps, "seconds": 8.0, "bytes": 9000, "loss": 3.0})
    record.add({"kind": "done", "different": []})
    return record


def _row(record: Record, dense: Row | None = None, target: float | None = None) -> Row:
    return record.row(dense=dense, target=target)


def test_the_first_steps_and_those_past_the_end_do_not_count() -> None:
    record = _record()
    record.add(_step(0, compute=100.0))
    record.add(_step(8, compute=100.0))
    assert max(record.step_seconds()) < 2
    assert len(record.step_seconds()) == 6


def test_a_row_holds_what_was_measured() -> None:
    row = _row(_record(), target=4.0)
    assert row.step_seconds.p50 == pytest.approx(1.045)
    split = row.split_seconds
    assert split.compute + split.encode + split.exchange + split.decode == pytest.approx(1.045, abs=0.011)
    assert (row.wire_bytes_per_step.measured, row.wire_bytes_per_step.declared) == (1132, 1000)
    assert row.final_loss == 3.0
    assert row.seconds_to_target == pytest.approx(4.0)
    assert row.speedup_vs_dense is None
    assert row.replicas_identical


def test_dense_is_its_own_measure() -> None:
    dense = _row(_record(recipe="dense"))
    assert dense.speedup_vs_dense == 1.0
    assert dense.seconds_to_target == 8.0
    fast = Record(Setting("topk", 0.01), 8, 2)
    for step in range(8):
        fast.add(_step(step, exchange=0.0))
    fast.add({"kind": "loss", "step": 8, "seconds": 4.0, "bytes": 9, "loss": 3.5})
    assert _row(fast, dense).speedup_vs_dense == pytest.approx(dense.step_seconds.p50 / 0.5)


def test_what_the_handle_holds_is_in_the_row() -> None:
    record = _record()
    assert _row(record).memory is None
    record.add({"kind": "done", "different": [], "memory": {"waiting": 8, "staging": 2, "scratch": 1}})
    assert _row(record).memory == Memory(waiting=8, staging=2, scratch=1)


def test_a_different_replica_is_told() -> None:
    record = _record()
    record.add({"kind": "done", "different": ["weight"]})
    assert not _row(record).replicas_identical


def test_bytes_that_cannot_be_counted_are_null() -> None:
    record = Record(Setting("topk", 0.01), 1, 0)
    event = _step(0)
    del event["measured"], event["packets"]
    record.add(event)
    record.add({"kind": "loss", "step": 1, "seconds": 1.0, "bytes": 1000.0, "loss": 1.0})
    assert _row(record).wire_bytes_per_step.measured is None
    assert record.protocol_overhead() is None


def test_bytes_still_on_their_way_belong_to_the_step_before() -> None:
    record = Record(Setting("topk", 0.01), 4, 1)
    record.add({"kind": "tail", "measured": 999, "packets": 9})
    for step in range(4):
        record.add(_step(step))
        if step in (0, 3):
            record.add({"kind": "tail", "measured": 300, "packets": 1})
    record.add({"kind": "loss", "step": 4, "seconds": 8.0, "bytes": 9000, "loss": 3.0})
    assert _row(record).wire_bytes_per_step.measured == 1132 + 100
    assert record.protocol_overhead() == pytest.approx((2 * 3 + 1) * HEADER_BYTES / 3000)


def test_protocol_overhead_is_headers_over_declared_bytes() -> None:
    assert _record().protocol_overhead() == pytest.approx(2 * HEADER_BYTES / 1000)


@pytest.mark.parametrize(
    ("target", "expected"), [(5.0, 0.0), (4.0, 10.0), (3.5, 15.0), (3.0, 20.0), (2.0, 40.0), (1.9, None)]
)
def test_time_to_target_lies_between_two_looks(target: float, expected: float | None) -> None:
    curve = ((0.0, 5.0), (10.0, 4.0), (20.0, 3.0), (30.0, 3.2), (40.0, 2.0))
    assert first_at(target, curve) == (None if expected is None else pytest.approx(expected))


def test_a_diverged_run_reaches_nothing() -> None:
    assert first_at(1.0, ((0.0, 5.0), (1.0, math.nan), (2.0, math.nan))) is None


def test_percentiles() -> None:
    found = percentiles([float(i) for i in range(11)])
    assert (found.p20, found.p50, found.p80) == (2, 5, 8)
    assert percentiles([3.0]).p80 == 3.0
