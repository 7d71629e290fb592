"""gTop-k's claims about links and collectives."""

import math
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from thinwire_lab.cluster.link import parse_rate
from thinwire_lab.cluster.rounds import line, straight
from thinwire_lab.papers.shared import benches
from thinwire_lab.papers.shared.benches import Grid, Place, Steps, at_every, gains, span
from thinwire_lab.papers.shared.claims import GRADIENTS, GTOPK
from thinwire_lab.papers.shared.judging import by_setting, every, sooner, verdict
from thinwire_lab.papers.shared.ledger import FAILS, HOLDS, UNDECIDED, Outcome
from thinwire_lab.papers.shared.sweep import (
    EXCHANGES,
    REPEATED,
    ROUTES,
    SWEEP,
    WIDE,
    Found,
    collective,
    exchanges,
    kept,
    routes,
    worlds,
)


def _line(found: Found, link: str) -> tuple[float, float, float]:
    """Return seconds a byte, latency and R² of ping-pong."""
    return line(row for row in found["pings"] if row["link"] == link)


@GTOPK.judge("G8", SWEEP)
def linear_in_size(found: Found) -> Outcome:
    parts, said = dict[str, str](), []
    for link in kept(found):
        slope, latency, r2 = _line(found, link)
        rate = parse_rate(link)
        wanted = 8 / rate.bits_per_second if rate else slope
        parts[link] = verdict(r2 >= 0.99 and abs(slope / wanted - 1) <= 0.1)
        said.append(f"{link}: R² {r2:.4f}, {slope / wanted:.2f} of the rate's, {1e3 * latency:.2f} ms for the smallest")
    return Outcome(*by_setting(parts), measured="; ".join(said))


_FIT, _QUARTER = 0.15, 0.25


class _Off(NamedTuple):
    """How far a collective is off a formula: by the median, and by the least and the most of its repeats."""

    middle: float
    least: float
    most: float


_REPEATS = ("seconds", "least", "most")


def _off_ring(found: Found, link: str) -> list[_Off]:
    """Return how far each number of workers and size from 1 to 64 MiB is off the formula."""
    beta, alpha, _ = _line(found, link)
    off = []
    for p in worlds(found):
        sizes = collective(found, "all-reduce", link, p)[0]
        times = (collective(found, "all-reduce", link, p, of)[1] for of in _REPEATS)
        for size, *each in zip(sizes, *times, strict=True):
            if 2**20 <= size <= 2**26:
                off.append(_Off(*(time / (2 * (p - 1) * (alpha + size / p * beta)) - 1 for time in each)))
    return off


def _off_gather(found: Found, link: str) -> list[_Off]:
    """Return how far the seconds a byte of each number of workers are off the formula's (P-1) beta."""
    beta, *_ = _line(found, link)
    off = []
    for p in worlds(found):
        series = (collective(found, "all-gather", link, p, of) for of in _REPEATS)
        slopes = (
            straight(*zip(*((n, t) for n, t in zip(*each, strict=True) if n >= 2**18), strict=True))[0]
            for each in series
        )
        middle, *others = (slope / ((p - 1) * beta) - 1 for slope in slopes)
        off.append(_Off(middle, min(middle, *others), max(middle, *others)))
    return off


def _within(off: Sequence[_Off], share: float = _FIT) -> str:
    """Whether all are within such a share: one is not where even the repeat that is nearest is off by more."""
    if all(abs(each.middle) <= share for each in off):
        return HOLDS
    return FAILS if any(each.least > share or each.most < -share for each in off) else UNDECIDED


def _spread(off: Sequence[_Off]) -> str:
    middles = [each.middle for each in off]
    return f"{min(middles):+.0%} to {max(middles):+.0%}, median {median(middles):+.0%}"


def _against_formula(found: Found, off_on: Callable[[Found, str], Sequence[_Off]]) -> Outcome:
    off = {link: off_on(found, link) for link in kept(found)}
    measured = "; ".join(f"{link}: {_spread(each)}" for link, each in off.items())
    parts, workers = {link: _within(each) for link, each in off.items()}, ", ".join(map(str, worlds(found)))
    said = {"workers": workers, "repeats": found["environment"]["repeats"]}
    return Outcome(*by_setting(parts), measured=measured, said=said)


GTOPK.judge("G1", REPEATED)(lambda found: _against_formula(found, _off_ring))
GTOPK.judge("G2", REPEATED)(lambda found: _against_formula(found, _off_gather))


@GTOPK.judge("G3", EXCHANGES, WIDE)
def tree_costs(found: Mapping[str, Any], wide: Mapping[str, Any]) -> Outcome:
    parts, times = {}, dict[str, list[str]]()
    for row in (*found["rows"], *wide["rows"]):
        if row["exchange"] == "tree":
            off = _off_tree(row)
            word = FAILS if off.least > _FIT else HOLDS if abs(off.middle) <= _FIT else UNDECIDED
            parts[f"P = {row['world_size']} at {row['link']}"] = word
            times.setdefault(row["link"], []).append(f"{1 + off.middle:.2f}")
    by_link = ", ".join(f"{link} {', '.join(each)}" for link, each in times.items())
    return Outcome(*by_setting(parts), more=benches.MORE, measured=f"times the formula, by workers: {by_link}")


