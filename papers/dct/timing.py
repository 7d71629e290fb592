"""DCT's claims about step times."""

from collections.abc import Mapping
from typing import Any

from papers.dct import DCT
from papers.lab.benches import FC_1G, FC_100M, Steps
from papers.lab.judging import by_setting, every, verdict
from papers.lab.ledger import Outcome
from papers.lab.shelf import Document

_STEPS = "`thinwire bench`, 4 workers on 2 cores, median steps of three rounds"
SELECTING = Document(name="selecting", words="python -m papers.dct.selecting")
TIMED = (0.25, 0.1, 0.05, 0.02, 0.005)


@DCT.judge("T5", FC_100M, FC_1G)
def knee(slow: Steps, fast: Steps) -> Outcome:
    """The step shortens with sparsity up to a knee, beyond which it is flat."""
    found = {"100 Mbit/s": slow, "1 Gbit/s": fast}
    times = {link: [steps.seconds(f"dct_dp {density:g}") for density in TIMED] for link, steps in found.items()}
    parts = {link: verdict(t[0] > 1.05 * t[2] and t[2] <= 1.1 * t[-1]) for link, t in times.items()}
    word, note = by_setting(parts)
    measured = "; ".join(
        f"{link}: dense {1e3 * found[link].seconds('dense'):.0f} ms, then "
        + ", ".join(f"{1e3 * each:.0f}" for each in t)
        for link, t in times.items()
    )
    how = (
        f"small VGG, `dct_dp` at 75, 90, 95, 98, 99.5 %; {_STEPS}; holds if 95 % is over 5 % "
        "faster than 75 %, and at most 10 % slower "
        "than 99.5 %"
    )
    return Outcome(verdict=word, note=note, measured=measured, how=how)


@DCT.judge("T3", FC_1G, SELECTING)
def rare_thresholds(fc: Steps, found: Mapping[str, Any]) -> Outcome:
    """A threshold found anew by a sort at each step makes it slower than dense; one kept for 1,000 steps, faster."""
    kept, dense, took = fc.seconds("dct_dp 0.05"), fc.seconds("dense"), found["seconds"]
    sorting = kept + took["sort"]
    parts = {"L = 1 by a sort loses": verdict(sorting > dense), "L = 1000 wins": verdict(kept < dense)}
    word, note = every(parts)
    measured = (
        f"over dense's step of {1e3 * dense:.0f} ms: L = 1000 {kept / dense - 1:+.0%}, L = 1 by a "
        f"sort {sorting / dense - 1:+.0%}; " + ", ".join(f"{name} {1e3 * each:.1f} ms" for name, each in took.items())
    )
    how = (
        f"small VGG, 95 %, 1 Gbit/s; {_STEPS}; L = 1: the kept threshold's step and a sort of "
        "every tensor, alone on one core"
    )
    return Outcome(verdict=word, note=note, measured=measured, how=how)
