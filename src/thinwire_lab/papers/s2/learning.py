"""The S2 Reducer's claims about learning, with virtual workers."""

import math
from collections.abc import Mapping

from thinwire_lab.papers.shared.benches import TEXT_1G, Steps
from thinwire_lab.papers.shared.claims import GRADIENTS, S2
from thinwire_lab.papers.shared.judging import HALF_A_POINT, by_setting, every, no_worse, sooner, verdict
from thinwire_lab.papers.shared.ledger import FAILS, HOLDS, UNDECIDED, Outcome
from thinwire_lab.papers.shared.trials import Series, Ways, more_steps, points_lost, steps_to, trained

RATIOS = (2, 1, 0.5, 0.25, 0.1, 0.05)
_BENCHED = "s2_reducer 0.0312"
TEXT, SLOWLY, LONGER, CNN, SECOND, CNN_WHOLE, SECOND_WHOLE, LM = trained("s2").values()


def _targets(ways: Ways) -> list[float]:
    """Return the exact union's loss after some half of its run, seed by seed."""
    return [trial.losses[len(trial.losses) // 2] for trial in ways["union"]]


def _half(series: Series) -> int:
    """Return the step of the look that lies in the middle."""
    return series[0].steps[len(series[0].steps) // 2]


@S2.judge("S4", TEXT, SLOWLY, LONGER)
def rate_is_kept(text: Ways, slowly: Ways, longer: Ways) -> Outcome:
    parts, said = {}, []
    for name, ways in (("dense's best rate", text), ("a tenth of dense's rate", {**slowly, **longer})):
        targets = _targets(ways)
        steps = {way: steps_to(series, targets) for way, series in ways.items()}
        found = {
            ratio: _growth(ways[f"ratio {ratio:g}"], steps[f"ratio {ratio:g}"], steps["union"], ratio)
            for ratio in RATIOS
        }
        parts[name] = every({f"{ratio:g}": word for ratio, (word, _) in found.items()})[0]
        said.append(f"at {name} {', '.join(words for _, words in found.values())}")
    measured = "; ".join(reversed(said))
    return Outcome(*by_setting(parts), more="a longer run", measured=measured, said={"half": _half(text["union"])})


@S2.judge("S16", TEXT, SLOWLY, TEXT_1G, GRADIENTS)
def best_size(text: Ways, slowly: Ways, bench: Steps, gradients: Mapping[str, Outcome]) -> Outcome:
    targets = _targets(slowly)
    names = ["union", *(f"ratio {ratio:g}" for ratio in RATIOS)]
    counts = {name: min(steps_to(ways[name], targets) for ways in (text, slowly)) for name in names}
    took = {name: counts[name] * _seconds(bench, text[name], text["ratio 0.5"]) for name in names}
    apart = [edge / bench.seconds(_BENCHED) for edge in bench.range(_BENCHED)]
    ranges = {name: (apart[0] * seconds, apart[1] * seconds) for name, seconds in took.items()}
    first = every({name: sooner(ranges["ratio 0.5"], each) for name, each in ranges.items() if name != "ratio 0.5"})[0]
    error = gradients["S16"]
    measured = (
        "seconds: "
        + ", ".join(f"{name} {took[name]:.1f}" for name in names if math.isfinite(took[name]))
        + f"; errors of gradients: {error.measured}"
    )
    return Outcome(
        *every({"soonest": first, "error at equal bytes": error.verdict}),
        measured=measured,
        said={"half": _half(slowly["union"])},
    )


def _seconds(bench: Steps, trained: Series, half: Series) -> float:
    """Return the seconds of a step, reckoned from that of a sketch of half the size."""
    nbytes = bench.bytes(_BENCHED)
    return bench.seconds(_BENCHED) + 8e-9 * nbytes * (trained[0].bits / half[0].bits - 1)


def _growth(sketched: Series, steps: float, union: float, ratio: float) -> tuple[str, str]:
    """Return whether steps have grown within the bound, and by how much, in words."""
    bound, last = 1 + 1 / ratio, sketched[0].steps[-1]
    if math.isfinite(steps):
        return verdict(steps / union <= bound), f"{steps / union:.2f}"
    if any(math.isinf(trial.loss) for trial in sketched):
        return FAILS, "diverged"
    return UNDECIDED if bound * union > last else FAILS, f"not within {last} steps"


@S2.judge("S10", TEXT)
def fewer_steps(text: Ways) -> Outcome:
    found = more_steps(text["sketch"], text["union"], _targets(text))
    measured = f"steps of the sketch over the exact union's: {found}"
    return Outcome(verdict=HOLDS if found.below else FAILS, measured=measured)


@S2.judge("S12", SECOND, SECOND_WHOLE)
def second_network(second: Ways, whole: Ways) -> Outcome:
    found = points_lost(second["sketch"], second["dense"])
    lost = ", ".join(f"{name} {points_lost(second[name], second['dense'])}" for name in ("sketch", "union"))
    measured = f"{lost}; the model as one vector, as in the paper, {points_lost(whole['whole'], second['dense'])}"
    return Outcome(verdict=no_worse(found, HALF_A_POINT), measured=measured)
