"""Measuring candidates: what compiles on the first call is not taken for what a call costs."""

import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from ranks import Ranks

from thinwire.exchanges import Link
from thinwire.planner.candidates import candidate
from thinwire.planner.probe import candidates as probe
from thinwire.planner.profile import TRANSPORTS, Cost

SIZES = (100, 10_000, 400_000)
BUDGET = 1.0


def test_a_first_call_that_compiles_costs_no_sizes(ranks: Ranks) -> None:
    (cost,) = ranks.run(1, _slow_at_first)
    assert [size for size, _ in cost.encode.points] == [100, 10_000, 400_000]
    assert cost.encode(400_000) < BUDGET / 2


def _slow_at_first() -> Cost:
    calls: list[int] = []
    step = probe._step

    def slow(*arguments: Any) -> Any:
        if not calls:
            time.sleep(BUDGET)
        calls.append(1)
        return step(*arguments)

    links = {transport: Link(latency=1e-4, bandwidth=1e9) for transport in TRANSPORTS}
    group, wanted = dist.group.WORLD, [candidate("sampled_topk:0.01")]
    assert group is not None
    with patch.object(probe, "_step", slow):
        found = probe.probe_candidates(wanted, group, torch.device("cpu"), links, SIZES, seconds=BUDGET)
    return found["sampled_topk:0.01"]
