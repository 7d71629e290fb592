"""gTop-k's claims about learning, with virtual workers."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import exp

from thinwire_lab.papers.gtopk import GTOPK
from thinwire_lab.papers.shared.judging import (
    HALF_A_POINT,
    MARGIN,
    by_setting,
    every,
    losses_over,
    no_worse,
    points,
    rising,
    worse,
)
from thinwire_lab.papers.shared.ledger import FAILS, HOLDS, UNDECIDED, Outcome
from thinwire_lab.papers.shared.trials import (
    RATES,
    Interval,
    Series,
    Trials,
    Way,
    accuracy,
    interval,
    loss,
    over,
    points_lost,
    trained,
)

CNN, FC, CNN_WHOLE, FC_WHOLE, LM, CNN_OF_32, FC_OF_32 = trained("gtopk").values()

Ways = Mapping[str, Series]
_HALVED = ("0.001", "0.0005", "density warm-up", "density warm-up to 0.0005")
_WARMED = ("0.001", "density warm-up")
_LIKE_DENSE = ("dense", *_WARMED)


@GTOPK.judge("G4", CNN.only("topk", "exact values").on(5))
def converges(cnn: Ways) -> Outcome:
    """Sums of the global picks alone, exact: the loss ends within 5 % of local Top-k's."""
    found = over(cnn["exact values"], cnn["topk"])
    return Outcome(
        verdict=no_worse(found, 5.0),
        measured=(f"{found} over local Top-k's loss; {loss(cnn['exact values'])} against {loss(cnn['topk'])}"),
    )


@GTOPK.judge("G5", CNN.only(*_LIKE_DENSE).on(5), FC.only(*_LIKE_DENSE).on(5), CNN_WHOLE, FC_WHOLE)
def like_dense(cnn: Ways, fc: Ways, cnn_whole: Ways, fc_whole: Ways) -> Outcome:
    """ResNet-20 as dense, and VGG better."""
    parts = {
        "ResNet-20": no_worse(points_lost(cnn["density warm-up"], cnn["dense"]), HALF_A_POINT),
        "VGG": rising([points_lost(fc["dense"], fc["density warm-up"])]),
    }
    models = {"ResNet-20": (cnn, cnn_whole), "small VGG": (fc, fc_whole)}
    lost = ", ".join(
        f"{name} {points_lost(ways['density warm-up'], ways['dense'])}" for name, (ways, _) in models.items()
    )
    measured = f"{lost}; " + "; ".join(
        f"{name}, whose dense reaches {accuracy(ways['dense'])}: without a warm-up "
        f"{points_lost(ways['0.001'], ways['dense'])}, chosen from the whole model, as the paper does, "
        f"{points_lost(whole['whole'], ways['dense'])}, loss after a warm-up "
        f"{over(ways['density warm-up'], ways['dense'])}, from the whole model {over(whole['whole'], ways['dense'])}"
        for name, (ways, whole) in models.items()
    )
    return Outcome(*every(parts), measured=measured)


@GTOPK.judge("G6", CNN.only("dense", "0.001").on(5), FC.only("dense", "0.001").on(5))
def dense_layers_lose_more(cnn: Ways, fc: Ways) -> Outcome:
    """A network of dense layers loses more than a residual one."""
    more = interval([a - b for a, b in zip(_losses_over(fc), _losses_over(cnn), strict=True)])
    measured = (
        f"small VGG {losses_over(fc, 'dense', '0.001')}, ResNet-20 "
        f"{losses_over(cnn, 'dense', '0.001')}; the first loses {more} more"
    )
    return Outcome(verdict=worse(more, MARGIN), measured=measured)


def _losses_over(ways: Ways) -> list[float]:
    return [100 * (a.loss / b.loss - 1) for a, b in zip(ways["0.001"], ways["dense"], strict=True)]


@GTOPK.judge("G7", LM.on(5))
def language_like_dense(lm: Ways) -> Outcome:
    """Perplexity within 2 % of dense."""
    found = interval([100 * (exp(a.loss - b.loss) - 1) for a, b in zip(lm["gtopk"], lm["dense"], strict=True)])
    measured = f"perplexity {found} over dense's; loss {loss(lm['gtopk'])} against {loss(lm['dense'])}"
    return Outcome(verdict=no_worse(found), measured=measured)


@GTOPK.judge("G14", CNN.only(*_HALVED).on(5), FC.only(*_HALVED).on(5), CNN, FC)
def sparser_still(cnn: Ways, fc: Ways, all_cnn: Ways, all_fc: Ways) -> Outcome:
    """Half the density barely changes the loss."""
    half, after = ("0.0005", "0.001"), ("density warm-up to 0.0005", "density warm-up")
    parts = {
        f"{name}{said}": no_worse(points_lost(ways[sparser], ways[base]), 1.0)
        for name, ways in (("ResNet-20", cnn), ("VGG", fc))
        for said, (sparser, base) in (("", half), (" after a warm-up", after))
    }
    models = {"ResNet-20": (cnn, all_cnn), "small VGG": (fc, all_fc)}
    lost = ", ".join(
        f"{name} {points_lost(ways['0.0005'], ways['0.001']).bare}, warmed up "
        f"{points_lost(ways[after[0]], ways[after[1]]).bare}"
        for name, (ways, _) in models.items()
    )
    measured = f"points lost: {lost}; " + "; ".join(
        f"{name}: of 0.001's {accuracy(ways['0.001'])}, warmed up {accuracy(ways[after[1]])}; "
        f"on 3 seeds, to 0.01's {accuracy(every['0.01'])}, {points(every, '0.01', *_SPARSER)}, "
        f"{_breaks(every)}"
        for name, (ways, every) in models.items()
    )
    return Outcome(*by_setting(parts), measured=measured)


