"""The claims about activations: thresholds that fall, the law they follow, and how far a fitted threshold strays."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from thinwire_lab.papers.dct.looking import DENSITIES
from thinwire_lab.papers.dct.model_parallel import trainings
from thinwire_lab.papers.shared.claims import DCT, GRADIENTS
from thinwire_lab.papers.shared.judging import agreed, by_setting, every
from thinwire_lab.papers.shared.ledger import Outcome
from thinwire_lab.papers.shared.shelf import Document

_FIGURES = "python -m thinwire_lab.papers.dct.model_parallel figures"
_FIRST = Document(
    name="activations",
    words=_FIGURES,
    quick="--steps 20",
    complete=lambda found: found["runs"].keys() >= trainings().keys(),
)
ACTIVATIONS = (
    _FIRST,
    *(replace(_FIRST, name=f"activations-{n}", words=f"{_FIGURES} --seed {n}", seeds=(n,)) for n in (1, 2)),
)
"""One document a seed."""
_NOTHING = 0.01
"""A threshold below this share of the root mean square: what is left out is zeros already."""
Found = Mapping[str, Any]


def _spread(values: Iterable[float], form: str) -> str:
    """Return the mean over seeds, and in brackets from where to where they reach."""
    all_of = list(values)
    return f"{fmean(all_of):{form}} ({min(all_of):{form}} to {max(all_of):{form}})"


@DCT.judge("T16", *ACTIVATIONS)
def teaches_sparsity(*seeds: Found) -> Outcome:
    parts, said = {}, []
    for place, density in enumerate(DENSITIES):
        runs = (f"exact {density:g}", "dense")
        with_one, dense = ([_end(found["runs"][run], place) for found in seeds] for run in runs)
        if max(*with_one, *dense) > _NOTHING:
            parts[f"{1 - density:.0%}"] = agreed(a < b for a, b in zip(with_one, dense, strict=True))
        said.append(f"{_spread(with_one, '.2f')} against {_spread(dense, '.2f')} at {1 - density:.0%}")
    return Outcome(*every(parts), measured=f"over RMS {', '.join(said)}")


def _end(looks: list[Mapping[str, Any]], place: int) -> float:
    """Return a threshold over the root mean square, at the end."""
    return fmean(look["thresholds"][place] / look["rms"] for look in looks[-max(1, len(looks) // 10) :])


@DCT.judge("T17", *ACTIVATIONS, GRADIENTS)
def laplace(*found: Any) -> Outcome:
    *seeds, checked = found
    before = [each["shapes"]["before the ReLU"]["aic"] for each in seeds]
    other = checked["T17"]
    dlrm = agreed(aic["Laplace"] < aic["normal"] for aic in before)
    laws = " against ".join(_spread((aic[law] for aic in before), ".3f") for law in ("Laplace", "normal"))
    measured = f"DLRM: criterion {laws}; MNIST: {other.measured}"
    return Outcome(*every({"DLRM": dlrm, "MNIST": other.verdict}), measured=measured, said={"other": other.how})


@DCT.judge("T18", *ACTIVATIONS, GRADIENTS)
def strays(*found: Any) -> Outcome:
    *seeds, checked = found
    other = checked["T18"]
    looks = [each["runs"]["Laplace 0.25"] for each in seeds]
    drifts = (each[-1]["fitted"][0] - each[0]["fitted"][0] for each in looks)
    parts = {"DLRM": agreed(abs(drift) >= 0.05 for drift in drifts), "the MNIST network": other.verdict}
    fitted, one_sided = (
        " to ".join(_spread((each[at][which][0] for each in looks), ".1%") for at in (0, -1))
        for which in ("fitted", "one_sided")
    )
    measured = (
        f"DLRM: {fitted}; MNIST: {other.measured}{other.note}; by the paper's one-sided formula DLRM: {one_sided}"
    )
    return Outcome(*by_setting(parts), more="more seeds", measured=measured, said={"other": other.how})


@DCT.judge("T24", *ACTIVATIONS, GRADIENTS)
def half_zero(*found: Any) -> Outcome:
    *seeds, checked = found
    zeros = [[look["zeros"] for look in each["runs"]["dense"]] for each in seeds]
    other = checked["T24"]
    dlrm = agreed(min(each) >= 0.35 and max(each) <= 0.65 for each in zeros)
    first, last = (_spread((each[at] for each in zeros), ".0%") for at in (0, -1))
    measured = f"DLRM: {first} to {last}; MNIST: {other.measured}"
    parts = {"DLRM": dlrm, "the MNIST network": other.verdict}
    return Outcome(*by_setting(parts), measured=measured, said={"other": other.how})
