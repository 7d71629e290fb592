"""Exchange laws on real groups of one to five ranks."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import CODECS, EXCHANGES, ExchangeCase, vector
from ranks import RankError, Ranks, told
from torch import Tensor
from torch.futures import Future

from thinwire.codecs import (
    BlockTopK,
    Cast,
    Codec,
    CountSketch,
    HashedSlots,
    LaplaceThreshold,
    RandomK,
    SampledThreshold,
    TopK,
)
from thinwire.collectives import Staging, taking
from thinwire.exchanges import (
    AllGather,
    AllReduce,
    Exchange,
    GlobalTopKTree,
    Link,
    OwnerSharded,
    RecursiveDoubling,
    UnionAllReduce,
)
from thinwire.exchanges.tree import Merge
from thinwire.formats import Sign
from thinwire.payloads import Keyed, Sparse
from thinwire_lab.studies.exchange_bytes import sent_bytes

worlds = pytest.mark.parametrize("world_size", [1, 2, 3, 5, pytest.param(4, marks=pytest.mark.slow)])


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
    "hashed slots": HashedSlots(density=0.1),
    "random-k": RandomK(density=0.1),
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
            again = torch.zeros_like(mine)
            exchanged.delivered.subtract_from([again[offset : offset + length] for offset, length in payload.regions])
            assert torch.equal(-again, exchanged.delivered.dense())
            found[codec, name] = (exchanged.total.dense(), exchanged.delivered.dense(), mine)
    return found


@pytest.mark.grid
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
        assert "attach the same recipe" in message


def _nothing_arrives() -> str:
    """Gather twice into one buffer; the second time the collective ends, and nothing has been written."""
    group = dist.group.WORLD
    assert group is not None
    staging, payload = Staging(), TopK(density=0.1).encode(torch.arange(100.0))
    nothing: Future[None] = Future()
    nothing.set_result(None)
    lost = patch("thinwire.exchanges.all_gather.all_gather", lambda out, mine, group: nothing)

    def gather() -> object:
        staging.turn()
        with taking(staging) as taken:
            total = AllGather().start(payload, group).wait().summed
        staging.keep(taken)
        return total

    gather()
    with lost:
        return told(gather)


def test_what_an_earlier_step_received_does_not_pass_for_what_this_one_does(ranks: Ranks) -> None:
    for said in ranks.run(2, _nothing_arrives):
        assert "version 0, not 2" in said


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
    assert sent_bytes(AllReduce(), payload, 4) == 1.5 * 32
    assert sent_bytes(AllGather(), payload, 4) == 3 * (16 + 32 + 8 + 8)


def _tree(numel: int, merge: Merge, exact_values: bool) -> tuple[Tensor, Tensor, Tensor, int]:
    group = dist.group.WORLD
    assert group is not None
    payload = TopK(density=0.1).encode(vector(numel, seed=dist.get_rank(), dtype=torch.float64))
    exchange = GlobalTopKTree(merge=merge, exact_values=exact_values)
    exchanged = exchange.start(payload, group).wait()
    total = exchanged.total
    assert isinstance(total, Sparse)
    return total.dense(), exchanged.delivered.dense(), payload.dense(), total.indices.numel()


@pytest.mark.parametrize(
    "world_size", [2, 3, 5, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 6, 7, 8, 9))]
)
def test_the_tree_conserves_mass(ranks: Ranks, world_size: int) -> None:
    """k = 20 of 200. What is delivered adds up to the total, exactly but for rounding."""
    for exact_values in (False, True):
        totals, delivered, _, counts = zip(*ranks.run(world_size, _tree, 200, "exact", exact_values), strict=True)
        assert set(counts) == {20}
        torch.testing.assert_close(totals[0], torch.stack(delivered).sum(dim=0), rtol=0, atol=1e-12)


def test_the_papers_rule_loses_mass(ranks: Ranks) -> None:
    lost = 0
    for numel in range(200, 240, 4):
        totals, delivered, _, _ = zip(*ranks.run(8, _tree, numel, "paper", False), strict=True)
        lost += bool((totals[0] - torch.stack(delivered).sum(dim=0)).abs().max() > 1e-9)
    assert lost >= 5, "about 17 of 20 vectors do (427 of 500 at this size)"


def test_exact_values_are_the_true_sums(ranks: Ranks) -> None:
    totals, _, mine, _ = zip(*ranks.run(5, _tree, 200, "exact", True), strict=True)
    chosen = totals[0] != 0
    torch.testing.assert_close(totals[0][chosen], torch.stack(mine).sum(dim=0)[chosen], rtol=0, atol=1e-12)


def _padded_exact_values() -> tuple[Tensor, Tensor]:
    group = dist.group.WORLD
    assert group is not None
    parts = [LaplaceThreshold(density=0.2).encode(vector(n, seed=n + dist.get_rank())) for n in (60, 40)]
    payload = type(parts[0]).assemble(parts, [40, 0], 100)
    exchanged = GlobalTopKTree(exact_values=True).start(payload, group).wait()
    return exchanged.total.dense(), exchanged.delivered.dense()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_tree_takes_padding(ranks: Ranks, world_size: int) -> None:
    totals, delivered = zip(*ranks.run(world_size, _padded_exact_values), strict=True)
    assert all(torch.equal(total, totals[0]) for total in totals)
    torch.testing.assert_close(totals[0], torch.stack(delivered).sum(dim=0))


@pytest.mark.parametrize("packed", [torch.bfloat16, "bf16"])
def test_what_does_not_encode_cannot_be_packed(packed: Any) -> None:
    with pytest.raises(TypeError, match="use Cast"):
        UnionAllReduce(packed=packed)


def test_an_unknown_merge_is_refused() -> None:
    with pytest.raises(ValueError, match="exact, paper"):
        GlobalTopKTree(merge="none")  # type: ignore[arg-type]


def _packed(codec: Codec | None, numel: int) -> tuple[Tensor, Tensor, float]:
    group = dist.group.WORLD
    assert group is not None
    payload = BlockTopK(density=0.2, block=8).encode(vector(numel, seed=dist.get_rank()))
    exchanged = UnionAllReduce(packed=codec).start(payload, group, seeds=[5]).wait()
    return exchanged.total.dense(), payload.dense(), exchanged.sent_bytes


def test_the_packed_union_may_travel_narrow_or_as_a_sketch(ranks: Ranks) -> None:
    errors, sent = [], []
    for codec in (None, Cast(values=torch.bfloat16), CountSketch()):
        totals, mine, nbytes = zip(*ranks.run(3, _packed, codec, 4000), strict=True)
        assert all(torch.equal(total, totals[0]) for total in totals)
        exact = torch.stack(mine).sum(dim=0)
        assert not bool(totals[0][exact == 0].abs().max() > 0) or codec is not None
        errors.append(float((totals[0] - exact).square().sum() / exact.square().sum()))
        sent.append(nbytes[0])
    assert errors[0] < 1e-12
    assert errors[1] < 1e-4
    assert 0.5 < errors[2] < 3
    bits = 2 * 2 / 3 * 63
    assert (sent[1] - bits) / (sent[0] - bits) == pytest.approx(0.5)
    assert (sent[2] - bits) / (sent[0] - bits) == pytest.approx(0.5, abs=0.01)


def _wrong(exchange: Exchange, codec: Codec) -> str:
    group = dist.group.WORLD
    assert group is not None
    try:
        started = exchange.start(codec.encode(vector(500)), group)
    except TypeError as error:
        return f"at once: {error}"
    try:
        started.wait()
    except TypeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("exchange", "codec", "message"),
    [
        (GlobalTopKTree(), Cast(), "at once: GlobalTopKTree merges sparse and block-sparse payloads; got Dense"),
        (
            OwnerSharded(),
            TopK(density=0.1, values=Sign()),
            "at once: OwnerSharded adds values, and codes",
        ),
        (UnionAllReduce(packed=RandomK(density=0.5)), TopK(density=0.1), "cannot be summed over ranks"),
        (UnionAllReduce(packed=Cast(values=Sign())), TopK(density=0.1), "cannot be summed over ranks"),
    ],
)
def test_what_cannot_be_merged_is_refused_with_the_fix(
    ranks: Ranks, exchange: Exchange, codec: Codec, message: str
) -> None:
    for found in ranks.run(2, _wrong, exchange, codec):
        assert message in found
    assert len(ranks.run(2, _packed, None, 100)) == 2, "a communication thread that raised goes on"


def _uneven_groups() -> Tensor:
    dist.new_group([0, 1])
    group = dist.group.WORLD
    assert group is not None
    return RecursiveDoubling().start(TopK(density=0.1).encode(torch.ones(10)), group).wait().total.dense()


def test_ranks_may_be_in_different_numbers_of_groups(ranks: Ranks) -> None:
    assert all(float(total.sum()) == 3 for total in ranks.run(3, _uneven_groups))


def _uneven_subgroup() -> str:
    extra = dist.new_group([0])
    group = dist.new_group([0, 1])
    try:
        if dist.get_rank() < 2:
            OwnerSharded().start(TopK(density=0.1).encode(torch.ones(10)), group).wait()
    except RuntimeError as error:
        return str(error)
    assert extra is not None
    return "no error"


def test_a_subgroup_that_torch_cannot_copy_is_refused(ranks: Ranks) -> None:
    assert ["same number of groups" in message for message in ranks.run(3, _uneven_subgroup)] == [True, True, False]


def _switches_to_dense(density: float) -> tuple[float, float]:
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(dist.get_rank())
    payload = TopK(density=density).encode(torch.randn(3000, generator=generator))
    exchange = RecursiveDoubling()
    return exchange.start(payload, group).wait().sent_bytes, sent_bytes(exchange, payload, group.size())


@pytest.mark.parametrize(("density", "dense"), [(0.01, False), (0.4, False), (0.8, True)])
def test_doubling_sends_zeros_once_they_are_shorter(ranks: Ranks, density: float, dense: bool) -> None:
    sent, predicted = zip(*ranks.run(4, _switches_to_dense, density), strict=True)
    assert sum(sent) / 4 == pytest.approx(predicted[0], rel=0.02)
    first = 8 + TopK(density=density).encode(vector(3000)).nbytes
    assert (max(sent) == first + 8 + 16 + 4 * 3000) == dense
