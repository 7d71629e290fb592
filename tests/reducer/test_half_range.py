"""Gradients of 16 bits: what waits may be larger than float16 reaches, and no step is lost for it."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from cases import RECIPES
from ranks import Ranks
from torch import Tensor

from thinwire import codecs, exchanges, formats, recipes
from thinwire.memories import AppliedMomentum, ErrorFeedback, MomentumCorrection
from thinwire.payloads import fitted
from thinwire.reducer import Bucket, Compressed, PowerSGD, Reducer, Round, Segment, WarmUp

SEGMENTS = (
    Segment(name="matrix", offset=0, length=1200, shape=(30, 40)),
    Segment(name="small", offset=1200, length=20, shape=(20,)),
    Segment(name="block", offset=1220, length=300, shape=(10, 5, 6)),
)
NUMEL = 1520
STEPS = 40
LARGEST = torch.finfo(torch.float16).max


class Run(NamedTuple):
    """What came of a recipe on one rank: means and gradients summed up in float64, and what waits."""

    finite: list[bool]
    means: Tensor
    offered: Tensor
    waiting: Tensor
    saw_infinity: bool
    went_on: bool


def _made(name: str) -> Reducer:
    recipe = RECIPES[name].make()
    for memory in recipe.memories():
        if isinstance(memory, MomentumCorrection):
            memory.adopt(0.0, nesterov=False)
        if isinstance(memory, AppliedMomentum):
            memory.adopt({segment.name: 0.0 for segment in SEGMENTS})
    return recipe


def _gradient(step: int, size: float, dtype: torch.dtype = torch.float16) -> Tensor:
    """Return one of a steady direction, so that what is not sent adds up."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return (size * torch.randn(NUMEL, generator=generator).abs()).clamp(max=0.9 * LARGEST).to(dtype)


def _step(recipe: Reducer, flat: Tensor, step: int) -> bool:
    group = dist.group.WORLD
    assert group is not None
    at = Round(step=step, group=group, scale=1 / group.size())
    finite = recipe.reduce(Bucket(flat=flat, segments=SEGMENTS), at).wait().finite
    for memory in recipe.memories():
        if finite:
            memory.commit()
        else:
            memory.rollback()
    return finite


def _waiting(recipe: Reducer) -> Tensor:
    waiting = torch.zeros(NUMEL, dtype=torch.float64)
    for memory in recipe.memories():
        for segment in SEGMENTS:
            fields = memory.state().get(segment.name, {})
            if "residual" in fields:
                waiting[segment.offset : segment.offset + segment.length] += fields["residual"]
    return waiting


def _ran(recipe: Reducer, size: float, dtype: torch.dtype = torch.float16) -> Run:
    means, offered = torch.zeros(NUMEL, dtype=torch.float64), _waiting(recipe)
    finite = []
    for step in range(STEPS):
        flat = _gradient(step, size, dtype)
        offered += flat.double() / dist.get_world_size()
        finite.append(_step(recipe, flat, step) and bool(flat.isfinite().all()))
        means += flat.double()
    waiting = _waiting(recipe)
    flat = _gradient(STEPS, size, dtype)
    if dist.get_rank() == 0:
        flat[::50] = torch.inf
        flat[7] = torch.nan
    seen = not _step(recipe, flat, STEPS) and not bool(flat.isfinite().all())
    assert torch.equal(_waiting(recipe), waiting), "a skipped step leaves the memory as it was"
    return Run(finite, means, offered, waiting, seen, _step(recipe, _gradient(STEPS, size, dtype), STEPS + 1))


def _all(names: list[str], size: float) -> dict[str, Run]:
    return {name: _ran(_made(name), size) for name in names}


def _check(found: "list[Run]", *, conserving: bool, tolerance: float = 2e-3) -> None:
    assert all(all(run.finite) for run in found)
    assert all(torch.equal(run.means, found[0].means) for run in found)
    assert all(run.saw_infinity and run.went_on for run in found)
    if conserving:
        offered = torch.stack([run.offered for run in found]).sum(dim=0)
        waiting = torch.stack([run.waiting for run in found]).sum(dim=0)
        assert float((found[0].means + waiting - offered).norm() / offered.norm()) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("size", [3000.0, 25_000.0])
def test_every_recipe_takes_every_step_and_loses_nothing(ranks: Ranks, world_size: int, size: float) -> None:
    """Where nothing waits, the decoded sum may overflow: `fft` leaves something out, and a level of an l2 norm exceeds
    every element.
    """
    overflowing = {"fft", "fft, scheduled", "qsgd_l2"}
    names = [name for name in RECIPES if size < LARGEST / 10 or name not in overflowing]
    results = ranks.run(world_size, _all, names, size)
    for name in names:
        _check([result[name] for result in results], conserving=RECIPES[name].conserving)


CODES = formats.OffsetFloat.balanced(bits=8, mantissa=3, max=2.0, rounding="nearest")
GATHERED = exchanges.AllGather()


def _fed_back(codec: codecs.Codec, exchange: exchanges.Exchange = GATHERED) -> Compressed:
    return Compressed(memory=ErrorFeedback(), codec=codec, exchange=exchange)


def _low_rank(values: torch.dtype | None) -> PowerSGD:
    recipe = recipes.powersgd(rank=1, values=values, start=0)
    assert isinstance(recipe, WarmUp)
    assert isinstance(recipe.then, PowerSGD)
    return recipe.then


