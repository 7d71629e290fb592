"""Two ranks on Gloo gather long tensors in pieces, and get what they get of whole ones."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CODECS, vector
from ranks import Ranks, told
from torch import Tensor

from thinwire.collectives import all_gather, all_to_all, groups

SIZES = [1, 99, 100, 101, 1000, 1601, 5001]
WHOLE = 1 << 40


def _group(piece: int) -> dist.ProcessGroup:
    groups.PIECE = piece
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _calls(start: Any) -> int:
    """Return how many collectives this starts, and wait for it."""
    group: Any = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    start().wait()
    return int(group._get_sequence_number_for_group() - before)


def _gathered(piece: int) -> list[tuple[int, Tensor]]:
    """Return, for each size and dtype, the number of collectives and what they gathered."""
    group, rank = _group(piece), dist.get_rank()
    found = []
    try:
        for numel in SIZES:
            for mine in (torch.arange(numel).add(rank).to(torch.uint8), torch.arange(numel) + rank / 2):
                out = torch.full((group.size() * numel,), 7).to(mine.dtype)
                found.append((_calls(lambda out=out, mine=mine: all_gather(out, mine, group)), out))
    finally:
        groups.PIECE = 1 << 17
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_pieces_gather_the_same(ranks: Ranks, world_size: int) -> None:
    whole, cut = (ranks.run(world_size, _gathered, piece) for piece in (WHOLE, 100))
    for one, other in zip(whole, cut, strict=True):
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one, other, strict=True))
    assert {calls for calls, _ in whole[0]} == {1}
    counts = [calls for calls, _ in cut[0]]
    assert counts[::2] == ([1, 1, 1, 2, 10, 16, 16] if world_size == 2 else [1] * len(SIZES))
    assert max(counts) <= groups.PIECES


def _swapped(piece: int, sizes: Sequence[int]) -> Tensor:
    group, rank = _group(piece), dist.get_rank()
    mine = torch.arange(sum(sizes)) + 10_000 * rank
    out = mine.new_zeros(2 * sizes[rank])
    try:
        all_to_all(out, mine, sizes, group).wait()
    finally:
        groups.PIECE = 1 << 17
    return out


@pytest.mark.parametrize("sizes", [(700, 700), (700, 690), (700, 0), (3, 900), (0, 0)], ids=str)
def test_pieces_swap_the_same(ranks: Ranks, sizes: tuple[int, int]) -> None:
    whole, cut = (ranks.run(2, _swapped, piece, sizes) for piece in (WHOLE, 100))
    for rank in range(2):
        assert torch.equal(whole[rank], cut[rank])
        start = sum(sizes[:rank])
        own = torch.arange(start, start + sizes[rank])
        assert torch.equal(cut[rank], torch.cat([own, own + 10_000]))


def _exchanged(piece: int) -> list[tuple[Tensor, float]]:
    group = _group(piece)
    try:
        done = [
            case.exchange.start(case.codec.encode(vector(3000, seed=dist.get_rank()), seed=1), group).wait()
            for case in CODECS.values()
        ]
    finally:
        groups.PIECE = 1 << 17
    return [(each.total.dense(), each.sent_bytes) for each in done]


def test_every_codec_has_the_same_sum_of_pieces(ranks: Ranks) -> None:
    for whole, cut in zip(*(ranks.run(2, _exchanged, piece) for piece in (WHOLE, 64)), strict=True):
        for name, (one, sent), (other, also_sent) in zip(CODECS, whole, cut, strict=True):
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
