"""DRAGONN's claims about steps to a target, with eight virtual workers."""

import math
from collections.abc import Mapping
from statistics import fmean

from papers.dragonn import DRAGONN
from papers.lab.benches import XL_1G, Steps
from papers.lab.judging import by_setting, every, verdict
from papers.lab.ledger import Outcome
from papers.lab.trials import RATES, Series, Trials, Way, steps_to

WAYS = {
    "dense": Way(recipe="dense()"),
    "topk": Way(recipe="topk(density=0.001)"),
    "dgc": Way(recipe="dgc(density=0.001)"),
    "hashed": Way(recipe="dragonn(density=0.001)"),
    "hashed, equal bytes": Way(recipe="dragonn(density=0.0016)"),
    "signsgd": Way(recipe="signsgd()"),
    "randomk": Way(recipe="randomk(density=0.001)"),
}
_FASTER = {
    f"{name}, 4 times the rate": Way(recipe=WAYS[name].recipe, rate=4 * RATES["xml"]) for name in ("dgc", "hashed")
}
XL = Trials(model="xml", scale=0.05, workers=8, steps=150, rate=RATES["xml"], ways=WAYS | _FASTER)
MLP = Trials(model="mlp", workers=8, steps=200, rate=RATES["mlp"], ways=WAYS)
_BY_SIZE = ("dense", "topk", "dgc", "hashed", "hashed, equal bytes")
XL_BY_SIZE, MLP_BY_SIZE = XL.only(*_BY_SIZE, *_FASTER), MLP.only(*_BY_SIZE)
"""Those that send the largest elements."""

Ways = Mapping[str, Series]
_HOW = (
    "8 virtual workers, density 0.001, 3 seeds: a linear layer of 6.3 M weights (XL, 150 steps) and MNIST (200 steps); "
    "steps to the loss that, seed by seed, "
)


def steps(ways: Ways) -> dict[str, float]:
    """Return each way's mean number of steps to the loss that `dgc` ends at; infinite if a seed does not get there."""
    targets = [trial.loss for trial in ways["dgc"]]
    return {name: steps_to(series, targets) for name, series in ways.items()}


def _said(found: Mapping[str, float], *names: str) -> str:
    return ", ".join(f"{name} {found[name]:.0f}" if math.isfinite(found[name]) else f"{name} not" for name in names)


@DRAGONN.judge("D11", XL_BY_SIZE, MLP_BY_SIZE)
def closer_than_dgc(xl: Ways, mlp: Ways) -> Outcome:
    """Hashed slots need no more steps than DGC; a result in their favour must survive equal bytes."""
    found = {"XL": steps(xl), "MLP": steps(mlp)}
    parts = {model: verdict(n["hashed"] <= n["dgc"]) for model, n in found.items()}
    word, note = by_setting(parts)
    measured = "; ".join(f"{model}: steps {_said(n, *_BY_SIZE)}" for model, n in found.items())
    measured += f"; XL at 4 times the rate: {_said(found['XL'], *_FASTER)}"
    return Outcome(
        verdict=word, note=note, measured=measured, how=f"{_HOW}`dgc` ends at; equal bytes: 1.6 times the density"
    )


@DRAGONN.judge("D17", XL, MLP)
def others_need_more(xl: Ways, mlp: Ways) -> Outcome:
    """SignSGD needs more steps than hashed slots, and Random-k five times as many."""
    found = {"XL": _to(xl, "hashed"), "MLP": _to(mlp, "hashed")}
    parts = {
        f"{name} on {model}": verdict(n[name] >= times * n["hashed"])
        for model, n in found.items()
        for name, times in (("signsgd", 1), ("randomk", 5))
    }
    word, note = every(parts)
    measured = "; ".join(f"{model}: steps {_said(n, 'hashed', 'signsgd', 'randomk')}" for model, n in found.items())
    ends = ", ".join(
        f"{name} {fmean(t.loss for t in xl[name]):.2f} and {fmean(t.loss for t in mlp[name]):.2f}"
        for name in ("hashed", "signsgd", "randomk")
    )
    how = f"{_HOW}`dragonn` has after a fifth of its run; not: not within the run, which is five times as long"
    return Outcome(verdict=word, note=note, measured=f"{measured}; losses at the end {ends}", how=how)


def _to(ways: Ways, name: str) -> dict[str, float]:
    """Return steps to a loss that a way reaches at a fifth of its run, so that five times as many can be seen."""
    targets = [trial.losses[len(trial.losses) // 5] for trial in ways[name]]
    return {other: steps_to(series, targets) for other, series in ways.items()}


@DRAGONN.judge("D10", XL_BY_SIZE, XL_1G)
def time_to_target(xl: Ways, bench: Steps) -> Outcome:
    """Dense takes longest to a target, then DGC, then hashed slots."""
    needed = steps(xl)
    times = {
        name: needed[name] * bench.seconds(label)
        for name, label in (
            ("dense", "dense"),
            ("dgc", "dgc 0.001"),
            ("hashed", "dragonn 0.001"),
            ("topk", "topk 0.001"),
        )
    }
    holds = times["dense"] > times["dgc"] > times["hashed"]
    measured = (
        f"DGC's time over hashed slots' {times['dgc'] / times['hashed']:.2f}, dense's "
        f"{times['dense'] / times['hashed']:.2f}, exact "
        f"Top-k's {times['topk'] / times['hashed']:.2f}; steps "
        f"{_said(needed, 'dense', 'dgc', 'hashed', 'topk')}, so no fewer than dense"
    )
    how = f"{_HOW}`dgc` ends at, times the median step of XL at twice the size, 4 workers, 1 Gbit/s"
    return Outcome(verdict=verdict(holds), measured=measured, how=how)
