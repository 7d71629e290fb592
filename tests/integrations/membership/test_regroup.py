"""Ranks that come and go while a model trains: what waits, notes, steps."""

import pytest
import torch
import torch.distributed as dist
from cases import RECIPES
from ranks import Ranks
from torch import Tensor, nn

import thinwire as tw
from thinwire.errors import FingerprintError

NAMES = ["topk", "dgc", "powersgd"]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, replicas: tw.integrations.Replicas, seed: int) -> None:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(8, 24, dtype=torch.float64, generator=generator)).square().sum().backward()
    replicas.reduce()
    optimizer.step()


def _held(replicas: tw.integrations.Replicas, *, notes: bool) -> list[dict[str, Tensor]]:
    memories = replicas.attachment.recipe.memories()
    return [
        {
            f"{name}/{f}": x.clone()
            for name, held in memory.state().items()
            for f, x in held.items()
            if (f in memory.free) == notes
        }
        for memory in memories
    ]


def _made(recipe: str) -> tuple[nn.Module, torch.optim.Optimizer, tw.integrations.Replicas]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 16)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, tw.replicate(model, RECIPES[recipe].make(), optimizer=optimizer)


def _one_goes_and_comes_back(recipe: str) -> None:
    model, optimizer, replicas = _made(recipe)
    for seed in range(4):
        _step(model, optimizer, replicas, seed)
    pair = dist.new_group([0, 1])
    whole = dist.group.WORLD
    waits, notes, step = _held(replicas, notes=False), _held(replicas, notes=True), replicas.attachment.step
    if dist.get_rank() < 2:
        replicas.regroup(pair)
        for mine, before in zip(_held(replicas, notes=False), waits, strict=True):
            assert mine.keys() == before.keys()
            assert all(torch.equal(mine[key], before[key]) for key in before)
        for mine, before in zip(_held(replicas, notes=True), notes, strict=True):
            assert all(torch.equal(mine[key], before[key] * 1.5) for key in before)
        for seed in range(4, 7):
            _step(model, optimizer, replicas, seed)
        assert replicas.verify_replicas()
        assert replicas.attachment.step == step + 3

    states = [[{n: x.detach() for n, x in model.state_dict().items()}, optimizer.state_dict(), replicas.state_dict()]]
    dist.broadcast_object_list(states, src=0)
    if dist.get_rank() == 2:
        held = _held(replicas, notes=False)
        model.load_state_dict(states[0][0])
        optimizer.load_state_dict(states[0][1])
        replicas.attachment.membership.join(states[0][2])
        assert replicas.attachment.step == step + 3
        for mine, before in zip(_held(replicas, notes=False), held, strict=True):
            assert all(torch.equal(mine[key], before[key]) for key in before)
    assert whole is not None
    replicas.regroup(whole)
    for seed in range(7, 10):
        _step(model, optimizer, replicas, seed)
    assert replicas.verify_replicas()
    assert replicas.attachment.step == step + 6


@pytest.mark.parametrize("recipe", NAMES)
def test_what_waits_stays_when_ranks_go_and_come(recipe: str, ranks: Ranks) -> None:
    ranks.run(3, _one_goes_and_comes_back, recipe)


def _one_falls_behind(recipe: str) -> tuple[int, int, bool]:
    """The first rank goes on alone for a while. The other gets its weights, and hears of its step by regrouping."""
    model, optimizer, replicas = _made(recipe)
    _step(model, optimizer, replicas, 0)
    alone = dist.new_group([0])
    if dist.get_rank() == 0:
        replicas.regroup(alone)
        for seed in range(1, 4):
            _step(model, optimizer, replicas, seed)
    states = [[{n: x.detach() for n, x in model.state_dict().items()}, optimizer.state_dict()]]
    dist.broadcast_object_list(states, src=0)
    model.load_state_dict(states[0][0])
    optimizer.load_state_dict(states[0][1])
    assert dist.group.WORLD is not None
    replicas.regroup(dist.group.WORLD)
    for seed in range(4, 6):
        _step(model, optimizer, replicas, seed)
    return replicas.attachment.step, replicas.attachment.steps.draw, replicas.verify_replicas()


@pytest.mark.parametrize("recipe", ["randomk", "topk"])
def test_all_go_on_from_the_latest_step(recipe: str, ranks: Ranks) -> None:
    assert ranks.run(2, _one_falls_behind, recipe) == [(6, 6, True)] * 2


def _other_recipe() -> None:
    _made("topk" if dist.get_rank() else "dgc")


def _means() -> None:
    model, _, replicas = _made("dense")
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        replicas.regroup(pair)
        for p in model.parameters():
            p.grad = torch.full_like(p, float(dist.get_rank() + 1))
        replicas.reduce()
        assert all(bool((p.grad == 1.5).all()) for p in model.parameters() if p.grad is not None)


def test_the_mean_is_that_of_the_ranks_there_are(ranks: Ranks) -> None:
    ranks.run(3, _means)


def _taken_back() -> None:
    model, optimizer, replicas = _made("topk")
    _step(model, optimizer, replicas, 0)
    held = replicas.state_dict()["memories"]
    optimizer.zero_grad()
    model(torch.ones(8, 24, dtype=torch.float64)).square().sum().backward()
    replicas.reduce()
    replicas.attachment.steps.take_back()
    after = replicas.state_dict()["memories"]
    for one, other in zip(held, after, strict=True):
        assert all(torch.equal(one[name][f], other[name][f]) for name in one for f in one[name])


def test_a_reduction_is_taken_back(ranks: Ranks) -> None:
    ranks.run(2, _taken_back)


def test_ranks_with_other_recipes_are_an_error(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match=FingerprintError.__name__):
        ranks.run(2, _other_recipe)
