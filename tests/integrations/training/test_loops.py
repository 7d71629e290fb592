"""Training loops as users write them, each beside plain DDP."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from loops import LOOPS
from loops.material import Unavailable
from loops.measure import Ended, measure
from loops.recipes import BY_NAME, WAYS
from ranks import Ranks

from thinwire.errors import MomentumError

STEPS = 16
LONG = 60
"""As many as it takes for a hundredth a step to show in the loss."""
CLOSE = 1e-10

WHOLE = [way.name for way in WAYS if way.everything]
SPARSE = [way.name for way in WAYS if not way.everything]
NOT_SGD = {
    "adamw",
    "gan",
    "gradient_penalty_apart",
    "lbfgs",
    "adam_closure",
    "checkpointing",
    "nan_before_backward",
    "scaler_with_clipping",
}
"""Loops whose optimizers have no momentum that could be moved into a memory."""
CLIPPED = {"clipping_with_momentum"}
"""Loops in which clipping acts on what arrives: with momentum in the memory that is another thing than in plain DDP."""
SHARES = {
    "accumulation": 0.25,
    "accumulation_no_sync": 0.25,
    "accumulation_by_counter": 0.25,
    "accumulation_abandoned": 0.25,
    "gan_sgd": 0.8,  # 0.5 where the discriminator's memory keeps what zero_grad threw away, 1 where not
    "nan_skipped": 0.25,
    "norm_skipped": 0.25,
    "norm_skipped_with_momentum": 0.25,
    "probing": 0.25,
    "two_losses": 0.25,
}
"""How much of plain DDP's way down in loss is to be taken at least; those that go right take 0.5 or more."""

Result = Ended | Exception


def _attempt(loop: str, way: str, steps: int) -> Result:
    """Run a loop in this way, or with plain DDP; what is raised on this rank stands in the place of a result."""
    try:
        return measure(loop, BY_NAME[way] if way else None, steps)
    except (Unavailable, MomentumError) as error:
        return error
    except Exception as error:  # some cannot be pickled
        return RuntimeError(f"{type(error).__name__}: {error}")


Run = Callable[[str, str], list[dict[str, Result]]]


@pytest.fixture(scope="module")
def run(ranks: Ranks) -> Run:
    """Runs a loop with plain DDP, once for all tests, and in one way, each on two ranks."""

    @cache
    def one(loop: str, way: str, steps: int) -> list[Result]:
        return ranks.run(2, _attempt, loop, way, steps)

    def both(loop: str, way: str) -> list[dict[str, Result]]:
        steps = STEPS if BY_NAME[way].everything else LONG
        return [
            {"": plain, way: other} for plain, other in zip(one(loop, "", steps), one(loop, way, steps), strict=True)
        ]

    return both


def _ended(results: list[dict[str, Result]], way: str) -> list[tuple[Ended, Ended]]:
    """Return what each rank has with plain DDP and with `way`; skip where the loop cannot run here."""
    pairs = []
    for result in results:
        plain, other = result[""], result[way]
        if isinstance(plain, Unavailable):
            pytest.skip(str(plain))
        assert isinstance(plain, Ended), plain
        assert isinstance(other, Ended), other
        pairs.append((plain, other))
    return pairs


@pytest.mark.grid
@pytest.mark.parametrize("way", WHOLE)
@pytest.mark.parametrize("loop", LOOPS)
def test_what_sends_everything_ends_where_plain_ddp_does(run: Run, loop: str, way: str) -> None:
    results = run(loop, way)
    if loop in NOT_SGD and BY_NAME[way].momentum:
        assert all(isinstance(result[way], MomentumError) for result in results)
        return
    if loop in CLIPPED and BY_NAME[way].momentum:
        assert all("written to between backward" in str(result[way]) for result in results)  # warnings are errors here
        return
    for plain, other in _ended(results, way):
        assert other.distance(plain) <= CLOSE
        assert other.skipped == plain.skipped
        assert other.losses == pytest.approx(plain.losses, rel=1e-8)
    assert _alike(results, way)
    assert _alike(results, "")


@pytest.mark.slow
@pytest.mark.parametrize("way", SPARSE)
@pytest.mark.parametrize("loop", SHARES)
def test_what_sends_a_hundredth_keeps_replicas_and_trains(run: Run, loop: str, way: str) -> None:
    results = run(loop, way)
    for plain, other in _ended(results, way):
        assert other.share(plain) >= SHARES[loop]
        assert len(other.skipped) <= len(plain.skipped) + 2  # a large gradient that was skipped does not come back
    assert _alike(results, way)


def _alike(results: list[dict[str, Result]], way: str) -> bool:
    first, second = (result[way] for result in results)
    assert isinstance(first, Ended)
    assert isinstance(second, Ended)
    return torch.equal(first.end.view(torch.int64), second.end.view(torch.int64))


def test_a_distance_by_hand() -> None:
    zero, one = torch.zeros(2), torch.tensor([3.0, 4.0])
    plain = Ended(start=zero, end=one, losses=[5.0] + [1.0] * 5, skipped=[])
    other = Ended(start=zero, end=one + torch.tensor([0.0, 1.0]), losses=[5.0] + [2.0] * 5, skipped=[])
    assert other.distance(plain) == pytest.approx(0.2)
    assert other.share(plain) == pytest.approx(0.75)
    assert plain.distance(plain) == 0


def test_every_loop_says_what_it_does() -> None:
    said = {loop.__doc__ for loop in LOOPS.values()}
    assert len(LOOPS) == len(said)
    assert all(text and text.splitlines()[0].endswith((".", ":")) for text in said)
