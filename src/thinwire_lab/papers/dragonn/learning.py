"""DRAGONN's claims about steps to a target, with eight virtual workers."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from thinwire_lab.papers.dragonn import DRAGONN
from thinwire_lab.papers.shared.benches import FC_1G, XL_1G, Steps
from thinwire_lab.papers.shared.judging import MARGIN, Range, by_setting, every, no_worse, sooner, worse
from thinwire_lab.papers.shared.ledger import Outcome
from thinwire_lab.papers.shared.trials import Interval, Series, Trial, interval, steps_to, trained

XL, MLP, VGG_BY_SIZE = trained("dragonn").values()
_GENTLY = [name for name in XL.ways if name.endswith(", at 80")]
"""An eighth of dense's best rate."""
_SLOWER = "randomk at a tenth of the rate"
_SIGNS = ("signsgd", "signsgd at an eighth of the rate")
_BY_SIZE = tuple(VGG_BY_SIZE.ways)
"""Those that send the largest elements."""
XL_BY_SIZE, MLP_BY_SIZE = XL.only(*_BY_SIZE, *_GENTLY, "unmasked"), MLP.only(*_BY_SIZE)

Ways = Mapping[str, Series]


def steps(ways: Ways) -> dict[str, float]:
    """Return each way's mean number of steps to a loss that DGC and hashed slots reach; infinite if a seed does not."""
    targets = _ends(ways)
    return {name: steps_to(series, targets) for name, series in ways.items()}


def _ends(ways: Ways) -> list[float]:
    """Return, seed by seed, the higher of DGC's and hashed slots' loss at the end, of those that do not diverge."""
    pairs = zip(ways["dgc"], ways["hashed"], strict=True)
    return [max((each.loss for each in pair if math.isfinite(each.loss)), default=math.inf) for pair in pairs]


def _more(series: Series, other: Series, targets: Sequence[float], times: float = 1) -> Interval:
    """Return by how many percent it needs more steps to a target than `times` the other's, seed by seed."""
    pairs = zip(series, other, targets, strict=True)
    return interval([100 * (a.steps_to(target) / b.steps_to(target) - times) for a, b, target in pairs])


def _count(steps: float) -> str:
    return f"{steps:.0f}" if math.isfinite(steps) else "not on every seed"


def _said(found: Mapping[str, float], *names: str) -> str:
    return ", ".join(f"{name} {_count(found[name])}" for name in names)


@DRAGONN.judge("D11", XL_BY_SIZE, MLP_BY_SIZE, VGG_BY_SIZE)
def closer_than_dgc(xl: Ways, mlp: Ways, vgg: Ways) -> Outcome:
    """Hashed slots need no more steps than DGC; a result in their favour must survive equal bytes."""
    models = {"XL": xl, "MNIST": mlp, "VGG": vgg}
    more = {model: _more(ways["hashed"], ways["dgc"], _ends(ways)) for model, ways in models.items()}
    printed = {m: no_worse(_more(ways["as printed"], ways["dgc"], _ends(ways))) for m, ways in models.items()}
    found = {model: steps(ways) for model, ways in models.items()}
    measured = "; ".join(
        [
            f"more steps than DGC: {', '.join(f'{model} {each}' for model, each in more.items())}",
            *(f"{model}: steps {_said(n, *_BY_SIZE)}" for model, n in found.items()),
        ]
    )
    ends = "; ".join(
        f"{model} " + ", ".join(f"{name} {fmean(t.loss for t in ways[name]):.3f}" for name in ("dgc", "hashed", "topk"))
        for model, ways in (("MNIST", mlp), ("VGG", vgg))
    )
    as_printed = " ".join(by_setting(printed)).replace(" : ", ": ")
    measured += (
        f"; XL at an eighth of the rate, to what both end at there: {_gently(xl)}; at the full rate, DGC that "
        f"leaves the momentum of what was sent as it is: {_said(found['XL'], 'unmasked')}; as printed: {as_printed}; "
        f"losses at the end: {ends}"
    )
    return Outcome(*by_setting({model: no_worse(each) for model, each in more.items()}), measured=measured)


def _gently(xl: Ways) -> str:
    """Return how many steps each way needs at an eighth of the rate."""
    ways = {name.removesuffix(", at 80"): xl[name] for name in _GENTLY}
    return _said(steps(ways), *ways)


