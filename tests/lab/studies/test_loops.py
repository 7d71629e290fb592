"""Training loops as users write them, each beside plain DDP: thinwire_lab.studies.loops, whose loops these are."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import typer
from ranks import Ranks
from typer.testing import CliRunner

from thinwire.errors import MomentumError
from thinwire_lab.studies.loops.__main__ import main
from thinwire_lab.studies.loops.material import Unavailable
from thinwire_lab.studies.loops.measure import Ended, measure
from thinwire_lab.studies.loops.recipes import BY_NAME, WAYS
from thinwire_lab.studies.loops.running import Row
from thinwire_lab.studies.loops.scripts import LOOPS
from thinwire_lab.studies.loops.table import markdown, summary, table

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


def _attempts(loop: str, ways: list[str], steps: int) -> dict[str, Result]:
    """Run a loop with plain DDP and these ways in turn; what is raised on this rank stands in the place of a result."""
    found: dict[str, Result] = {}
    for way in (None, *ways):
        try:
            found[way or ""] = measure(loop, BY_NAME[way] if way else None, steps)
        except (Unavailable, MomentumError) as error:
            found[way or ""] = error
        except Exception as error:  # some cannot be pickled
            found[way or ""] = RuntimeError(f"{type(error).__name__}: {error}")
    return found


@pytest.fixture(scope="module")
def run(ranks: Ranks) -> Callable[[str, bool], list[dict[str, Result]]]:
    """Runs a loop with plain DDP and all ways of a kind on two ranks, once for all tests."""

    @cache
    def found(loop: str, everything: bool) -> list[dict[str, Result]]:
        return ranks.run(2, _attempts, loop, WHOLE if everything else SPARSE, STEPS if everything else LONG)

    return found


Run = Callable[[str, bool], list[dict[str, Result]]]


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
    results = run(loop, True)
    if loop in NOT_SGD and BY_NAME[way].momentum:
        assert all(isinstance(result[way], MomentumError) for result in results)
        return
    for plain, other in _ended(results, way) if not (loop in CLIPPED and BY_NAME[way].momentum) else ():
        assert other.distance(plain) <= CLOSE
        assert other.skipped == plain.skipped
        assert other.losses == pytest.approx(plain.losses, rel=1e-8)
    assert _alike(results, way)
    assert _alike(results, "")


@pytest.mark.slow
@pytest.mark.parametrize("way", SPARSE)
@pytest.mark.parametrize("loop", SHARES)
def test_what_sends_a_hundredth_keeps_replicas_and_trains(run: Run, loop: str, way: str) -> None:
    results = run(loop, False)
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


def test_a_table_by_hand() -> None:
    same = {"last_loss": 0.51234, "plain_loss": 0.5, "share": 0.9, "identical": True, "skipped": 3, "plain_skipped": 2}
    rows = [
        Row(loop="gan", way="topk", everything=False, distance=0.25, same_skips=False, verdict="trains", **same),  # type: ignore[arg-type]
        Row(loop="gan", way="dgc", everything=True, verdict="raised", message="MomentumError: no"),
    ]
    assert table(rows).rows == [
        ["gan", "topk", "0.5123", "0.5", "0.250", "yes", "3 for 2", "trains"],
        ["gan", "dgc", "—", "—", "—", "—", "—", "raised (1)"],
    ]
    assert markdown(rows).splitlines() == [
        "| loop | plain DDP | all is sent | topk |",
        "| --- | ---: | --- | ---: |",
        "| gan | 0.5 | raised (1) | 0.5123 |",
        "",
        "- (1) MomentumError: no",
        "",
        "1 raised, 1 trains",
    ]
    assert summary(rows) == "1 raised, 1 trains"


def test_every_loop_says_what_it_does() -> None:
    said = {loop.__doc__ for loop in LOOPS.values()}
    assert len(LOOPS) == len(said)
    assert all(text and text.splitlines()[0].endswith((".", ":")) for text in said)


def _command(*arguments: str) -> tuple[int, str]:
    app = typer.Typer(add_completion=False)
    app.command()(main)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.mark.slow
def test_the_script_writes_a_row_for_everything_and_what_was_raised(tmp_path: Path) -> None:
    written = ["--json", str(tmp_path / "x.json"), "--markdown", str(tmp_path / "x.md")]
    code, said = _command("--quick", "--only", "adamw", *written)
    assert code == 0, said
    document = json.loads((tmp_path / "x.json").read_text())
    assert document["schema"] == "thinwire.loops/1"
    rows = {row["way"]: row for row in document["rows"]}
    assert list(rows) == ["plain DDP", *WHOLE, *SPARSE]
    for name, row in rows.items():
        if name in BY_NAME and BY_NAME[name].momentum:
            assert row["verdict"] == "raised"
            assert row["message"].startswith("MomentumError")
        else:
            assert row["identical"]
            assert math.isfinite(row["last_loss"])
    assert "MomentumError" in (tmp_path / "x.md").read_text()


def test_an_unknown_loop_is_refused() -> None:
    code, said = _command("--only", "gen")
    assert code == 2
    assert "no loop is called" in said
