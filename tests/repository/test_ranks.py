"""The ranks that tests share: what one test leaves in their group never reaches the next."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import ranks as shared
import torch
import torch.distributed as dist
from ranks import RankError, Ranks


def _sum() -> tuple[int, float]:
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return id(dist.group.WORLD), float(x)


def _unmatched() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.full((1,), 100.0), async_op=True)


def _another_group() -> None:
    dist.new_group([0, 1])


def _process(fail: bool = False) -> int:
    assert not fail, "as asked"
    return os.getpid()


def test_ranks_stay_in_their_group() -> None:
    ranks = Ranks()
    groups = [ranks.run(2, _sum) for _ in range(3)]
    assert groups[0] == groups[1] == groups[2]
    assert [total for _, total in groups[0]] == [3.0, 3.0]
    assert [total for _, total in ranks.run(3, _sum)] == [6.0, 6.0, 6.0]
    assert [total for _, total in ranks.run(2, _sum)] == [3.0, 3.0]
    ranks.stop()


def _imported() -> list[str]:
    return list(sys.modules["preloaded"].IMPORTED)


def test_ranks_begin_with_their_imports_done(ranks: Ranks) -> None:
    """Nobody would hear of it if they were not: each rank would import everything anew."""
    (imported,) = ranks.run(1, _imported)
    assert {"thinwire", "torch.distributed.checkpoint", __name__} <= {*imported}


@pytest.mark.parametrize("left", [_unmatched, _another_group])
def test_what_is_left_in_a_group_is_left_with_the_group(ranks: Ranks, left: object) -> None:
    assert callable(left)
    ranks.run(2, left)
    assert [total for _, total in ranks.run(2, _sum)] == [3.0, 3.0]
    assert ranks.run(2, _groups) == [1, 1]


def _groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def test_ranks_that_fail_are_replaced(ranks: Ranks) -> None:
    before = ranks.run(2, _process)
    with pytest.raises(RankError, match="as asked"):
        ranks.run(2, _process, True)
    assert not set(before) & set(ranks.run(2, _process))


@contextmanager
def _impatient() -> Iterator[None]:
    """Within, ranks may idle for half a second: have them started before."""
    with patch.object(shared, "PATIENCE", 0.5), patch.object(shared, "GLANCE", 0.1):
        yield


def _stuck() -> None:
    threading.Event().wait()


def _computing() -> None:
    end = time.process_time() + 1.5
    while time.process_time() < end:
        pass


def test_ranks_that_are_stuck_are_replaced(ranks: Ranks) -> None:
    before = ranks.run(2, _process)
    with _impatient(), pytest.raises(RankError, match="idled"):
        ranks.run(2, _stuck)
    assert not set(before) & set(ranks.run(2, _process))


@pytest.mark.slow
def test_ranks_that_compute_for_long_are_waited_for(ranks: Ranks) -> None:
    ranks.run(2, _process)
    with _impatient():
        ranks.run(2, _computing)