def _off_tree(row: Mapping[str, Any]) -> _Off:
    """Return how far the messages are off the formula."""
    return _Off(*(row["message_seconds"][at] / row["predicted_seconds"] - 1 for at in ("p50", "p20", "p80")))


_TREE, _GATHER = "gtopk 0.001", "topk 0.001"


@GTOPK.judge("G11", benches.TEXT_STEPS, WIDE)
def scales(text: Grid, wide: Mapping[str, Any]) -> Outcome:
    parts, measured = at_every(text, _as_the_model, workers=(8,)), f"over Top-k {gains(text, _TREE, _GATHER)}"
    asked = _at_their_size(wide)
    if asked:
        parts |= {f"P = {_THEIRS} at {link}": word for link, (word, _) in asked.items()}
        alone = ", ".join(f"{link} {said}" for link, (_, said) in asked.items())
        measured += f"; the exchange alone over Top-k's and dense's (P = {_THEIRS}) {alone}"
    return Outcome(*by_setting(parts), measured=measured)


_THEIRS = 32


def _at_their_size(wide: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return by link whether the tree is ahead of both others, and how many times as fast it is."""
    found = {}
    for link in dict.fromkeys(row["link"] for row in wide["rows"] if row["world_size"] == _THEIRS):
        each = exchanges(wide, link, _THEIRS)
        others = {name: each[name] for name in ("all-gather", "dense")}
        ahead = {name: sooner(each["tree"].around, other.around) for name, other in others.items()}
        said = " and ".join(f"{other.ms / each['tree'].ms:.2f}" for other in others.values())
        found[link] = every(ahead)[0], said
    return found


def _as_the_model(steps: Steps) -> str:
    least, most = steps.gain(_TREE, _GATHER)
    if least >= 0.83 and most <= 1.17:
        return HOLDS
    return FAILS if most < 0.83 or least > 1.17 else UNDECIDED


_MODELS = {
    "ResNet-20": benches.CNN_STEPS,
    "small VGG": benches.FC_STEPS,
    "transformer": benches.TEXT_STEPS,
    "LSTM": benches.LM_STEPS,
    "XL": benches.XL_STEPS,
}


@GTOPK.judge("G22", *_MODELS.values())
def efficiency(*found: Grid) -> Outcome:
    models = dict(zip(_MODELS, found, strict=True))
    others = {"dense": "dense", "Top-k": _GATHER}
    parts = {
        f"{name} over {other}": every(at_every(grid, methodcaller("ahead", _TREE, to)))[0]
        for name, grid in models.items()
        for other, to in others.items()
    }
    said = [
        f"over {other}: "
        + ", ".join(
            f"{name} {span([steps.faster(_TREE, to) for steps in grid.values()])}" for name, grid in models.items()
        )
        for other, to in others.items()
    ]
    return Outcome(*every(parts), measured="; ".join(said))


@GTOPK.judge("G12", GRADIENTS, SWEEP, *_MODELS.values())
def throughput(published: Mapping[str, Outcome], found: Found, *models: Grid) -> Outcome:
    arithmetic, places = published["G12"], [each for model in models for each in model.items()]
    off = [_off_model(found, *place, label) for label in ("dense", _GATHER, _TREE) for place in places]
    parts = {"published": arithmetic.verdict, "ours": _within(off, _QUARTER)}
    fine = sum(abs(each.middle) <= _QUARTER for each in off)
    measured = f"{fine} of {len(off)} of our steps within 25 %; {arithmetic.measured}"
    return Outcome(*every(parts), measured=measured, said={"arithmetic": arithmetic.how})


def _off_model(found: Found, place: Place, steps: Steps, label: str) -> _Off:
    """Return how far steps are off computing, coding and sending, one after the other."""
    beta, alpha, _ = _line(found, place.link)
    split, rounds = steps.rows[label].split_seconds, 2 * math.ceil(math.log2(place.workers))
    model = steps.free + split.encode + split.decode + rounds * alpha + beta * steps.bytes(label)
    return _Off(*(seconds / model - 1 for seconds in (steps.seconds(label), *steps.range(label))))


@GTOPK.judge("G13", benches.FC_1G, benches.CNN_1G, ROUTES)
def selecting_costs(fc: Steps, cnn: Steps, found: Found) -> Outcome:
    nbytes = fc.gradient(4)
    sizes, times = zip(*((row["bytes"], row["encode"]) for row in routes(found, "topk", 4, 0.001)), strict=True)
    torchs = float(np.interp(nbytes, sizes, times))
    computing = fc.free
    ours = fc.rows[_GATHER].split_seconds.encode
    efficient = cnn.free / cnn.seconds(_TREE)
    parts = {"selecting": verdict(torchs >= 0.5 * computing), "efficiency": verdict(efficient >= 0.8)}
    measured = (
        f"small VGG: `torch.topk` {1e3 * torchs:.0f} ms and ours {1e3 * ours:.0f} ms in a step of "
        f"{1e3 * computing:.0f} ms without a network; ResNet-20 reaches {efficient:.0%} of a free network's steps"
    )
    return Outcome(*every(parts), measured=measured)
