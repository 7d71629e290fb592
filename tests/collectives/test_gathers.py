"""Ranks on Gloo send directly to each other, and get what torch's own collectives get."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CODECS, vector
from ranks import Ranks, told
from torch import Tensor

from thinwire.collectives import all_gather, all_to_all, gathers

SIZES = [1, 99, 1000, 100_001]


@contextmanager
def _group(directly: bool) -> Iterator[dist.ProcessGroup]:
    assert dist.group.WORLD is not None
    kept = gathers._DIRECT
    gathers._DIRECT = kept if directly else 0
    try:
        yield dist.group.WORLD
    finally:
        gathers._DIRECT = kept


def _calls(start: Any) -> int:
    """Return how many collectives and messages this starts, and wait for it."""
    group: Any = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    start().wait()
    return int(group._get_sequence_number_for_group() - before)


def _gathered(directly: bool) -> list[tuple[int, Tensor]]:
    """Return, for each size and dtype, their number and what they gathered."""
    found = []
    with _group(directly) as group:
        for numel in SIZES:
            for mine in (torch.arange(numel).add(group.rank()).to(torch.uint8), torch.arange(numel) + group.rank() / 2):
                out = torch.full((group.size() * numel,), 7).to(mine.dtype)
                found.append((_calls(lambda out=out, mine=mine: all_gather(out, mine, group)), out))
    return found


@pytest.mark.parametrize("world_size", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3)), 4])
def test_direct_gathers_get_the_same(ranks: Ranks, world_size: int) -> None:
    torchs, direct = (ranks.run(world_size, _gathered, directly) for directly in (False, True))
    for one, other in zip(torchs, direct, strict=True):
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one, other, strict=True))
    assert {calls for calls, _ in torchs[0]} == {1}
    assert {calls for calls, _ in direct[0]} == {2 * (world_size - 1) or 1}  # a message each way with each other rank


def _many(count: int) -> bool:
    """Start many gathers, of which the last end before anybody waits for the first; one more by torch between."""
    group = dist.group.WORLD
    assert group is not None
    inputs = [torch.full((1 + 1000 * number,), 100.0 * number + group.rank()) for number in range(count)]
    outs = [x.new_empty(group.size() * x.numel()) for x in inputs]
    futures = []
    for number, (out, x) in enumerate(zip(outs, inputs, strict=True)):
        futures.append(all_gather(out, x, group))
        if number == count // 2:
            dist.all_reduce(torch.ones(3))
    for future in reversed(futures):
        future.wait()
    expected = [
        torch.cat([torch.full((1 + 1000 * k,), 100.0 * k + rank) for rank in range(group.size())]) for k in range(count)
    ]
    return all(torch.equal(out, x) for out, x in zip(outs, expected, strict=True))


def test_many_gathers_at_once_do_not_mix(ranks: Ranks) -> None:
    assert all(ranks.run(3, _many, 20))


def _swapped(directly: bool, sizes: Sequence[int]) -> Tensor:
    with _group(directly) as group:
        mine = torch.arange(sum(sizes)) + 10_000 * group.rank()
        out = mine.new_zeros(group.size() * sizes[group.rank()])
        all_to_all(out, mine, sizes, group).wait()
    return out


@pytest.mark.parametrize("sizes", [(700, 700), (700, 690), (700, 0), (3, 900), (0, 0), (5, 0, 300)], ids=str)
def test_direct_swaps_get_the_same(ranks: Ranks, sizes: tuple[int, ...]) -> None:
    torchs, direct = (ranks.run(len(sizes), _swapped, directly, sizes) for directly in (False, True))
    for rank in range(len(sizes)):
        assert torch.equal(torchs[rank], direct[rank])
        start = sum(sizes[:rank])
        own = torch.arange(start, start + sizes[rank])
        assert torch.equal(direct[rank], torch.cat([own + 10_000 * source for source in range(len(sizes))]))


def _exchanged(directly: bool) -> list[tuple[Tensor, float]]:
    with _group(directly) as group:
        done = [
            case.exchange.start(case.codec.encode(vector(3000, seed=dist.get_rank()), seed=1), group).wait()
            for case in CODECS.values()
        ]
    return [(each.total.dense(), each.sent_bytes) for each in done]


def test_every_codec_has_the_same_sum(ranks: Ranks) -> None:
    for torchs, direct in zip(*(ranks.run(3, _exchanged, directly) for directly in (False, True)), strict=True):
        for name, (one, sent), (other, also_sent) in zip(CODECS, torchs, direct, strict=True):
            assert torch.equal(one, other), name
            assert sent == also_sent, name


def _alone(rank_that_goes: int) -> str:
    if dist.get_rank() == rank_that_goes:
        dist.destroy_process_group()
        return "gone"
    x = torch.zeros(1 << 20)
    out = x.new_empty(2 * x.numel())
    group = dist.group.WORLD
    assert group is not None
    return told(all_gather(out, x, group).then(lambda done: done.value()).wait)


def test_a_lost_peer_is_an_error_in_the_callback(ranks: Ranks) -> None:
    gone, message = ranks.run(2, _alone, 0)
    assert gone == "gone"
    assert "RuntimeError" in message
