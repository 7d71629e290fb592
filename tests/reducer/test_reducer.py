"""Reducers on buckets: the mean everywhere, one collective each, and wrappers that hand on."""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import EXCHANGES, MEMORIES, RECIPES, vector
from ranks import Ranks, told
from torch import Tensor

from thinwire import recipes, trace
from thinwire.codecs import Codec, Identity, TopK
from thinwire.exchanges import AllGather, AllReduce, Exchange
from thinwire.kernels.parts import Cut
from thinwire.memories import ErrorFeedback, FadingMomentum, Memory, MomentumCorrection, NoMemory, Noted
from thinwire.payloads import Dense
from thinwire.reducer import (
    Bucket,
    Compressed,
    MinimumSize,
    PerTensor,
    PowerSGD,
    Reducer,
    Round,
    Segment,
    WarmUp,
    WithRows,
)
from thinwire.signals import Signal

SEGMENTS = (
    Segment(name="large", offset=0, length=600, shape=(20, 30)),
    Segment(name="small", offset=600, length=20, shape=(20,)),
    Segment(name="medium", offset=620, length=200, shape=(10, 5, 4)),
    Segment(name="tiny", offset=820, length=3, shape=(3,)),
)
NUMEL = 823


def _round(step: int = 0) -> Round:
    group = dist.group.WORLD
    assert group is not None
    return Round(step=step, group=group, scale=1 / group.size())


def _reduce(recipe: Reducer, flat: Tensor, at: Round) -> bool:
    return recipe.reduce(Bucket(flat=flat, segments=SEGMENTS), at).wait().finite