_SPARSER = ("0.001", "0.0005", "0.0001")


def _breaks(ways: Ways) -> str:
    """Say from which density on accuracy is lost to 0.01 beyond noise, there and at all that are sparser."""
    lost = [points_lost(ways[density], ways["0.01"]).above for density in _SPARSER]
    broken = [density for place, density in enumerate(_SPARSER) if all(lost[place:])]
    return f"beyond noise from {broken[0]} on" if broken else "from none on beyond noise"


@GTOPK.judge("G20", CNN.only(*_WARMED).on(5), FC.only(*_WARMED).on(5), CNN, FC)
def warming_up_helps(cnn: Ways, fc: Ways, all_cnn: Ways, all_fc: Ways) -> Outcome:
    """A warm-up of the density ends lower than none, beyond noise."""
    models = {"ResNet-20": (cnn, all_cnn), "VGG": (fc, all_fc)}
    found = {name: points_lost(ways["density warm-up"], ways["0.001"]) for name, (ways, _) in models.items()}
    words = {name: HOLDS if each.below else FAILS if each.above else UNDECIDED for name, each in found.items()}
    lost = ", ".join(f"{name} {each}" for name, each in found.items())
    measured = f"{lost}; " + "; ".join(
        f"{name}: loss {over(ways['density warm-up'], ways['0.001'])}, on 3 seeds, of the rate "
        f"{points_lost(three['rate warm-up'], three['0.001'])}"
        for name, (ways, three) in models.items()
    )
    return Outcome(*by_setting(words), measured=measured)


@GTOPK.judge("G15", CNN_OF_32.on(5), FC_OF_32.on(5))
def many_workers(cnn: Ways, fc: Ways) -> Outcome:
    """With 32 workers it loses accuracy to local Top-k, on both networks."""
    lost = {name: points_lost(ways["0.001"], ways["topk"]) for name, ways in (("ResNet-20", cnn), ("VGG", fc))}
    lost["VGG after a warm-up"] = points_lost(fc["gtopk, warmed up"], fc["topk, warmed up"])
    measured = f"points lost: {', '.join(f'{name} {each.bare}' for name, each in lost.items())}; " + "; ".join(
        f"{name}: loss {over(ways['0.001'], ways['topk'])} over local Top-k's, accuracy {accuracy(ways['0.001'])} "
        f"against {accuracy(ways['topk'])}, dense {accuracy(ways['dense'])}"
        for name, ways in (("ResNet-20", cnn), ("small VGG", fc))
    )
    measured += (
        f"; small VGG after a warm-up: accuracy {accuracy(fc['gtopk, warmed up'])} against "
        f"{accuracy(fc['topk, warmed up'])}"
    )
    return Outcome(*every({name: worse(each, HALF_A_POINT) for name, each in lost.items()}), measured=measured)


_SIZES = (8, 32, 128)


def _batches(model: str, density: str) -> Iterator[Trials]:
    """Yield trainings on equally many samples, in batches of three sizes; `density` may name a tenth of their steps."""
    for batch in _SIZES:
        steps = 3200 // batch
        told = density.format(tenth=steps // 10)
        ways = {name: Way(recipe=f"{name}(density={told})", batch=batch) for name in ("topk", "gtopk")}
        yield Trials(model=model, workers=4, steps=steps, rate=RATES[model], ways=ways).on(5)


_BATCHES = {
    f"{name}{said}": list(_batches(model, density))
    for said, density in (
        ("", "0.001"),
        (" after a warm-up", "schedules.gtopk_warmup(0.001, steps_per_epoch={tenth})"),
    )
    for name, model in (("VGG", "vgg"), ("MNIST", "mlp"))
}


@GTOPK.judge("G16", *(each for batches in _BATCHES.values() for each in batches))
def more_updates_close_the_gap(*found: Ways) -> Outcome:
    """The gap to local Top-k shrinks as the number of updates grows, on equally many samples."""
    by_size = {name: found[i * len(_SIZES) :][: len(_SIZES)] for i, name in enumerate(_BATCHES)}
    gaps = {name: [points_lost(ways["gtopk"], ways["topk"]) for ways in each] for name, each in by_size.items()}
    parts = {name: rising([_further(*pair) for pair in pairwise(each)]) for name, each in by_size.items()}
    lost = "; ".join(f"{name} {', '.join(gap.bare for gap in each)}" for name, each in gaps.items())
    reached = "; ".join(
        f"{name} {', '.join(accuracy(ways['topk']) for ways in each)}" for name, each in by_size.items()
    )
    equal = "; ".join(
        f"{name} " + ", ".join(f"batch {size} {_lost_after(25, ways)}" for size, ways in zip(_SIZES, each, strict=True))
        for name, each in by_size.items()
    )
    measured = (
        f"points lost in batches of {', '.join(map(str, _SIZES))}: {lost}; to local Top-k's {reached}; at equal "
        f"updates, the first look from 25 on: {equal}"
    )
    return Outcome(*by_setting(parts), measured=measured)


def _lost_after(updates: int, ways: Ways) -> Interval:
    """Return how many points below local Top-k it is at the first look from so many updates on."""
    pairs = zip(ways["gtopk"], ways["topk"], strict=True)
    return interval([b.accuracy_at(updates) - a.accuracy_at(updates) for a, b in pairs], "points")


def _further(more: Ways, fewer: Ways) -> Interval:
    """Return how many points more are lost to local Top-k after fewer updates."""
    pairs = zip(*(zip(ways["gtopk"], ways["topk"], strict=True) for ways in (more, fewer)), strict=True)
    lost = [(d.accuracy - c.accuracy) - (b.accuracy - a.accuracy) for (a, b), (c, d) in pairs]
    return interval(lost, "points")
