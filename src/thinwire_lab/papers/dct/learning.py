"""The claims of DCT-DP about learning, with virtual workers."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean

from thinwire_lab.papers.dct import DCT
from thinwire_lab.papers.shared.judging import MARGIN, by_setting, every, losses_over, no_worse
from thinwire_lab.papers.shared.ledger import FAILS, HOLDS, UNDECIDED, Outcome
from thinwire_lab.papers.shared.trials import Interval, Series, loss, over, trained

LIVES = (1, 10, 100, 1000)
DENSITIES = (0.25, 0.1, 0.05, 0.02, 0.005, 0.001)
FC, MLP, FC_LIVES, MLP_LIVES = trained("dct").values()

Ways = Mapping[str, Series]


@DCT.judge("T4", FC_LIVES, MLP_LIVES)
def any_life(fc: Ways, mlp: Ways) -> Outcome:
    """The final loss is the same for every threshold life."""
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
    over_dense = "; ".join(
        f"{name} (dense {loss(ways['dense'])}): {losses_over(ways, 'dense', *lives)}" for name, ways in models.items()
    )
    return Outcome(
        *by_setting({name: _all_the_same(each) for name, each in pairs.items()}),
        measured=f"{between}; over dense {over_dense}; L = 1000 with room for 20 times as many, so that nothing is cut "
        f"off, as in the paper: {free}, room that is not used included",
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
    """No loss down to a density of 0.005."""
    densities, models = [f"{density:g}" for density in DENSITIES], {"VGG": fc, "MNIST": mlp}
    *judged, _ = densities
    parts = {
        model: every({name: no_worse(over(ways[name], ways["dense"])) for name in judged})[0]
        for model, ways in models.items()
    }
    at_most = ", ".join(f"{model} {over(ways[judged[-1]], ways['dense'])}" for model, ways in models.items())
    measured = "; ".join(
        [
            f"at {1 - float(judged[-1]):.1%} {at_most}",
            *(
                f"{model} (dense {loss(ways['dense'])}): {losses_over(ways, 'dense', *densities)}"
                for model, ways in models.items()
            ),
        ]
    )
    return Outcome(*by_setting(parts), measured=measured)