def _mean_of_everything() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return (Σ of means, Σ of own gradients, what waits) after some steps of every recipe without momentum."""
    found = {}
    for name, case in RECIPES.items():
        if case.momentum or not case.conserving:
            continue
        recipe, means, mine = case.make(), torch.zeros(NUMEL), torch.zeros(NUMEL)
        for step in range(5):
            flat = vector(NUMEL, seed=100 * dist.get_rank() + step)
            mine += flat
            assert _reduce(recipe, flat, _round(step))
            means += flat
            for memory in recipe.memories():
                memory.commit()
        waiting = torch.zeros(NUMEL)
        for memory in recipe.memories():
            for segment in SEGMENTS:
                if "residual" in memory.state().get(segment.name, {}):
                    waiting[segment.offset : segment.offset + segment.length] += memory.state()[segment.name][
                        "residual"
                    ]
        found[name] = (means, mine, waiting)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.first(2)
def test_means_and_what_waits_add_up(ranks: Ranks, world_size: int) -> None:
    results = ranks.run(world_size, _mean_of_everything)
    for name in results[0]:
        means, mine, waiting = zip(*(result[name] for result in results), strict=True)
        expected = torch.stack(mine).sum(dim=0) / world_size
        torch.testing.assert_close(means[0] + torch.stack(waiting).sum(dim=0), expected, rtol=1e-4, atol=1e-5)
        assert all(torch.equal(mean, means[0]) for mean in means)


def _fading(recipe: Reducer, dtype: torch.dtype) -> float:
    """Return by how much a recipe misses Σ M ← β·Σ M + ḡ − mean, over some steps. Memories without a decay take 0.5."""
    expected, worst = torch.zeros(NUMEL, dtype=dtype), 0.0
    faders = [part for m in recipe.memories() for part in m.parts if isinstance(part, FadingMomentum)]
    for fading in faders:
        fading.adopt({segment.name: 0.5 for segment in SEGMENTS})
    decays = {0.5 if fading.decay is None else fading.decay for fading in faders}
    for step in range(5):
        flat = vector(NUMEL, seed=100 * dist.get_rank() + step, dtype=dtype)
        mean = flat / dist.get_world_size()
        dist.all_reduce(mean)
        assert _reduce(recipe, flat, _round(step))
        waiting = torch.zeros_like(flat)
        for memory in recipe.memories():
            memory.commit()
        for fading, segment in itertools.product(faders, SEGMENTS):
            held = fading.state().get(segment.name, {}).get("momentum", torch.zeros(segment.length))
            waiting[segment.offset : segment.offset + segment.length] += held
        dist.all_reduce(waiting)
        expected = min(decays) * expected + mean - flat
        worst = max(worst, float((waiting - expected).abs().max()))
        expected = waiting  # so that in float32, errors do not add up
    return worst


def _faded(exchange: Exchange) -> Reducer:
    return Compressed(memory=FadingMomentum(decay=0.9), codec=TopK(density=0.1), exchange=exchange)


FADING: dict[str, Callable[[], Reducer]] = {
    **{name: partial(_faded, case.exchange) for name, case in EXCHANGES.items() if case.keyed},
    **{
        name: case.make
        for name, case in RECIPES.items()
        if any(isinstance(part, FadingMomentum) for memory in case.make().memories() for part in memory.parts)
    },
}
"""Where momentum fades, means and what waits do not add up to all there was. This law holds in place of that."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FADING)
def test_what_waits_fades_and_is_reduced_by_the_mean(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    assert max(ranks.run(3, _fading, FADING[name](), dtype)) < (1e-12 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("exchange", [case.exchange for case in EXCHANGES.values() if not case.exchange.uneven])
def test_rows_need_an_exchange_that_takes_any_number(exchange: Exchange) -> None:
    with pytest.raises(TypeError, match="use UnionAllReduce"):
        WithRows(rows=exchange, dense=recipes.dense())


def _rows(exchange: Exchange) -> Tensor:
    """Reduce a gradient of which rank r touches r rows, row 1 among them."""
    rank = dist.get_rank()
    keys = torch.arange(1, 1 + rank)
    gradient = torch.sparse_coo_tensor(keys[None], torch.ones(rank, 2, 3), (9, 2, 3), check_invariants=False)
    mean = WithRows(rows=exchange, dense=recipes.dense()).reduce_rows(gradient, "w", _round()).wait()
    assert mean.is_sparse
    return mean.to_dense()


@pytest.mark.parametrize("exchange", [case.exchange for case in EXCHANGES.values() if case.exchange.uneven])
def test_ranks_may_touch_different_rows_and_none(ranks: Ranks, exchange: Exchange) -> None:
    for mean in ranks.run(4, _rows, exchange):
        assert mean[:, 0, 0].tolist() == [0, 0.75, 0.5, 0.25, 0, 0, 0, 0, 0]
        assert torch.equal(mean, mean[:, :1, :1].expand_as(mean))


def _one_alone() -> None:
    recipe = Compressed(memory=ErrorFeedback(), codec=TopK(density=0.1), exchange=AllGather())
    _reduce(recipe, vector(NUMEL), _round(0))
    (memory,) = recipe.memories()
    memory.commit()
    before = {name: fields["residual"].clone() for name, fields in memory.state().items()}
    _reduce(recipe, vector(NUMEL, seed=1), _round(1))
    memory.rollback(["large"])
    memory.commit()
    for segment in SEGMENTS[:3]:
        assert torch.equal(memory.state()[segment.name]["residual"], before[segment.name]) == (segment.name == "large")


def test_a_step_can_be_called_off_for_one_parameter_alone(ranks: Ranks) -> None:
    ranks.run(2, _one_alone)


def _switches() -> list[bool]:
    """Whether the mean is complete, by step."""
    memory = ErrorFeedback()
    recipe = WarmUp(
        steps=2,
        first=Compressed(memory=memory, codec=Identity(), exchange=AllReduce()),
        then=Compressed(memory=memory, codec=TopK(density=0.1), exchange=AllGather()),
    )
    assert len(recipe.memories()) == 1
    complete = []
    for step in range(4):
        flat = vector(NUMEL, seed=1)
        _reduce(recipe, flat, _round(step))
        memory.commit()
        complete.append(bool(flat.all()))
    return complete


def test_warm_up_hands_over_at_its_step(ranks: Ranks) -> None:
    assert ranks.run(2, _switches) == [[True, True, False, False]] * 2


def test_a_warm_up_leaves_no_residual_behind() -> None:
    topk, other = recipes.topk(), recipes.topk()
    with pytest.raises(ValueError, match=r"first keeps a residual in ErrorFeedback.*, which then lacks"):
        WarmUp(steps=2, first=topk, then=other)
    assert WarmUp(steps=2, first=topk, then=recipes.dense(memory=topk.memories()[-1])).memories()


IN_TWO_PLACES: dict[str, Callable[[Reducer], Reducer]] = {
    "per tensor": lambda one: PerTensor(reducers={"one": one}, chosen={"small": "one"}, otherwise=one),
    "by size": lambda one: MinimumSize(minimum_size=100, small=one, large=one),
    "by step": lambda one: WarmUp(steps=1, first=one, then=one),
}


def _once_and_in_two_places(name: str) -> list[Tensor]:
    """Return the mean and the residuals of a recipe, and of another that has it in two places."""
    found = []
    for make in (lambda one: one, IN_TWO_PLACES[name]):
        recipe, flat = make(recipes.topk(density=0.1, minimum_size=0)), vector(NUMEL, seed=dist.get_rank())
        _reduce(recipe, flat, _round())
        (memory,) = [each for each in recipe.memories() if each.stateful]
        memory.commit()
        found.append(torch.cat([flat, *memory.waiting()]))
    return found


@pytest.mark.parametrize("name", IN_TWO_PLACES)
def test_a_reducer_in_two_places_reduces_each_tensor_once(name: str, ranks: Ranks) -> None:
    for alone, twice in ranks.run(2, _once_and_in_two_places, name):
        assert torch.equal(alone, twice)


def _declared_bytes(numel: int) -> float:
    recipe = MinimumSize(
        minimum_size=numel,
        small=recipes.dense(),
        large=Compressed(memory=NoMemory(), codec=TopK(density=0.1), exchange=AllGather()),
    )
    with trace.listen(trace.Recorder()) as recorder:
        flat = vector(NUMEL)
        _reduce(recipe, flat, _round())
    assert {name for name, _, _ in recorder.spans} == {"encode", "exchange", "decode"}
    return recorder.totals["sent_bytes"]


@pytest.mark.parametrize(("minimum", "kept", "dense"), [(0, 60 + 2 + 20 + 1, 0), (100, 60 + 20, 23), (10**6, 0, 823)])
def test_minimum_size_divides_the_bucket(ranks: Ranks, minimum: int, kept: int, dense: int) -> None:
    named = [3 * kept, kept + (823 - 1) // 8 + 1]  # Elias-Fano of 83 or 80 of 823: bits low, bits high
    sparse = 16 + sum(-(-bits // 64) * 8 for bits in (32 * kept, *named)) if kept else 0
    for found in ranks.run(3, _declared_bytes, minimum):
        assert found == pytest.approx(2 * sparse + 4 / 3 * 4 * dense)


def test_neighbours_are_joined_only_where_they_touch() -> None:
    bucket = Bucket(flat=torch.arange(NUMEL), segments=(SEGMENTS[3], SEGMENTS[0], SEGMENTS[1]))
    joined = Bucket(flat=bucket.flat, segments=bucket.segments.coalesced)
    assert [(segment.offset, segment.length) for segment in joined.segments] == [(0, 620), (820, 3)]
    assert torch.equal(torch.cat(list(joined.views())), torch.cat([torch.arange(620), torch.arange(820, 823)]))


def test_seeds_depend_on_step_and_name_alone() -> None:
    group = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]  # the stubs know only the other constructor
    a, b = (Round(step=step, group=group, scale=1.0) for step in (1, 2))
    assert a.seed("w") == a.seed("w")
    assert len({a.seed("w"), b.seed("w"), a.seed("v")}) == 3


@pytest.mark.parametrize("make", [case.make for case in RECIPES.values()], ids=RECIPES)
def test_every_recipe_is_new_at_each_call_and_says_what_it_is(make: Callable[[], Reducer]) -> None:
    first, second = make(), make()
    assert repr(first) == repr(second)
    assert not any(a is b for a in first.memories() for b in second.memories() if a.stateful)


def test_dense_payloads_keep_momentum() -> None:
    memory = MomentumCorrection(momentum=0.5)
    for expected in (1.0, 1.5, 1.75):
        payload = Identity().encode_signal(memory.compensate("w", torch.ones(3), 1.0))
        assert torch.equal(payload.dense(), torch.full((3,), expected))
        memory.retain(["w"], payload)
        memory.commit()


@pytest.mark.parametrize("low_rank", [False, True])
def test_ranks_round_the_same_gradient_each_on_their_own(low_rank: bool, ranks: Ranks) -> None:
    one, other = ranks.run(2, _rounded_residual, low_rank)
    assert not torch.equal(one, other)


def _rounded_residual(low_rank: bool) -> Tensor:
    memory = Noted(memory=ErrorFeedback(dtype=torch.bfloat16))
    recipe: Reducer = Compressed(memory=memory, codec=TopK(density=0.1))
    if low_rank:
        recipe = PowerSGD(rank=1, memory=memory, small=recipes.dense())
    _reduce(recipe, vector(NUMEL), _round())
    memory.commit()
    return memory.state()["large"]["residual"]


@dataclass(frozen=True, kw_only=True)
class _Blind(Codec):
    """Sends zeros without having looked."""

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Dense:
        return Dense(values=torch.zeros(signal.numel))


@pytest.mark.parametrize("make", MEMORIES.values(), ids=MEMORIES)
def test_a_codec_that_never_computes_its_signal_is_an_error(make: Callable[[], Memory], ranks: Ranks) -> None:
    (said,) = ranks.run(1, _reduce_blindly, make())
    expected = "_Blind() never computed its signal; call signal.tensor()" if make().stateful else "nothing"
    assert all(expected in each for each in said)


def _reduce_blindly(memory: Memory) -> list[str]:
    reducer, at = Compressed(memory=memory, codec=_Blind(), exchange=AllReduce()), _round()
    return [
        told(lambda: reducer.prepare(at.group, [torch.ones(8)])),
        told(lambda: reducer.reduce(Bucket(flat=torch.ones(NUMEL), segments=SEGMENTS), at).wait()),
    ]


@dataclass(frozen=True, kw_only=True)
class _Longer(Codec):
    """Says that it stands for more elements than it was given."""

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Any:
        return Dense(values=torch.cat([signal.tensor(), torch.ones(1)])) if seed else None


@pytest.mark.parametrize(("seed", "got"), [(0, "NoneType with numel=None"), (1, "Dense with numel=4")])
def test_a_payload_of_another_length_is_refused_before_it_is_written(seed: int, got: str) -> None:
    codec, signals = _Longer(), NoMemory().compensate_each(["w"], [torch.ones(3)], 1.0, [0])
    expected = re.escape(f"_Longer() encoded 3 elements as {got}; expected numel=3")
    with pytest.raises(TypeError, match=expected):
        codec.encode(torch.ones(3), seed=seed)
    with pytest.raises(TypeError, match=expected):
        codec.encode_signals(signals, seeds=[seed], cut=Cut([0], [3]), numel=3)
