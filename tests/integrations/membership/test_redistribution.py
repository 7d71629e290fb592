"""What some ranks saved, dealt out to others: no collective, so every R and R' is tried."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import MEMORIES, RECIPES
from ddp_models import same
from ranks import told
from torch import Tensor, nn

import thinwire as tw
from thinwire.errors import StateError
from thinwire.integrations.membership import state
from thinwire.integrations.momentum.correction import corrections
from thinwire.memories import Memory
from thinwire.reducer import Reducer, Segment

SIZES = {"0.weight": (20, 40), "0.bias": (40,), "scale": (), "empty": (0, 5)}
PARAMETERS = {name: nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for name, shape in SIZES.items()}
NOTE = "note"
COUNTS = range(1, 6)


def _of(memory: Callable[[], Memory]) -> Callable[[], Reducer]:
    def make() -> Reducer:
        return tw.reducer.Compressed(
            memory=memory(), codec=tw.codecs.TopK(density=0.1), exchange=tw.exchanges.AllGather()
        )

    return make


MAKERS: dict[str, Callable[[], Reducer]] = {name: case.make for name, case in RECIPES.items()}
MAKERS |= {f"{name}, alone": _of(make) for name, make in MEMORIES.items()}


def _filled(recipe: Reducer, memory: Memory, rank: int) -> dict[str, dict[str, Tensor]]:
    """Return a memory's state with something in every field it uses; rank 1 has never seen the bias."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, p in PARAMETERS.items():
        segment = Segment(name=name, offset=0, length=p.numel(), shape=tuple(p.shape))
        if (rank == 1 and name == "0.bias") or recipe.memory_of(segment) is not memory:
            continue
        generator = torch.Generator().manual_seed(100 * rank + len(found))
        for field in sorted(memory.fields):
            numel = 3 if field in memory.free else p.numel()
            dtype = torch.float64 if field in memory.free else memory.held(torch.float64)
            x = torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
            found.setdefault(name, {})[field] = x
    return found


def _states(recipe: Reducer, count: int, **changes: Any) -> list[dict[str, Any]]:
    """Return what `count` ranks would have saved."""
    return [
        {
            "version": state.VERSION,
            "rank": rank,
            "world_size": count,
            "recipe": state.words(recipe),
            "step": 7,
            "draw": 9,
            "loss_scale": 256.0,
            "momentum": [[0.9, False] for _ in corrections(recipe.memories())],
            "fields": state.kinds(recipe.memories()),
            "memories": [_filled(recipe, memory, rank) for memory in recipe.memories()],
        }
        | changes
        for rank in range(count)
    ]


def _waiting(states: list[dict[str, Any]]) -> dict[tuple[int, str, str], Tensor]:
    """Return the sums over ranks of what waits."""
    sums: dict[tuple[int, str, str], Tensor] = {}
    for each in states:
        for i, memory in enumerate(each["memories"]):
            for name, fields in memory.items():
                for field in fields.keys() - {NOTE}:
                    sums[i, name, field] = sums.get((i, name, field), 0) + fields[field].to(torch.float64)
    return sums


def _others(states: list[dict[str, Any]], count: int, **options: Any) -> list[dict[str, Any]]:
    return [tw.redistribute(states, rank=rank, world_size=count, **options) for rank in range(count)]


@pytest.mark.parametrize("recipe", MAKERS)
def test_the_pending_mean_is_the_same_for_every_number_of_ranks(recipe: str) -> None:
    for before in COUNTS:
        states = _states(MAKERS[recipe](), before)
        sums = _waiting(states)
        for after in COUNTS:
            dealt = _waiting(_others(states, after))
            assert dealt.keys() == sums.keys()
            for key, expected in sums.items():
                eps = 1e-12 if states[0]["memories"][key[0]][key[1]][key[2]].dtype == torch.float64 else 2**-8
                scale = float(expected.abs().max()) if expected.numel() else 0.0
                assert bool(((dealt[key] - expected).abs() <= eps * max(1.0, scale)).all()), (before, after, key)


@pytest.mark.parametrize("recipe", MAKERS)
def test_every_rank_can_load_what_it_is_dealt(recipe: str) -> None:
    for before in COUNTS:
        for after in COUNTS:
            own = MAKERS[recipe]()
            for rank, dealt in enumerate(_others(_states(own, before), after)):
                standing = state.check(dealt, own, PARAMETERS, rank=rank, world_size=after)
                assert standing == state.Standing(step=7, draw=9, recipe=state.words(own))
                assert dealt["loss_scale"] == 256.0
                for memory, saved in zip(own.memories(), dealt["memories"], strict=True):
                    memory.restore(saved)
                    assert same(memory.state(), saved)


@pytest.mark.parametrize("recipe", MAKERS)
def test_with_as_many_ranks_each_gets_back_its_own(recipe: str) -> None:
    for count in COUNTS:
        states = _states(MAKERS[recipe](), count)
        assert same(_others(copy.deepcopy(states), count), states)


