"""gTop-k's claims about learning, with virtual workers."""

from collections.abc import Iterator
from itertools import pairwise

from thinwire_lab.papers.shared import trials
from thinwire_lab.papers.shared.claims import GTOPK
from thinwire_lab.papers.shared.judging import HALF_A_POINT, MARGIN, by_setting, every, no_worse, rising, worse
from thinwire_lab.papers.shared.ledger import FAILS, HOLDS, UNDECIDED, Outcome
from thinwire_lab.papers.shared.trials import RATES, Interval, Trials, Way, Ways, interval, over, points_lost, trained

CNN, FC, CNN_WHOLE, FC_WHOLE, LM, CNN_OF_32, FC_OF_32 = trained("gtopk").values()

_HALVED = ("0.001", "0.0005", "density warm-up", "density warm-up to 0.0005")
_WARMED = ("0.001", "density warm-up")
_LIKE_DENSE = ("dense", *_WARMED)


@GTOPK.judge("G4", CNN.only("topk", "exact values").on(5))
def converges(cnn: Ways) -> Outcome:
    found = over(cnn["exact values"], cnn["topk"])
    return Outcome(verdict=no_worse(found, 5.0), measured=f"{found} over local Top-k's loss")


@GTOPK.judge("G5", CNN.only(*_LIKE_DENSE).on(5), FC.only(*_LIKE_DENSE).on(5), CNN_WHOLE, FC_WHOLE)
def like_dense(cnn: Ways, fc: Ways, cnn_whole: Ways, fc_whole: Ways) -> Outcome:
    parts = {
        "ResNet-20": no_worse(points_lost(cnn["density warm-up"], cnn["dense"]), HALF_A_POINT),
        "VGG": rising([points_lost(fc["dense"], fc["density warm-up"])]),
    }
    pairs = ((cnn["density warm-up"], fc["density warm-up"]), (cnn_whole["whole"], fc_whole["whole"]))
    lost, whole = (
        f"ResNet-20 {points_lost(of_cnn, cnn['dense'])}, small VGG {points_lost(of_fc, fc['dense'])}"
        for of_cnn, of_fc in pairs
    )
    return Outcome(*every(parts), measured=f"{lost}; chosen from the whole model, as the paper does, {whole}")


@GTOPK.judge("G6", CNN.only("dense", "0.001").on(5), FC.only("dense", "0.001").on(5))
def dense_layers_lose_more(cnn: Ways, fc: Ways) -> Outcome:
    both = [[100 * (a.loss / b.loss - 1) for a, b in zip(w["0.001"], w["dense"], strict=True)] for w in (fc, cnn)]
    more = interval([a - b for a, b in zip(*both, strict=True)])
    said = ", ".join(
        f"{name} 0.001 {interval(each)}" for name, each in zip(("small VGG", "ResNet-20"), both, strict=True)
    )
    return Outcome(verdict=worse(more, MARGIN), measured=f"{said}; the first loses {more} more")


@GTOPK.judge("G7", LM.on(10))
def language_like_dense(lm: Ways) -> Outcome:
    found = trials.perplexity_over(lm["gtopk"], lm["dense"])
    return Outcome(verdict=no_worse(found), measured=f"perplexity {found} over dense's")


@GTOPK.judge("G14", CNN.only(*_HALVED).on(5), FC.only(*_HALVED).on(5))
def sparser_still(cnn: Ways, fc: Ways) -> Outcome:
    parts, said = dict[str, str](), []
    for name, short, ways in (("ResNet-20", "ResNet-20", cnn), ("small VGG", "VGG", fc)):
        half = points_lost(ways["0.0005"], ways["0.001"])
        warmed = points_lost(ways["density warm-up to 0.0005"], ways["density warm-up"])
        parts |= {short: no_worse(half, 1.0), f"{short} after a warm-up": no_worse(warmed, 1.0)}
        said.append(f"{name} {half.bare}, warmed up {warmed.bare}")
    return Outcome(*by_setting(parts), measured=f"points lost: {', '.join(said)}")


@GTOPK.judge("G20", CNN.only(*_WARMED).on(5), FC.only(*_WARMED).on(5))
def warming_up_helps(cnn: Ways, fc: Ways) -> Outcome:
    models = {"ResNet-20": cnn, "VGG": fc}
    found = {name: points_lost(ways["density warm-up"], ways["0.001"]) for name, ways in models.items()}
    words = {name: HOLDS if each.below else FAILS if each.above else UNDECIDED for name, each in found.items()}
    return Outcome(*by_setting(words), measured=", ".join(f"{name} {each}" for name, each in found.items()))


@GTOPK.judge("G15", CNN_OF_32.on(5), FC_OF_32.on(5))
def many_workers(cnn: Ways, fc: Ways) -> Outcome:
    lost = {name: points_lost(ways["0.001"], ways["topk"]) for name, ways in (("ResNet-20", cnn), ("VGG", fc))}
    lost["VGG after a warm-up"] = points_lost(fc["gtopk, warmed up"], fc["topk, warmed up"])
    measured = f"points lost: {', '.join(f'{name} {each.bare}' for name, each in lost.items())}"
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
    for said, density in (("", "0.001"), (" after a warm-up", "schedules.gtopk_warmup(0.001, steps_per_epoch={tenth})"))
    for name, model in (("VGG", "vgg"), ("MNIST", "mlp"))
}


@GTOPK.judge("G16", *(each for batches in _BATCHES.values() for each in batches))
def more_updates_close_the_gap(*found: Ways) -> Outcome:
    by_size = {name: found[i * len(_SIZES) :][: len(_SIZES)] for i, name in enumerate(_BATCHES)}
    gaps = {name: [points_lost(ways["gtopk"], ways["topk"]) for ways in each] for name, each in by_size.items()}
    parts = {name: rising([_further(*pair) for pair in pairwise(each)]) for name, each in by_size.items()}
    lost = "; ".join(f"{name} {', '.join(gap.bare for gap in each)}" for name, each in gaps.items())
    measured = f"points lost in batches of {', '.join(map(str, _SIZES))}: {lost}"
    return Outcome(*by_setting(parts), measured=measured)


def _further(more: Ways, fewer: Ways) -> Interval:
    """Return how many points more are lost to local Top-k after fewer updates."""
    pairs = zip(*(zip(ways["gtopk"], ways["topk"], strict=True) for ways in (more, fewer)), strict=True)
    lost = [(d.accuracy - c.accuracy) - (b.accuracy - a.accuracy) for (a, b), (c, d) in pairs]
    return interval(lost, "points")
