"""DRAGONN's claims about whole steps, over links and as a plan chooses."""

from collections.abc import Mapping
from statistics import median, quantiles
from typing import Any

from papers.dragonn import DRAGONN
from papers.lab.benches import CNN_1G, FC_1G, LM_1G, TEXT_1G, XL_1G, XL_100M, Steps
from papers.lab.judging import Range, every, sooner, verdict
from papers.lab.ledger import FAILS, HOLDS, UNDECIDED, Outcome
from papers.lab.shelf import Document

PLAN = Document(
    name="plan",
    words="python benchmarks/planner.py grid --models transformer,xml --worlds 4 --links none,1gbit,300mbit,100mbit",
    quick="--links none --models transformer --worlds 2 --seconds 0.2",
)
_NOISE = 0.97
"""A gain that is this share of another's is not behind it."""
_STEPS = "`thinwire bench`, 4 workers on 2 cores, median steps of three rounds; 20th to 80th percentile in brackets"


_APART = "brackets apart"


def _gain(steps: Steps, label: str) -> str:
    return f"{steps.faster(label):.2f} ({steps.spread(label)})"


@DRAGONN.judge("D4", FC_1G)
def encoding_eats_gain(fc: Steps) -> Outcome:
    """DGC gains less than its bytes promise, and encoding is at least four fifths of what is missing."""
    promised = fc.free + 8 * fc.bytes("dgc 0.001") / 1e9
    missing = fc.seconds("dgc 0.001") - promised
    split = fc.rows["dgc 0.001"].split_seconds
    explained = (split.encode + split.decode) / missing if missing > 0 else 0.0
    measured = (
        f"{fc.seconds('dense') / promised:.2f} expected, {_gain(fc, 'dgc 0.001')} seen; encoding "
        f"and decoding are {explained:.0%} of "
        f"the {1e3 * missing:.0f} ms that are missing"
    )
    how = f"small VGG, 1 Gbit/s; expected: a step with the link lifted and DGC's bytes at that rate; {_STEPS}"
    return Outcome(verdict=verdict(missing > 0 and explained >= 0.8), measured=measured, how=how)


@DRAGONN.judge("D8", CNN_1G, TEXT_1G, XL_1G)
def hashed_first(cnn: Steps, text: Steps, xl: Steps) -> Outcome:
    """Hashed slots are faster than DGC and that than dense, most so on the largest layer."""
    models = {"ResNet-20": cnn, "transformer": text, "XL": xl}
    parts = {
        f"{name}, {label}": steps.ahead(*pair)
        for name, steps in models.items()
        for label, pair in (("over DGC", ("dragonn 0.001", "dgc 0.001")), ("DGC over dense", ("dgc 0.001",)))
    }
    word, note = every(parts)
    measured = "; ".join(
        f"{name}: {_gain(steps, 'dragonn 0.001')} and {_gain(steps, 'dgc 0.001')}" for name, steps in models.items()
    )
    how = (
        "gain over dense of `dragonn` and `dgc`, density 0.001, 1 Gbit/s; XL: 12.7 M weights; "
        f"{_STEPS}; holds if in that order on all, {_APART}"
    )
    return Outcome(verdict=word, note=note, measured=measured, how=how)


@DRAGONN.judge("D18", XL_1G)
def order_of_throughput(xl: Steps) -> Outcome:
    """Random-k is faster than DRAGONN, and that than DGC and SignSGD."""
    labels = ("randomk 0.001", "dragonn 0.001", "dgc 0.001", "signsgd")
    first, hashed, *others = labels
    word, note = every(
        {f"{a} over {b}": xl.ahead(a, b) for a, b in ((first, hashed), *((hashed, each) for each in others))}
    )
    measured = ", ".join(f"{label} {_gain(xl, label)}" for label in labels)
    how = f"gain over dense, XL of 12.7 M weights, 1 Gbit/s; {_STEPS}; holds if in that order, {_APART}"
    return Outcome(verdict=word, note=note, measured=measured, how=how)


@DRAGONN.judge("D19", TEXT_1G)
def leads_at_each_ratio(text: Steps) -> Outcome:
    """Hashed slots lead DGC at each density, and QSGD."""
    densities = ("0.001", "0.01", "0.1")
    parts = {
        density: verdict(text.faster(f"dragonn {density}") >= _NOISE * text.faster(f"dgc {density}"))
        for density in densities
    } | {"QSGD": verdict(text.faster("dragonn 0.01") >= _NOISE * text.faster("qsgd"))}
    word, note = every(parts)
    said = "; ".join(f"{d}: {_gain(text, f'dragonn {d}')} and {_gain(text, f'dgc {d}')}" for d in densities)
    measured = f"{said}; QSGD of 4 bits {_gain(text, 'qsgd')}"
    how = (
        f"gain over dense of `dragonn` and `dgc`, transformer, 1 Gbit/s; {_STEPS}; holds if "
        "nowhere more than 3 % behind"
    )
    return Outcome(verdict=word, note=note, measured=measured, how=how)


