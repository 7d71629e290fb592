"""DRAGONN's claims about whole steps, over links and as a plan chooses."""

from collections.abc import Iterator, Mapping
from operator import methodcaller
from statistics import median, quantiles
from typing import Any, NamedTuple

from thinwire_lab.papers.shared import benches
from thinwire_lab.papers.shared.benches import Grid, Place, Steps, at_every, by_workers, faster, told
from thinwire_lab.papers.shared.claims import DRAGONN
from thinwire_lab.papers.shared.judging import Range, by_setting, every, larger, sooner
from thinwire_lab.papers.shared.ledger import FAILS, HOLDS, UNDECIDED, Outcome
from thinwire_lab.papers.shared.shelf import Document

PLAN = Document(
    name="plan",
    words="python -m thinwire_lab.studies.planner grid --models transformer,xml --worlds 4 "
    "--links none,1gbit,300mbit,100mbit",
    quick="--links none --models transformer --worlds 2 --seconds 0.2",
)
_ASKED = Place(4, "1gbit")
_HASHED, _DGC = "dragonn 0.001", "dgc 0.001"
_over_dgc, _over_dense = methodcaller("ahead", _HASHED, _DGC), methodcaller("ahead", _DGC)


def _gain(steps: Steps, label: str) -> str:
    """Return how many times as fast as dense's median step it is, by its median and its percentiles."""
    least, most = (steps.seconds("dense") / each for each in reversed(steps.range(label)))
    return f"{steps.faster(label):.2f} ({least:.2f} to {most:.2f})"


@DRAGONN.judge("D4", benches.FC_1G)
def encoding_eats_gain(fc: Steps) -> Outcome:
    promised, split = fc.free + 8 * fc.bytes(_DGC) / 1e9, fc.rows[_DGC].split_seconds
    coding, (soonest, latest) = split.encode + split.decode, fc.range(_DGC)
    four_fifths = (0.8 * (soonest - promised), 0.8 * (latest - promised))
    parts = {
        "less than promised": sooner((promised, promised), (soonest, latest)),
        "by encoding": sooner(four_fifths, (coding, coding)),
    }
    missing = fc.seconds(_DGC) - promised
    measured = (
        f"{fc.seconds('dense') / promised:.2f} expected, {_gain(fc, _DGC)} seen; coding takes {1e3 * coding:.0f} "
        f"ms, {coding / missing:.0%} of the {1e3 * missing:.0f} ms missing, of which four fifths are "
        f"{1e3 * four_fifths[0]:.0f} to {1e3 * four_fifths[1]:.0f} ms"
    )
    return Outcome(*every(parts), measured=measured)


@DRAGONN.judge("D8", benches.CNN_STEPS, benches.TEXT_STEPS, benches.XL_STEPS)
def hashed_first(cnn: Grid, text: Grid, xl: Grid) -> Outcome:
    models = {"ResNet-20": cnn, "transformer": text, "XL": xl}
    asked = (4, 8)
    parts = {f"over DGC on {name}": every(at_every(found, _over_dgc, asked))[0] for name, found in models.items()}
    parts |= {
        f"DGC over dense on {name}": every(at_every(found, _over_dense, asked))[0] for name, found in models.items()
    }
    parts |= {f"more on XL than on {name}": _more_on(xl, models[name], asked) for name in ("ResNet-20", "transformer")}
    leads = (
        f"{name} {faster(found, _HASHED, _DGC)} over DGC, which is {faster(found, _DGC)} over dense"
        for name, found in models.items()
    )
    return Outcome(*every(parts), measured="; ".join(leads))


def _more_on(xl: Grid, other: Grid, workers: tuple[int, ...]) -> str:
    gained = {str(at): larger(xl[at].gain(_HASHED), other[at].gain(_HASHED)) for at in xl if at.workers in workers}
    return every(gained)[0]