WIDE = {  # what is decoded in float32, from gradients of float16
    "codes": lambda: _fed_back(codecs.TopK(density=0.02, values=CODES)),
    "codes of momentum": lambda: Compressed(
        memory=MomentumCorrection(momentum=0.0), codec=codecs.TopK(density=0.02, values=CODES), exchange=GATHERED
    ),
    "spectra": lambda: _fed_back(codecs.FFT(density=0.02, block=300, values=CODES)),
    "chunks": lambda: _fed_back(codecs.ChunkTopK(density=0.02, values=CODES)),
    "factors": lambda: _low_rank(None),
}
NARROW = {  # what float32 travels as
    "picks": lambda: _fed_back(codecs.TopK(density=0.02, values=torch.float16)),
    "everything": lambda: _fed_back(codecs.Cast(values=torch.float16), exchanges.AllReduce()),
    "factors": lambda: _low_rank(torch.float16),
}


def _burdened(recipe: Reducer) -> Reducer:
    """Let far more wait for the matrix than float16 reaches."""
    for memory in recipe.memories():
        if memory.stateful:
            memory.restore({"matrix": {"residual": torch.full((1200,), 1e6)}})
    return recipe


def _made_by(kind: str, name: str) -> Run:
    make, dtype = (WIDE[name], torch.float16) if kind == "wide" else (NARROW[name], torch.float32)
    return _ran(_burdened(make()), 3000.0, dtype)


@pytest.mark.parametrize("name", WIDE)
def test_what_is_decoded_beyond_the_range_waits(ranks: Ranks, name: str) -> None:
    _check(ranks.run(3, _made_by, "wide", name), conserving=True)


@pytest.mark.parametrize("name", NARROW)
def test_float32_that_travels_as_float16_waits_beyond_its_range(ranks: Ranks, name: str) -> None:
    _check(ranks.run(3, _made_by, "narrow", name), conserving=True)


def _beside_one_at_rest(name: str) -> tuple[Tensor, Tensor]:
    """Return the mean of a step at which rank 0 has no gradient and rank 1 far too much, and what waits then."""
    recipe, group = WIDE[name](), dist.group.WORLD
    assert group is not None
    first = group.rank() == 0
    flat = torch.zeros(NUMEL, dtype=torch.float16)
    at = Round(step=0, group=group, scale=0.5)
    assert (recipe if first else _burdened(recipe)).reduce(Bucket(flat=flat, segments=SEGMENTS), at).wait().finite
    for memory in recipe.memories():
        memory.commit()
    return flat.double(), _waiting(recipe)


@pytest.mark.parametrize("name", WIDE)
def test_ranks_at_rest_take_their_share_of_what_waits(ranks: Ranks, name: str) -> None:
    means, waiting = zip(*ranks.run(2, _beside_one_at_rest, name), strict=True)
    assert torch.equal(means[0], means[1])
    assert bool(waiting[0][:1200].any())
    expected = torch.full((1200,), 1e6, dtype=torch.float64)
    torch.testing.assert_close((means[0] + sum(waiting))[:1200], expected, rtol=1e-3, atol=0)


def _beyond_and_back(name: str) -> tuple[Tensor, Tensor]:
    """Return the mean of a step that the last rank brings back into the range, and what waits then."""
    recipe, group = WIDE[name](), dist.group.WORLD
    assert group is not None
    waiting = torch.full((1200,), -50_000.0 if group.rank() == 2 else 50_000.0)
    for memory in recipe.memories():
        if memory.stateful:
            memory.restore({"matrix": {"residual": waiting}})
    flat = torch.zeros(NUMEL, dtype=torch.float16)
    assert recipe.reduce(Bucket(flat=flat, segments=SEGMENTS), Round(step=0, group=group, scale=1 / 3)).wait().finite
    for memory in recipe.memories():
        memory.commit()
    return flat.double(), _waiting(recipe)


@pytest.mark.parametrize("name", WIDE)
def test_a_sum_that_leaves_the_range_and_returns_is_all_there(ranks: Ranks, name: str) -> None:
    means, waiting = zip(*ranks.run(3, _beyond_and_back, name), strict=True)
    assert all(torch.equal(mean, means[0]) for mean in means)
    expected = torch.full((1200,), 50_000.0, dtype=torch.float64)
    torch.testing.assert_close((means[0] + sum(waiting))[:1200], expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1000])
def test_sums_of_what_fits_fit(count: int, dtype: torch.dtype) -> None:
    """One by one and by halves, each sum rounded; and the bound is no lower than rounding asks for."""
    values = fitted(torch.full((count,), 1e300, dtype=torch.float64), dtype, 1 / count)
    total = torch.zeros((), dtype=dtype)
    for value in values:
        total += value
    halves = values
    while halves.numel() > 1:
        halves = torch.nn.functional.pad(halves, (0, halves.numel() % 2)).view(2, -1)
        halves = halves[0] + halves[1]
    assert bool(total.isfinite() & halves.isfinite().all())
    assert float(values[0]) * count > torch.finfo(dtype).max * (0.99 - count * torch.finfo(dtype).eps)


def test_fitting_hides_nothing_and_leaves_what_fits() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0, -70_000.0, 65_000.0])
    found = fitted(x, torch.float16)
    assert found.tolist()[:2] == [torch.inf, -torch.inf]
    assert bool(found[2].isnan())
    assert found.tolist()[3:] == [1.0, -65_472.0, 64_992.0]
    assert fitted(x, torch.float32) is x
    assert fitted(x, torch.bfloat16, 0.5)[4] == x[4].bfloat16()