@DRAGONN.judge("D20", LM_1G)
def language_model(lm: Steps) -> Outcome:
    """Faster than DGC, and both than dense, on a model with a large embedding."""
    hashed, dgc = "dragonn 0.001", "dgc 0.001"
    word, note = every({"over DGC": lm.ahead(hashed, dgc), "DGC over dense": lm.ahead(dgc)})
    measured = f"{lm.faster(hashed, dgc):.2f} over DGC, {_gain(lm, hashed)} over dense"
    how = f"LSTM of 4.4 M weights on WikiText-2 instead of BERT, 1 Gbit/s; {_STEPS}; direction only, {_APART}"
    return Outcome(verdict=word, note=note, measured=measured, how=how)


@DRAGONN.judge("D26", XL_100M, XL_1G)
def more_on_faster_links(slow: Steps, fast: Steps) -> Outcome:
    """The lead over DGC is larger on the faster link."""
    (least, low, most), (least_fast, high, most_fast) = map(_leads, (slow, fast))
    word = HOLDS if least_fast > most else FAILS if most_fast < least else UNDECIDED
    measured = f"DGC's step over DRAGONN's: {low:.3f} at 100 Mbit/s, {high:.3f} at 1 Gbit/s"
    how = f"XL of 12.7 M weights, density 0.001; {_STEPS}; holds if it rises, {_APART}"
    return Outcome(verdict=word, measured=measured, how=how)


def _leads(steps: Steps) -> tuple[float, float, float]:
    """Return DGC's step over DRAGONN's: at least, by medians, and at most."""
    dgc, hashed = (steps.rows[f"{name} 0.001"].step_seconds for name in ("dgc", "dragonn"))
    return dgc.p20 / hashed.p80, dgc.p50 / hashed.p50, dgc.p80 / hashed.p20


@DRAGONN.judge("D16", PLAN)
def choosing_never_hurts(found: Mapping[str, Any]) -> Outcome:
    """What Eq. 1 chooses is no slower than all dense, nor than all by the same method, at each rate."""
    parts, said, other_methods = {}, [], []
    for cell in found["cells"]:
        where, chosen = f"{cell['model']} at {cell['link']}", sorted(set(cell["choice"].values()))
        others = ["dense", *chosen]
        parts[where] = every({name: _not_behind(cell, name) for name in others})[0]
        said.append(f"{where} " + ", ".join(f"{_times(cell, name):.2f} of {name}" for name in others))
        best, times = _best(cell)
        if best not in others:
            other_methods.append(f"{where} {times:.2f} of {best}")
    word, note = every(parts)
    measured = (
        f"{'; '.join(said)}. Which method, the paper does not ask: where another was first, the plan took "
        f"{', '.join(other_methods) or 'no longer'}"
    )
    how = (
        "real steps of 4 workers, in turns: the plan, dense, and the plan's method for all tensors; the planner counts "
        "2/K, as a ring all-reduce sends, and for 4 workers the printed 1/K would see half of dense's time; holds if "
        "nowhere over 5 % behind by medians, and fails where the 20th to 80th percentiles say so, too. XL is one "
        "tensor, "
        "so there a plan and its method for all are the same, and differ by noise alone"
    )
    return Outcome(verdict=word, note=note, measured=measured, how=how)


def _not_behind(cell: Mapping[str, Any], name: str) -> str:
    """Whether the plan's steps are within 5 % of another row's, by medians; it fails where the percentiles say so."""
    if _times(cell, name) <= 1.05:
        return HOLDS
    return FAILS if sooner(_middle(cell, "the plan"), _middle(cell, name), 1.05) == FAILS else UNDECIDED


def _middle(cell: Mapping[str, Any], name: str) -> Range:
    """Return the 20th and 80th percentile of the steps."""
    low, *_, high = quantiles(cell["measured"][name], n=5)
    return low, high


def _times(cell: Mapping[str, Any], name: str) -> float:
    return median(cell["measured"]["the plan"]) / median(cell["measured"][name])


def _best(cell: Mapping[str, Any]) -> tuple[str, float]:
    """Return the fastest of all methods, and how many times as long the plan's median step is."""
    others = [name for name in cell["measured"] if name not in ("the plan", "dense again", "auto")]
    best = max(others, key=lambda name: _times(cell, name))
    return best, _times(cell, best)