@DRAGONN.judge("D18", benches.XL_STEPS)
def order_of_throughput(xl: Grid) -> Outcome:
    pairs = (("randomk 0.001", _HASHED), (_HASHED, _DGC), (_HASHED, "signsgd"))
    steps = xl[_ASKED]
    labels = ("randomk 0.001", _HASHED, _DGC, "signsgd")
    asked = ", ".join(f"{label} {steps.faster(label):.2f}" for label in labels)
    parts = {f"{a} over {b}": steps.ahead(a, b) for a, b in pairs}
    return Outcome(*every(parts), measured=f"over dense {asked}")


@DRAGONN.judge("D19", benches.TEXT_100M, benches.TEXT_1G, benches.TEXT_SPARSER)
def leads_at_each_ratio(slow: Steps, fast: Steps, sparser: Grid) -> Outcome:
    found = {"100mbit": slow, "1gbit": fast}
    at = {
        (link, density): sparser[Place(4, link)] if density == "0.0001" else steps
        for link, steps in found.items()
        for density in ("0.0001", "0.001", "0.01", "0.1")
    }
    parts = {
        f"{density} at {link}": sooner(steps.range(f"dragonn {density}"), steps.range(f"dgc {density}"), 1.03)
        for (link, density), steps in at.items()
    } | {
        f"QSGD at {link}": sooner(steps.range("dragonn 0.01"), steps.range("qsgd"), 1.03)
        for link, steps in found.items()
    }
    link, density = min(
        at,
        key=lambda each: (
            parts[f"{each[1]} at {each[0]}"] != FAILS,
            at[each].faster(f"dragonn {each[1]}", f"dgc {each[1]}"),
        ),
    )
    ours, theirs = (_gain(at[link, density], f"{name} {density}") for name in ("dragonn", "dgc"))
    return Outcome(*every(parts), measured=f"least at {density} and {link}: {ours} where DGC has {theirs}")


@DRAGONN.judge("D20", benches.LM_STEPS)
def language_model(lm: Grid) -> Outcome:
    asked = lm[_ASKED]
    measured = f"over DGC {asked.faster(_HASHED, _DGC):.2f}, over dense {asked.faster(_HASHED):.2f}"
    return Outcome(*every({"over DGC": _over_dgc(asked), "DGC over dense": _over_dense(asked)}), measured=measured)


@DRAGONN.judge("D26", benches.XL_STEPS)
def more_on_faster_links(xl: Grid) -> Outcome:
    parts = {
        f"P = {workers}": larger(fast.gain(_HASHED, _DGC), slow.gain(_HASHED, _DGC))
        for workers, (slow, fast) in by_workers(xl).items()
    }
    return Outcome(*by_setting(parts), measured=told(xl, lambda steps: f"{steps.faster(_HASHED, _DGC):.3f}"))


@DRAGONN.judge("D16", PLAN)
def choosing_never_hurts(found: Mapping[str, Any]) -> Outcome:
    parts, worst = {}, dict[bool, float]()
    for cell in found["cells"]:
        others = ["dense", *sorted(set(cell["choice"].values()))]
        parts[f"{cell['model']} at {cell['link']}"] = every({name: _not_behind(cell, name) for name in others})[0]
        for name in others:
            worst[name == "dense"] = max(worst.get(name == "dense", 0.0), _times(cell, name))
    most = f"{worst[True]:.2f} of dense" + (f", {worst[False]:.2f} of its method for all" if False in worst else "")
    return Outcome(*every(parts), measured=f"at most {most}")


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


class LeftOut(NamedTuple):
    """Where a plan compresses some tensors alone: how many, and its gain over the same method for all."""

    link: str
    compressed: int
    gain: float
    verdict: str


def leaving_out(found: Mapping[str, Any]) -> Iterator[LeftOut]:
    """Yield the cells in which one method was chosen, and not for every tensor."""
    for cell in found["cells"]:
        chosen = set(cell["choice"].values())
        if len(chosen) == 1 and len(cell["choice"]) > 1:
            (name,) = chosen
            ahead = sooner(_middle(cell, "the plan"), _middle(cell, name))
            yield LeftOut(cell["link"], len(cell["choice"]), 1 / _times(cell, name), ahead)
