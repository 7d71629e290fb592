"""DRAGONN's claims about steps to a target, with eight virtual workers."""

import math
from collections.abc import Sequence
from itertools import pairwise

from thinwire_lab.papers.shared.benches import FC_1G, XL_1G, Steps
from thinwire_lab.papers.shared.claims import DRAGONN
from thinwire_lab.papers.shared.judging import MARGIN, Range, by_setting, every, no_worse, sooner, worse
from thinwire_lab.papers.shared.ledger import Outcome
from thinwire_lab.papers.shared.trials import Series, Trial, Ways, more_steps, steps_to, trained

XL, MLP, VGG_BY_SIZE = trained("dragonn").values()
_SLOWER = "randomk at a tenth of the rate"
_SIGNS = ("signsgd", "signsgd at an eighth of the rate")
_BY_SIZE = tuple(VGG_BY_SIZE.ways)
"""Those that send the largest elements."""
XL_BY_SIZE, MLP_BY_SIZE = XL.only(*_BY_SIZE, "unmasked"), MLP.only(*_BY_SIZE)


def steps(ways: Ways) -> dict[str, float]:
    """Return each way's mean number of steps to a loss that DGC and hashed slots reach; infinite if a seed does not."""
    targets = _ends(ways)
    return {name: steps_to(series, targets) for name, series in ways.items()}


def _ends(ways: Ways) -> list[float]:
    """Return, seed by seed, the higher of DGC's and hashed slots' loss at the end, of those that do not diverge."""
    pairs = zip(ways["dgc"], ways["hashed"], strict=True)
    return [max((each.loss for each in pair if math.isfinite(each.loss)), default=math.inf) for pair in pairs]


def _count(steps: float) -> str:
    return f"{steps:.0f}" if math.isfinite(steps) else "not on every seed"


@DRAGONN.judge("D11", XL_BY_SIZE, MLP_BY_SIZE, VGG_BY_SIZE)
def closer_than_dgc(xl: Ways, mlp: Ways, vgg: Ways) -> Outcome:
    models = {"XL": xl, "MNIST": mlp, "VGG": vgg}
    more = {model: more_steps(ways["hashed"], ways["dgc"], _ends(ways)) for model, ways in models.items()}
    printed = {m: no_worse(more_steps(ways["as printed"], ways["dgc"], _ends(ways))) for m, ways in models.items()}
    as_printed = " ".join(by_setting(printed)).replace(" : ", ": ")
    measured = (
        f"more steps than DGC: {', '.join(f'{model} {each}' for model, each in more.items())}; DGC on XL "
        f"{_count(steps(xl)['dgc'])}, without masking {_count(steps(xl)['unmasked'])}; as printed: {as_printed}"
    )
    return Outcome(*by_setting({model: no_worse(each) for model, each in more.items()}), measured=measured)


@DRAGONN.judge("D17", XL, MLP)
def others_needmore_steps(xl: Ways, mlp: Ways) -> Outcome:
    models = {"XL": xl, "MNIST": mlp}
    parts, said = {}, []
    for model, ways in models.items():
        early = [_loss_at_a_fifth(trial) for trial in ways["hashed"]]
        slow = {name: worse(more_steps(ways[name], ways["hashed"], early), MARGIN) for name in _SIGNS}
        parts[f"signsgd on {model}"] = every(slow)[0]
        five = {name: worse(more_steps(ways[name], ways["hashed"], early, 5), 0.0) for name in ("randomk", _SLOWER)}
        parts[f"randomk on {model}"] = every(five)[0]
        to = {name: steps_to(ways[name], early) for name in ("hashed", *_SIGNS, "randomk", _SLOWER)}
        signs, draws = ([to[name] for name in names] for names in (_SIGNS, ("randomk", _SLOWER)))
        said.append(f"{model}: hashed {_count(to['hashed'])}, SignSGD {_both(*signs)}, Random-k {_both(*draws)}")
    return Outcome(*every(parts), measured="; ".join(said))


def _both(one: float, other: float) -> str:
    """Return two numbers of steps, once where they are the same."""
    return " and ".join(dict.fromkeys((_count(one), _count(other))))


def _loss_at_a_fifth(trial: Trial) -> float:
    """Return the loss at the last look by which no more than a fifth of the run is over."""
    looks = [loss for step, loss in zip(trial.steps, trial.losses, strict=True) if 5 * step <= trial.steps[-1]]
    return looks[-1] if looks else trial.losses[0]


@DRAGONN.judge("D10", XL_BY_SIZE, XL_1G, VGG_BY_SIZE, FC_1G)
def time_to_target(xl: Ways, xl_steps: Steps, vgg: Ways, vgg_steps: Steps) -> Outcome:
    parts, over = {}, []
    for model, ways, bench in (("XL", xl, xl_steps), ("VGG", vgg, vgg_steps)):
        ranges = [_range(ways[name], _ends(ways), bench.range(label)) for name, label in _TIMED.items()]
        parts[model] = every({f"{place}": sooner(*pair) for place, pair in enumerate(pairwise(ranges))})[0]
        hashed, dgc, dense = (steps(ways)[name] * bench.seconds(label) for name, label in _TIMED.items())
        over.append(f"{model} DGC {dgc / hashed:.2f}, dense {dense / hashed:.2f}")
    return Outcome(*by_setting(parts), measured=f"time over hashed slots': {', '.join(over)}")


_TIMED = {"hashed": "dragonn 0.001", "dgc": "dgc 0.001", "dense": "dense"}
"""Slots get there before DGC, and DGC before dense."""


def _range(series: Series, targets: Sequence[float], step: Range) -> Range:
    counts = [trial.steps_to(target) for trial, target in zip(series, targets, strict=True)]
    return min(counts) * step[0], max(counts) * step[1]
