"""Exchange laws on real groups of one to five ranks."""

import pytest
import torch
import torch.distributed as dist
from cases import CODECS, EXCHANGES, ExchangeCase, vector
from ranks import RankError, Ranks
from torch import Tensor

from thinwire.codecs import BlockTopK, Codec, SampledThreshold, TopK
from thinwire.exchanges import (
    AllGather,
    AllReduce,
    Link,
)
from thinwire.payloads import Keyed, Sparse

worlds = pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])


def _exchange_all(numel: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return (sum, delivered, own input) of every codec through its exchange."""
    group = dist.group.WORLD
    assert group is not None
    found = {}
    for name, case in CODECS.items():
        payload = case.codec.encode(vector(numel, seed=10 + dist.get_rank()), seed=1)
        mine = payload.dense().clone()
        exchanged = case.exchange.start(payload, group).wait()
        assert torch.equal(payload.dense(), mine), "kept payloads are left alone"
        found[name] = (exchanged.total.dense(), exchanged.delivered.dense(), mine)
    return found


@worlds
def test_the_total_is_the_sum_of_what_every_rank_sent(ranks: Ranks, world_size: int) -> None:
    results = ranks.run(world_size, _exchange_all, 1000)
    for name in CODECS:
        totals, delivered, mine = zip(*(result[name] for result in results), strict=True)
        assert all(torch.equal(total, totals[0]) for total in totals), f"{name}: ranks differ"
        if not CODECS[name].linear:
            continue
        expected = torch.stack(mine).double().sum(dim=0)
        near = 1e-5 if CODECS[name].exact else 2e-2
        torch.testing.assert_close(totals[0].double(), expected, rtol=near, atol=near)
        torch.testing.assert_close(totals[0].double(), torch.stack(delivered).double().sum(dim=0), rtol=near, atol=near)


KEYED: dict[str, Codec] = {
    "topk": TopK(density=0.05),
    "topk, nearly all": TopK(density=0.9),
    "sampled threshold": SampledThreshold(density=0.1),
    "blocks": BlockTopK(density=0.1, block=8),
    "blocks, numbered": BlockTopK(density=0.01, block=2),
    "topk float64": TopK(density=0.05, values=torch.float64),
}
MERGING = {name: case for name, case in EXCHANGES.items() if case.keyed}


def _assembled(codec: Codec, numel: int) -> Keyed:
    """Return a bucket of three tensors, one between them left out."""
    parts = [codec.encode(vector(n, seed=n + dist.get_rank())) for n in (numel, 3, numel // 2)]
    payload = type(parts[0]).assemble(parts, [numel, 0, 2 * numel + 20], 3 * numel + 100)
    assert isinstance(payload, Keyed)
    return payload


def _exchange_keyed(numel: int) -> dict[tuple[str, str], tuple[Tensor, Tensor, Tensor]]:
    """Return (sum, delivered, own input) of every codec through every exchange that merges picks."""
    group = dist.group.WORLD
    assert group is not None
    found = {}
    for codec in KEYED:
        for name, case in MERGING.items():
            payload = _assembled(KEYED[codec], numel)
            mine = payload.dense().clone()
            exchanged = case.exchange.start(payload, group, seeds=[1, 2, 3]).wait()
            assert torch.equal(payload.dense(), mine), "kept payloads are left alone"
            parts = exchanged.delivered.split()
            assert [part.numel for part in parts] == [length for _, length in payload.spans]
            again = torch.zeros_like(mine)
            for (offset, length), part in zip(payload.spans, parts, strict=True):
                again[offset : offset + length] = part.dense()
            assert torch.equal(again, exchanged.delivered.dense())
            found[codec, name] = (exchanged.total.dense(), exchanged.delivered.dense(), mine)
    return found


@worlds
@pytest.mark.parametrize("numel", [50, 1000])
def test_picks_are_merged_and_none_is_lost(ranks: Ranks, world_size: int, numel: int) -> None:
    results = ranks.run(world_size, _exchange_keyed, numel)
    for codec, name in results[0]:
        totals, delivered, mine = zip(*(result[codec, name] for result in results), strict=True)
        assert all(torch.equal(total, totals[0]) for total in totals), f"{name}: ranks differ"
        torch.testing.assert_close(totals[0].double(), torch.stack(delivered).double().sum(dim=0), rtol=1e-5, atol=1e-5)
        if EXCHANGES[name].exact:
            expected = torch.stack(mine).double().sum(dim=0)
            torch.testing.assert_close(totals[0].double(), expected, rtol=1e-5, atol=1e-5)


def _gather_unequal() -> str:
    group = dist.group.WORLD
    assert group is not None
    payload = TopK(density=0.1).encode(vector(100 + dist.get_rank()))
    try:
        AllGather().start(payload, group).wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_ranks_with_other_layouts_are_refused(ranks: Ranks) -> None:
    for message in ranks.run(2, _gather_unequal):
        assert "PayloadError" in message
        assert "expected" in message


def _reduce_sparse() -> None:
    group = dist.group.WORLD
    assert group is not None
    AllReduce().start(TopK(density=0.1).encode(vector(100)), group)


def test_what_is_not_summable_cannot_be_all_reduced(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="use AllGather"):
        ranks.run(1, _reduce_sparse)


@pytest.mark.parametrize("case", EXCHANGES.values(), ids=EXCHANGES)
def test_a_faster_link_never_takes_longer(case: ExchangeCase) -> None:
    exchange = case.exchange
    slow, fast = Link(latency=1e-3, bandwidth=1e7), Link(latency=1e-3, bandwidth=1e8)
    for world_size in range(1, 10):
        assert exchange.seconds(1e6, world_size, fast) <= exchange.seconds(1e6, world_size, slow)
    assert exchange.seconds(1e6, 1, slow) == 0


def test_formulas_by_hand() -> None:
    link = Link(latency=0.5, bandwidth=100.0)
    assert AllReduce().seconds(400, 4, link) == 2 * 3 * (0.5 + 1.0)
    assert AllGather().seconds(400, 4, link) == 3 * (0.5 + 4.0)
    payload = Sparse(indices=torch.zeros(8, dtype=torch.int32), values=torch.zeros(8), numel=99, agreed=True)
    assert AllReduce().sent_bytes(payload, 4) == 1.5 * 32
    assert AllGather().sent_bytes(payload, 4) == 3 * (16 + 32 + 32)