@DRAGONN.judge("D17", XL, MLP)
def others_need_more(xl: Ways, mlp: Ways) -> Outcome:
    """SignSGD needs more steps than hashed slots, and Random-k five times as many."""
    models = {"XL": xl, "MNIST": mlp}
    parts, said, ends_at = {}, [], list[str]()
    for model, ways in models.items():
        early = [_loss_at_a_fifth(trial) for trial in ways["hashed"]]
        slow = {name: worse(_more(ways[name], ways["hashed"], early), MARGIN) for name in _SIGNS}
        parts[f"signsgd on {model}"] = every(slow)[0]
        five = {name: worse(_more(ways[name], ways["hashed"], early, 5), 0.0) for name in ("randomk", _SLOWER)}
        parts[f"randomk on {model}"] = every(five)[0]
        to = {name: steps_to(ways[name], early) for name in ("hashed", *_SIGNS, "randomk", _SLOWER)}
        to_end = {name: steps_to(ways[name], _ends(ways)) for name in ("hashed", *_SIGNS)}
        ends_at.append(f"{model} {_said(to_end, *to_end)}")
        signs, draws = ([to[name] for name in names] for names in (_SIGNS, ("randomk", _SLOWER)))
        said.append(f"{model}: hashed {_count(to['hashed'])}, SignSGD {_both(*signs)}, Random-k {_both(*draws)}")
    ends = "; ".join(
        f"{model} " + ", ".join(f"{name} {fmean(t.loss for t in ways[name]):.2f}" for name in ("hashed", *_SIGNS))
        for model, ways in models.items()
    )
    measured = (
        f"{'; '.join(said)}; to what both DGC and hashed slots have reached at the end: {', '.join(ends_at)}; losses "
        f"at the end: {ends}"
    )
    return Outcome(*every(parts), measured=measured)


def _both(one: float, other: float) -> str:
    """Return two numbers of steps, once where they are the same."""
    return " and ".join(dict.fromkeys((_count(one), _count(other))))


def _loss_at_a_fifth(trial: Trial) -> float:
    """Return the loss at the last look by which no more than a fifth of the run is over."""
    looks = [loss for step, loss in zip(trial.steps, trial.losses, strict=True) if 5 * step <= trial.steps[-1]]
    return looks[-1] if looks else trial.losses[0]


@DRAGONN.judge("D10", XL_BY_SIZE, XL_1G, VGG_BY_SIZE, FC_1G)
def time_to_target(xl: Ways, xl_steps: Steps, vgg: Ways, vgg_steps: Steps) -> Outcome:
    """Dense takes longest to a target, then DGC, then hashed slots."""
    parts, over, said = {}, list[str](), []
    for model, ways, bench in (("XL", xl, xl_steps), ("VGG", vgg, vgg_steps)):
        needed = steps(ways)
        times = {name: needed[name] * bench.seconds(label) for name, label in _TIMED.items()}
        parts[model] = _in_order(ways, bench, "hashed")
        over.append(f"{model} DGC {times['dgc'] / times['hashed']:.2f}, dense {times['dense'] / times['hashed']:.2f}")
        said.append(
            f"{model}: steps {_said(needed, *_BY_SIZE)}; with slots as printed it "
            f"{_in_order(ways, bench, 'as printed')}, if their step is as long"
        )
    measured = "; ".join([f"time over hashed slots': {', '.join(over)}", *said])
    return Outcome(*by_setting(parts), measured=measured)


_TIMED = {"dense": "dense", "dgc": "dgc 0.001", "hashed": "dragonn 0.001"}


def _in_order(ways: Ways, bench: Steps, first: str) -> str:
    """Judge whether these slots get there before DGC, and DGC before dense."""
    labels = {first: _TIMED["hashed"], "dgc": _TIMED["dgc"], "dense": _TIMED["dense"]}
    ranges = [_range(ways[name], _ends(ways), bench.range(label)) for name, label in labels.items()]
    return every({f"{place}": sooner(*pair) for place, pair in enumerate(pairwise(ranges))})[0]


def _range(series: Series, targets: Sequence[float], step: Range) -> Range:
    counts = [trial.steps_to(target) for trial, target in zip(series, targets, strict=True)]
    return min(counts) * step[0], max(counts) * step[1]
