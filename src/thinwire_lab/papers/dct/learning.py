"""The claims of DCT-DP about learning, with virtual workers."""

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

from thinwire_lab.papers.shared.claims import DCT
from thinwire_lab.papers.shared.judging import MARGIN, by_setting, every, no_worse
from thinwire_lab.papers.shared.ledger import FAILS, HOLDS, UNDECIDED, Outcome
from thinwire_lab.papers.shared.trials import Interval, Ways, over, trained

LIVES = (1, 10, 100, 1000)
DENSITIES = (0.25, 0.1, 0.05, 0.02, 0.005, 0.001)
_NO_LOSS = [f"{density:g}" for density in DENSITIES[:-1]]
"""Down to which the paper sees no loss."""
FC, MLP, FC_LIVES, MLP_LIVES = trained("dct").values()


@DCT.judge("T4", FC_LIVES, MLP_LIVES)
def any_life(fc: Ways, mlp: Ways) -> Outcome:
    lives = [f"L = {life}" for life in LIVES]
    models = {"VGG": fc, "MNIST": mlp}
    pairs = {name: [over(ways[a], ways[b]) for a, b in combinations(lives, 2)] for name, ways in models.items()}
    every_pair = [each for some in pairs.values() for each in some]
    apart = sum(each.above or each.below for each in every_pair)
    between = f"{apart} of {len(every_pair)} pairs of lives differ beyond noise"
    free = ", ".join(
        f"{name} {over(ways['unbounded'], ways['dense'])} at {fmean(t.bits for t in ways['unbounded']):.1f} bits"
        for name, ways in models.items()
    )
    return Outcome(
        *by_setting({name: _all_the_same(each) for name, each in pairs.items()}),
        measured=f"{between}; L = 1000 with room for 20 times as many, so that nothing is cut off: {free}",
    )


def _all_the_same(pairs: Sequence[Interval]) -> str:
    """Whether all pairs are: of six one may lie apart by chance, so it takes two to fail."""
    words = [_same(each) for each in pairs]
    if words.count(FAILS) > 1:
        return FAILS
    return HOLDS if set(words) == {HOLDS} else UNDECIDED


def _same(apart: Interval) -> str:
    """Whether two ways end within the margin of each other."""
    if apart.within(MARGIN):
        return HOLDS
    return FAILS if abs(apart.mean) - apart.half > MARGIN else UNDECIDED


@DCT.judge("T6", FC, MLP)
def any_sparsity(fc: Ways, mlp: Ways) -> Outcome:
    models = {"VGG": fc, "MNIST": mlp}
    over_dense = {model: {name: over(ways[name], ways["dense"]) for name in _NO_LOSS} for model, ways in models.items()}
    parts = {model: every({name: no_worse(each) for name, each in of.items()})[0] for model, of in over_dense.items()}
    at_most = ", ".join(f"{model} {of[_NO_LOSS[-1]]}" for model, of in over_dense.items())
    return Outcome(*by_setting(parts), measured=f"at {1 - float(_NO_LOSS[-1]):.1%} {at_most}")
