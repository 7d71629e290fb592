"""The claims about activations: thresholds that fall, the law they follow, and how far a fitted threshold strays."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from papers.dct import DCT
from papers.dct.looking import DENSITIES
from papers.lab.deciding import GRADIENTS
from papers.lab.judging import by_setting, every, verdict
from papers.lab.ledger import Outcome
from papers.lab.shelf import Document

ACTIVATIONS = Document(
    name="activations",
    words="python -m papers.dct.model_parallel figures --folder papers/dct",
    quick="--steps 20 --folder papers/runs/figures",
)
_NOTHING = 0.01
"""A threshold below this share of the root mean square: what is left out is zeros already."""
_HOW = "`papers.dct.model_parallel figures`, DLRM, first cut, seed 0"
Found = Mapping[str, Any]


@DCT.judge("T16", ACTIVATIONS)
def teaches_sparsity(found: Found) -> Outcome:
    """Over the activations' root mean square, thresholds end lower with a boundary than without one."""
    ends = {f"{1 - density:.0%}": _ends(found, place) for place, density in enumerate(DENSITIES)}
    parts = {
        name: verdict(with_one < dense) for name, (with_one, dense) in ends.items() if max(with_one, dense) > _NOTHING
    }
    word, note = every(parts)
    measured = "over RMS " + ", ".join(f"{a:.4f} against {b:.4f} ({name})" for name, (a, b) in ends.items())
    how = f"the last tenth of the training, against a dense one; {_HOW}; holds if lower wherever it is above 0.01"
    return Outcome(verdict=word, note=note, measured=measured, how=how)


def _ends(found: Found, place: int) -> tuple[float, float]:
    """Return a threshold over the root mean square, at the end, with a boundary and without."""
    return _end(found["runs"][f"exact {DENSITIES[place]:g}"], place), _end(found["runs"]["dense"], place)


def _end(looks: list[Mapping[str, Any]], place: int) -> float:
    return fmean(look["thresholds"][place] / look["rms"] for look in looks[-max(1, len(looks) // 10) :])


@DCT.judge("T17", ACTIVATIONS, GRADIENTS)
def laplace(found: Found, checked: Found) -> Outcome:
    """Before a ReLU, Laplace's law describes activations better than a normal one."""
    before, behind = found["shapes"]["before the ReLU"]["aic"], found["shapes"]["at the cut"]
    other = _checked(checked, "T17")
    word, note = every({"DLRM": verdict(before["Laplace"] < before["normal"]), "MNIST": other["verdict"]})
    measured = (
        f"DLRM: criterion {before['Laplace']:.3f} against {before['normal']:.3f} before the ReLU, behind it "
        f"{behind['zeros']:.0%} are 0 and neither fits; MNIST: {other['figure']}"
    )
    how = f"Akaike's criterion per element, after training; {_HOW}, and `papers.gradients`; {other['how']}"
    return Outcome(verdict=word, note=note, measured=measured, how=how)


@DCT.judge("T18", ACTIVATIONS, GRADIENTS)
def strays(found: Found, checked: Found) -> Outcome:
    """Aimed at a quarter, a fitted threshold ends five points or more from where it began."""
    looks, other = found["runs"]["Laplace 0.25"], _checked(checked, "T18")
    ends = [(look["fitted"][0], look["one_sided"][0]) for look in (looks[0], looks[-1])]
    parts = {"DLRM": verdict(abs(ends[0][0] - ends[1][0]) >= 0.05), "the MNIST network": other["verdict"]}
    word, note = by_setting(parts)
    (first, first_sided), (last, last_sided) = ends
    measured = (
        f"DLRM: {first:.1%} to {last:.1%}, by the paper's one-sided formula {first_sided:.1%} to {last_sided:.1%}; "
        f"MNIST: {other['figure']}"
    )
    return Outcome(verdict=word, note=note, measured=measured, how=f"{_HOW}, and `papers.gradients`; {other['how']}")


@DCT.judge("T24", ACTIVATIONS, GRADIENTS)
def half_zero(found: Found, checked: Found) -> Outcome:
    """Behind a ReLU, 35 to 65 % of the activations are 0 at every look."""
    zeros, other = [look["zeros"] for look in found["runs"]["dense"]], _checked(checked, "T24")
    dlrm = verdict(min(zeros) >= 0.35 and max(zeros) <= 0.65)
    word, note = by_setting({"DLRM": dlrm, "the MNIST network": other["verdict"]})
    measured = (
        f"DLRM: {zeros[0]:.0%} at the first step, {zeros[-1]:.0%} at the end; MNIST: {other['figure']}. Where "
        "fewer than k of a row are not 0, the boundary sends k all the same, zeros among them"
    )
    return Outcome(verdict=word, note=note, measured=measured, how=f"{_HOW}, and `papers.gradients`; {other['how']}")


def _checked(found: Found, claim: str) -> Mapping[str, str]:
    """Return what the check on the MNIST network said."""
    return next(row for row in found["claims"] if row["id"] == claim)
