"""Recipes are made of what they say, and pass on what they are given."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from cases import vector
from ranks import Ranks
from torch import Tensor

from thinwire import codecs, exchanges, formats, recipes, schedules
from thinwire.memories import ErrorFeedback
from thinwire.reducer import Bucket, Compressed, MinimumSize, PowerSGD, Reducer, Round, Segment, WarmUp, WithRows

NUMEL = 3000
SEGMENT = Segment(name="w", offset=0, length=NUMEL, shape=(50, 60))


def _large(recipe: Reducer) -> Compressed:
    recipe = recipe.dense if isinstance(recipe, WithRows) else recipe
    assert isinstance(recipe, MinimumSize)
    assert isinstance(recipe.large, Compressed)
    return recipe.large


def test_gtopk() -> None:
    large = _large(recipes.gtopk(density=0.02, merge="paper", exact_values=True))
    assert large.codec == codecs.TopK(density=0.02)
    assert large.exchange == exchanges.GlobalTopKTree(merge="paper", exact_values=True)


def test_s2_reducer() -> None:
    large = _large(recipes.s2_reducer(density=0.1, block=16))
    assert large.codec == codecs.BlockTopK(density=0.1, block=16)
    assert large.exchange == exchanges.UnionAllReduce(packed=codecs.CountSketch(rows=3, ratio=0.5))
    assert isinstance(large.memory, ErrorFeedback)


def test_fft() -> None:
    form = formats.OffsetFloat.balanced(bits=8)
    large = _large(recipes.fft(density=0.2, block=128, half=True, values=form))
    assert large.codec == codecs.FFT(density=0.2, block=128, half=True, values=form)
    assert not large.memory.stateful


def test_dct_dp() -> None:
    kept = _large(recipes.dct_dp(density=0.02, life=7, bound=2.0)).codec
    assert kept == codecs.KeptThreshold(density=0.02, refresh=schedules.Every(steps=7), bound=2.0)
    assert _large(recipes.dct_dp(life=None)).codec == codecs.SteeredThreshold(density=0.01)


def test_quantisers() -> None:
    assert _large(recipes.qsgd(bits=2, group_size=64)).codec == codecs.Cast(
        values=formats.Levels(bits=2, group_size=64, norm="max")
    )
    assert _large(recipes.terngrad(clip=1.5)).codec == codecs.Cast(values=formats.Ternary(clip=1.5))
    assert _large(recipes.signsgd(group_size=None)).codec == codecs.Cast(values=formats.Sign(group_size=None))
    assert _large(recipes.mstopk(density=0.1, rounds=5)).codec == codecs.MSTopK(density=0.1, rounds=5)


def test_powersgd() -> None:
    recipe = recipes.powersgd(rank=3, values=torch.bfloat16, start=5)
    assert isinstance(recipe, WarmUp)
    assert recipe.steps == 5
    assert isinstance(recipe.then, PowerSGD)
    assert (recipe.then.rank, recipe.then.codec) == (3, codecs.Cast(values=torch.bfloat16))
    small = Segment(name="p", offset=0, length=4096, shape=(64, 64))
    memories = [recipes.powersgd(start=0, minimum_size=size).memory_of(small) for size in (0, 4096, 4097)]
    assert [memory.stateful for memory in memories] == [True, True, False]


def test_an_argument_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(TypeError, match="topk has no argument 'sparsity'; it takes density, sampled, minimum_size"):
        recipes.topk(sparsity=0.01)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="TopK has no argument 'share'; it takes density"):
        codecs.TopK(share=0.01)  # type: ignore[call-arg]


def test_half_precision_loses_what_is_small() -> None:
    x = torch.full((64,), 1e-9)
    assert bool(codecs.FFT(density=1.0).encode(x).dense().any())
    assert not bool(codecs.FFT(density=1.0, half=True).encode(x).dense().any())


def _reduced(make: Callable[[], Reducer], step: int) -> Tensor:
    """Reduce the same vector on every rank at that step."""
    group = dist.group.WORLD
    assert group is not None
    flat = vector(NUMEL)
    at = Round(step=step, group=group, scale=1 / group.size())
    assert make().reduce(Bucket(flat=flat, segments=(SEGMENT,)), at).wait().finite
    return flat


def test_each_rank_draws_its_own_rounding(ranks: Ranks) -> None:
    """The mean of two ternary vectors has halves only where the ranks drew differently."""
    flat = ranks.run(2, _reduced, recipes.terngrad, 0)[0]
    sizes = flat[flat != 0].abs() / flat.abs().max()
    assert 0.05 < float(((sizes - 0.5).abs() < 1e-5).double().mean()) < 0.95


@pytest.mark.parametrize("make", [recipes.s2_reducer, recipes.terngrad, recipes.randomk])
def test_lots_are_drawn_anew_each_step(ranks: Ranks, make: Callable[[], Reducer]) -> None:
    first, again, later = (ranks.run(2, _reduced, make, step)[0] for step in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)


def _rows_at(step: int) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    gradient = torch.sparse_coo_tensor(
        torch.arange(20)[None], vector(200).view(20, 10), (50, 10), check_invariants=False
    )
    at = Round(step=step, group=group, scale=0.5)
    return recipes.s2_reducer().reduce_rows(gradient, "rows", at).wait().to_dense()


def test_sketches_of_rows_hash_anew_each_step(ranks: Ranks) -> None:
    first, later = (ranks.run(2, _rows_at, step)[0] for step in (0, 1))
    assert not torch.equal(first, later)


def _low_rank_errors() -> list[float]:
    """Return the error of each of some steps on one matrix, where nothing but Q is kept."""
    group = dist.group.WORLD
    assert group is not None
    recipe = recipes.powersgd(rank=4, start=0)
    (memory,) = (memory for memory in recipe.memories() if memory.stateful)
    matrix = torch.randn(50, 60, generator=torch.Generator().manual_seed(0)) @ torch.diag(0.9 ** torch.arange(60.0))
    errors = []
    for _ in range(8):
        flat = matrix.reshape(-1).clone()
        at = Round(step=0, group=group, scale=1.0)
        recipe.reduce(Bucket(flat=flat, segments=(SEGMENT,)), at).wait()
        errors.append(float((flat.view(50, 60) - matrix).norm()))
        memory.commit()
        memory.restore({n: {"note": fields["note"]} for n, fields in memory.state().items()})
    best = torch.linalg.svdvals(matrix)[4:].norm()
    return [error / float(best) for error in errors]


def test_powersgd_goes_on_from_its_last_factor(ranks: Ranks) -> None:
    errors = ranks.run(1, _low_rank_errors)[0]
    assert errors[0] > 1.05
    assert errors[-1] < 1.01, "the best of rank 4"
