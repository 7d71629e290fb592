"""What a reduction declares to take at most, against what the allocator saw. Kernels' own arrays count too."""

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch.futures import Future
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from thinwire.collectives import Staging
from thinwire.exchanges import merging
from thinwire.memories import AppliedMomentum, MomentumCorrection
from thinwire.planner.candidates import PLANNED
from thinwire.recipes import METHODS
from thinwire.reducer import Bucket, Reducer, Round, Segment, Segments, power_sgd

# torch 2.11 says once that a profiler forgets its last cycle, which has no other here.
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")

Shapes = tuple[tuple[int, int], ...]
SHAPES: Shapes = ((320, 200), (400, 1500))
SEVERAL = [  # recipes whose exchange takes several rounds, which need other ranks
    "doubling",
    "gtopk",
    "owner",
    "powersgd",
    "s2_reducer",
    "s2_union",
    "sampled_doubling",
    "sampled_gtopk",
    "sampled_owner",
]
EVERY = {**METHODS, **PLANNED}
SLACK = 1 << 16  # bytes: headers, tables and scalars
OBJECTS = 1300  # bytes that Python takes for a vector


def _segments(shapes: Shapes = SHAPES) -> tuple[Segment, ...]:
    found, end = [], 0
    for i, shape in enumerate(shapes):
        length = shape[0] * shape[1]
        found.append(Segment(name=f"p{i}", offset=end, length=length, shape=shape))
        end += length
    return tuple(found)


@contextmanager
def _group(size: int) -> Iterator[dist.ProcessGroup]:
    """A group whose ranks all send what this one sends."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _peak(work: Callable[[], object]) -> int:
    """Return the most bytes that were allocated at once while `work` ran, over those there were before.

    torch's allocations and NumPy's are added as they come.
    """
    tracemalloc.start()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            work()
        _, arrays = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    amounts = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(amounts, initial=0)) + arrays


def _ready(name: str, segments: Sequence[Segment], density: float | None = None) -> Reducer:
    method = EVERY[name]
    recipe = method.make() if density is None else method.recipe(density=density)
    for memory in recipe.memories():
        if isinstance(memory, MomentumCorrection):
            memory.adopt(0.9, nesterov=False)
        if isinstance(memory, AppliedMomentum):
            memory.adopt({segment.name: 0.9 for segment in segments})
    return recipe


def _declared_and_seen(
    name: str,
    group: dist.ProcessGroup | None = None,
    steps: int = 3,
    *,
    shapes: Shapes = SHAPES,
    dtype: torch.dtype = torch.float32,
    density: float | None = None,
) -> tuple[int, int]:
    """Return what the last of these steps declared, and what it took."""
    group = group or dist.group.WORLD
    assert group is not None
    segments, staging, seen = Segments(_segments(shapes)), Staging(), 0
    recipe = _ready(name, segments, density)
    generator = torch.Generator().manual_seed(group.rank())
    gradient = torch.randn(sum(s.length for s in segments), generator=generator).to(dtype)
    for step in range(steps):
        at = Round(step=step, group=group, scale=1 / group.size(), staging=staging)
        recipe.begin(at)
        staging.turn()
        bucket = Bucket(flat=gradient.roll(step), segments=segments)
        if step + 2 < steps:
            recipe.reduce(bucket, at).wait()
        else:  # the first of two, as the profiler's own start allocates
            seen = _peak(lambda bucket=bucket, at=at: recipe.reduce(bucket, at).wait())  # type: ignore[misc]
        for memory in recipe.memories():
            memory.commit()
    return staging.needed, seen


ONE = [name for name in EVERY if name not in SEVERAL]


@pytest.mark.grid
@pytest.mark.parametrize("ranks", [1, 4, 16])
@pytest.mark.parametrize("name", ONE)
def test_a_bucket_takes_what_was_declared(name: str, ranks: int) -> None:
    with _group(ranks) as group:
        declared, seen = _declared_and_seen(name, group)
    assert seen <= declared + SLACK
    assert declared <= 2 * seen + SLACK


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shapes", [((1000, 1500),), ((10, 20),) * 500], ids=["large", "many"])
@pytest.mark.parametrize("name", ONE)
def test_other_buckets_take_no_more_than_was_declared(name: str, shapes: Shapes, dtype: torch.dtype) -> None:
    with _group(4) as group:
        declared, seen = _declared_and_seen(name, group, shapes=shapes, dtype=dtype)
    assert seen <= declared + SLACK + OBJECTS * len(shapes)


MIXED: Shapes = ((900, 700), (1, 13), (3, 3), (400, 375))


@pytest.mark.grid
@pytest.mark.parametrize("density", [1e-4, 1e-3, 0.3, 1.0])
@pytest.mark.parametrize("shapes", [MIXED, ((1024, 1024),)], ids=["mixed", "square"])
@pytest.mark.parametrize("name", [name for name in ONE if EVERY[name].takes("density")])
def test_other_densities_take_no_more_than_was_declared(name: str, shapes: Shapes, density: float) -> None:
    with _group(4) as group:
        declared, seen = _declared_and_seen(name, group, shapes=shapes, density=density)
    assert seen <= declared + SLACK + OBJECTS * len(shapes)


class _Here:
    """A communication thread that is this one, because the profiler sees no other."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def submit(self, work: Callable[[dist.ProcessGroup], Any], device: torch.device) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(work(self._group))
        return future


def _in_this_thread(name: str, steps: int) -> tuple[int, int]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (merging, power_sgd):
            patch.setattr(module, "communication_thread", _Here)
        _declared_and_seen(name, steps=steps)  # loads the kernels, whose code would count
        return _declared_and_seen(name, steps=steps)


def _patiently(ranks: Ranks, world: int, name: str, steps: int) -> list[tuple[int, int]]:
    """Measure on real ranks. Now and then one ends without a word when torch's profiler starts or stops beside Gloo."""
    for _ in range(4):
        with suppress(EOFError, BrokenPipeError):
            return ranks.run(world, _in_this_thread, name, steps)
        ranks.stop()
    raise AssertionError("a rank ended without a word, four times in a row")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", SEVERAL)
def test_several_rounds_take_what_was_declared(ranks: Ranks, name: str, world: int) -> None:
    steps = 12 if name == "powersgd" else 3  # the first ten go uncompressed
    declared, seen = map(max, zip(*_patiently(ranks, world, name, steps), strict=True))
    assert seen <= declared + SLACK
    assert declared <= 2 * seen + SLACK
