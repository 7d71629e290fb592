"""DCT's claims about step times."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from thinwire_lab.papers.shared.benches import FC_1G, FC_100M, FC_LIVES, Grid, Place, Steps, told
from thinwire_lab.papers.shared.claims import DCT
from thinwire_lab.papers.shared.judging import agreed, by_setting, every, sooner
from thinwire_lab.papers.shared.ledger import Outcome
from thinwire_lab.papers.shared.shelf import Document

SELECTING = Document(name="selecting", words="python -m thinwire_lab.papers.shared.timed selecting")


def _rounds(found: Mapping[str, Any]) -> str:
    changes = [abs(each) for lines in _cells(found).values() for each in _changes(lines, "plain again")]
    return f"rounds \N{PLUS-MINUS SIGN} {max(changes):.0%}"


PIPELINE = Document(
    name="pipeline",
    words="python -m thinwire_lab.studies.pipeline --rounds 3 --steps 24",
    quick="--steps 3 --rounds 1 --problem transformer --link 100mbit",
    apart=_rounds,
)
_JUDGED = (0.25, 0.05, 0.005)
_KEPT = "dct_dp 0.05"


def _by_place(slow: Steps, fast: Steps, lives: Grid) -> Grid:
    """Return the steps of two, four and eight workers on both links."""
    found = {Place(4, "100mbit"): slow, Place(4, "1gbit"): fast, **lives}
    return {place: found[place] for place in sorted(found)}


@DCT.judge("T5", FC_100M, FC_1G, FC_LIVES)
def knee(slow: Steps, fast: Steps, lives: Grid) -> Outcome:
    found = _by_place(slow, fast, lives)
    ends = told(found, lambda steps: " / ".join(f"{1e3 * steps.seconds(f'dct_dp {each:g}'):.0f}" for each in _JUDGED))
    parts = {str(place): every(_falls_then_flat(steps))[0] for place, steps in found.items()}
    return Outcome(*by_setting(parts), measured=f"ms at 75 / 95 / 99.5 %: {ends}")


def _falls_then_flat(steps: Steps) -> dict[str, str]:
    most, knee, least = (steps.range(f"dct_dp {density:g}") for density in _JUDGED)
    return {"falls": sooner(knee, most, 1 / 1.05), "is flat": sooner(knee, least, 1.1)}


@DCT.judge("T3", FC_1G, SELECTING, FC_100M, FC_LIVES)
def rare_thresholds(fc: Steps, found: Mapping[str, Any], slow: Steps, lives: Grid) -> Outcome:
    took, grid = found["seconds"], _by_place(slow, fc, lives)
    ends = told(grid, lambda steps: f"{_longer(steps, took['sort']):+.0%} / {_longer(steps, took['sort'] / 1000):+.0%}")
    measured = f"L = 1 / L = 1000 over dense: {ends}; to find a threshold: " + ", ".join(
        f"{name} {1e3 * each:.1f} ms" for name, each in took.items()
    )
    parts = {str(place): every(_rare_pays(steps, took["sort"]))[0] for place, steps in grid.items()}
    return Outcome(*by_setting(parts), measured=measured)


def _rare_pays(steps: Steps, sort: float) -> dict[str, str]:
    soonest, latest = steps.range(_KEPT)
    return {
        "L = 1 by a sort loses": sooner(steps.range("dense"), (soonest + sort, latest + sort)),
        "L = 1000 wins": steps.ahead(_KEPT),
    }


def _longer(steps: Steps, more: float) -> float:
    return (steps.seconds(_KEPT) + more) / steps.seconds("dense") - 1


@DCT.judge("T14", PIPELINE)
def flattens(found: Mapping[str, Any]) -> Outcome:
    parts, said = {}, []
    for where, lines in _cells(found).items():
        changes = [_changes(lines, f"DCT-MP {sparsity} %") for sparsity in (75, 90, 95)]
        parts[where] = agreed(
            most < -0.02 and most <= few and abs(all_but - most) < max(0.02, few - most)
            for few, most, all_but in zip(*changes, strict=True)
        )
        said.append(f"{where} {', '.join(f'{median(each):+.1%}' for each in changes)}")
    return Outcome(*by_setting(parts), measured="; ".join(said))


@DCT.judge("T15", PIPELINE)
def together(found: Mapping[str, Any]) -> Outcome:
    parts, said = {}, []
    for where, lines in _cells(found).items():
        changes = [_changes(lines, name) for name in ("both", "DCT-MP 90 %", "DCT-DP")]
        parts[where] = agreed(1 + both < 0.98 * (1 + min(alone)) for both, *alone in zip(*changes, strict=True))
        both, boundaries, gradients = map(median, changes)
        said.append(f"{where} {both:+.1%} against {boundaries:+.1%} and {gradients:+.1%}")
    return Outcome(*by_setting(parts), measured="; ".join(said))


def _cells(found: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the lines of each model and link."""
    return {f"{model} at {link}": lines for model, links in found["runs"].items() for link, lines in links.items()}


def _changes(lines: Mapping[str, Any], name: str) -> list[float]:
    """Return by what share a line's step is longer than the plain one's, in each round."""
    pairs = zip(lines[name], lines["plain"], strict=True)
    return [line["total"] / plain["total"] - 1 for line, plain in pairs]
