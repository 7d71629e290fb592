"""The FFT paper's claims about learning, with virtual workers."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from thinwire_lab.papers.shared.claims import FFT_PAPER
from thinwire_lab.papers.shared.judging import HALF_A_POINT, by_setting, every, no_worse, rising, worse
from thinwire_lab.papers.shared.ledger import UNDECIDED, Outcome
from thinwire_lab.papers.shared.trials import Ways, points_lost, trained

MLP, FC, MLP_TOGETHER, FC_TOGETHER = trained("fft").values()
_FREE, _BACK = ("dense", "theta 0.5", "theta 0.9"), ("dense", "theta 0.9", "recovery")
_FOUR = ("theta 0.85", "topk", "qsgd", "terngrad")


def _said(models: Mapping[str, Ways], names: Sequence[str]) -> str:
    """Return how many points each way loses to dense, by model."""
    lost = {name: [points_lost(ways[each], ways["dense"]).bare for each in names] for name, ways in models.items()}
    by_model = ", ".join(f"{name} {', '.join(each)}" for name, each in lost.items())
    return f"points lost by {', '.join(names)}: {by_model}"


@FFT_PAPER.judge("F15", MLP.only(*_FREE).on(5), FC.only(*_FREE).on(5))
def half_is_free(mlp: Ways, fc: Ways) -> Outcome:
    models = {"MNIST": mlp, "VGG": fc}
    parts = {}
    for name, ways in models.items():
        half, most = (points_lost(ways[way], ways["dense"]) for way in _FREE[1:])
        parts[name] = every({"0.5": no_worse(half, HALF_A_POINT), "0.9": worse(most, HALF_A_POINT)})[0]
    return Outcome(*by_setting(parts), measured=_said(models, _FREE[1:]))


@FFT_PAPER.judge("F16", MLP.only(*_BACK).on(5), FC.only(*_BACK).on(5), MLP_TOGETHER, FC_TOGETHER)
def recovers(*found: Ways) -> Outcome:
    names = ("MNIST", "VGG", "MNIST with the rate's drop", "VGG with the rate's drop")
    models = dict(zip(names, found, strict=True))
    lost = {name: ways for name, ways in models.items() if points_lost(ways["theta 0.9"], ways["dense"]).above}
    parts = {name: no_worse(points_lost(ways["recovery"], ways["dense"]), HALF_A_POINT) for name, ways in lost.items()}
    parts = parts or {"no model loses accuracy": UNDECIDED}
    return Outcome(*by_setting(parts), measured=_said(models, _BACK[1:]))


@FFT_PAPER.judge("F19", MLP.only("dense", *_FOUR).on(5), FC.only("dense", *_FOUR).on(5))
def the_four(mlp: Ways, fc: Ways) -> Outcome:
    models = {"MNIST": mlp, "VGG": fc}
    parts = {name: _ordered(ways, _FOUR) for name, ways in models.items()}
    return Outcome(*by_setting(parts), measured=_said(models, _FOUR))


def _ordered(ways: Ways, names: tuple[str, ...]) -> str:
    """Hold if the first is no worse than dense, and each loses more than the one before."""
    first = no_worse(points_lost(ways[names[0]], ways["dense"]), HALF_A_POINT)
    order = rising([points_lost(ways[b], ways[a]) for a, b in pairwise(names)])
    return every({"as dense": first, "order": order})[0]