def _notes(states: list[dict[str, Any]]) -> list[Tensor]:
    return [
        memory["0.weight"][NOTE] for each in states for memory in each["memories"] if NOTE in memory.get("0.weight", {})
    ]


def test_notes_that_are_equal_stay_equal_and_follow_the_share_of_the_mean() -> None:
    recipe = _of(MEMORIES["noted"])()
    for before in COUNTS:
        states = _states(recipe, before)
        for each in states:
            each["memories"][0]["0.weight"][NOTE] = torch.tensor([1.0, 2.0])
        for after in COUNTS:
            dealt = _notes(_others(states, after))
            assert len(dealt) == after
            for note in dealt:
                torch.testing.assert_close(note, torch.tensor([1.0, 2.0]) * before / after)


def test_each_rank_takes_the_notes_of_a_rank_of_its_own_place() -> None:
    states = _states(_of(MEMORIES["noted"])(), 2)
    first, second = _notes(states)
    four = _notes(_others(states, 4))
    assert [same(note * 2, states_note) for note, states_note in zip(four, (first, second) * 2, strict=True)] == [
        True
    ] * 4
    assert same(_notes(_others(states, 1)), [first * 2])


# --- states that are missing or do not belong together ---


def test_a_missing_rank_takes_only_its_own_share_along() -> None:
    for before in range(2, 6):
        states = _states(_of(MEMORIES["noted momentum"])(), before)
        for gone in range(before):
            left = [each for each in states if each["rank"] != gone]
            sums = _waiting(left)
            with pytest.raises(StateError, match=rf"the state of rank {gone} \(of {before}\) is missing"):
                tw.redistribute(left, rank=0, world_size=1)
            for after in COUNTS:
                dealt = _others(left, after, partial=True)
                for key, total in _waiting(dealt).items():
                    torch.testing.assert_close(total, sums[key], rtol=1e-12, atol=1e-12)
                if after == before:
                    kept = [each for each in dealt if each["rank"] != gone]
                    assert same(kept, left)
                    assert _waiting([dealt[gone]]) == {}


def _of_one(**changes: Any) -> Callable[[list[dict[str, Any]]], list[Any]]:
    return lambda states: [states[0], states[1] | changes, *states[2:]]


MIXTURES: dict[str, tuple[Callable[[list[dict[str, Any]]], list[Any]], str]] = {
    "steps": (_of_one(step=8), "StateError: these states do not belong together: step is 7 on rank 0 and 8 on rank 1"),
    "draws": (_of_one(draw=8), "draw is 9 on rank 0 and 8 on rank 1"),
    "recipes": (_of_one(recipe="Another()"), "recipe is "),
    "loss scales": (_of_one(loss_scale=2.0), "loss_scale is 256.0 on rank 0 and 2.0 on rank 1"),
    "world sizes": (_of_one(world_size=4), "world_size is 3 on rank 0 and 4 on rank 1"),
    "momentum": (_of_one(momentum=[[0.9, False]]), "momentum is [] on rank 0 and [[0.9, False]] on rank 1"),
    "twice": (lambda states: [states[0], states[0], states[2]], "ValueError: there are two states of rank 0"),
    "out of range": (_of_one(rank=3), "ValueError: rank in attachment state is 3; expected a rank from 0 to 2"),
    "version 1": (_of_one(version=1), "version"),
    "none": (lambda states: [], "ValueError: states is []"),
    "no state": (lambda states: [{}, *states[1:]], "ValueError: an attachment's state has the keys"),
    "no mapping": (lambda states: [3, *states[1:]], "TypeError: states is [3"),
    "no tensors": (
        _of_one(memories=[{"0.weight": {"residual": [1.0]}}]),
        "ValueError: '0.weight' in attachment state is {'residual': [1.0]}; expected tensors ['residual']",
    ),
    "another model": (
        _of_one(memories=[{"0.weight": {"residual": torch.ones(3, dtype=torch.float64)}}]),
        "ValueError: residual of '0.weight' has different shapes or dtypes",
    ),
    "another memory": (_of_one(memories=[{"0.weight": {"velocity": torch.ones(3)}}]), "expected tensors ['residual']"),
    "fields are none": (lambda states: [each | {"fields": None} for each in states], "ValueError: fields"),
}


@pytest.mark.parametrize("case", MIXTURES)
def test_a_mixture_is_refused_with_its_difference(case: str) -> None:
    mix, words = MIXTURES[case]
    states = mix(_states(_of(MEMORIES["error feedback"])(), 3))
    assert words in told(lambda: tw.redistribute(states, rank=0, world_size=1))


def test_a_rank_beyond_the_world_is_refused() -> None:
    states = _states(_of(MEMORIES["error feedback"])(), 1)
    assert told(lambda: tw.redistribute(states, rank=2, world_size=2)) == ("ValueError: rank is 2; expected 0 to 1")
