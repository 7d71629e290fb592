"""The FFT paper's claims about collectives."""

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from thinwire_lab.cluster.rounds import straight
from thinwire_lab.papers.shared import benches
from thinwire_lab.papers.shared.benches import Grid, Place, Steps, at_every, by_workers, faster, spans
from thinwire_lab.papers.shared.claims import FFT_PAPER
from thinwire_lab.papers.shared.judging import by_setting, every, larger, sooner, verdict
from thinwire_lab.papers.shared.ledger import Outcome
from thinwire_lab.papers.shared.shelf import Document
from thinwire_lab.papers.shared.sweep import SWEEP, Found, kept, links, seconds, worlds


@FFT_PAPER.judge("F13", SWEEP)
def gathers_linearly(found: Found) -> Outcome:
    parts, said, counts = dict[str, str](), [], worlds(found)
    for link in kept(found):
        times = [seconds(found, "all-gather", link, p, 2**20) for p in counts]
        slope, _, r2 = straight([p - 1 for p in counts], times)
        parts[link] = verdict(r2 >= 0.98)
        said.append(f"{link}: R² {r2:.3f}, {1e3 * slope:.1f} ms a worker more")
    return Outcome(*by_setting(parts), measured="; ".join(said), said={"workers": ", ".join(map(str, counts))})


LAYERS = Document(name="layers", words="python -m thinwire_lab.papers.shared.timed layers")
_FOUR = ("fft 0.15", "topk 0.15", "qsgd", "terngrad")


@FFT_PAPER.judge("F1", benches.CNN_STEPS, benches.FC_STEPS, benches.LM_STEPS)
def heavy_models_wait(cnn: Grid, fc: Grid, lm: Grid) -> Outcome:
    models = {"ResNet-20": cnn, "small VGG": fc, "LSTM": lm}
    places = {place: {name: found[place] for name, found in models.items() if place in found} for place in cnn}
    heaviest = {
        place: max(there, key=lambda name: there[name].bytes("dense") / there[name].free)
        for place, there in places.items()
    }
    parts = {}
    for place, there in places.items():
        most = there[heaviest[place]].waits
        words = {name: larger(most, each.waits) for name, each in there.items() if name != heaviest[place]}
        parts[str(place)] = every(words)[0]
    shares = ", ".join(f"{name} {spans(found, _share, '.0%')}" for name, found in models.items())
    heavy = " or ".join(dict.fromkeys(heaviest.values()))
    return Outcome(*by_setting(parts), measured=shares, said={"heaviest": heavy})


def _share(steps: Steps) -> list[float]:
    return [max(0.0, 1 - steps.free / steps.seconds("dense"))]


@FFT_PAPER.judge("F20", benches.FC_STEPS, benches.CNN_STEPS, SWEEP)
def faster_than_sgd(fc: Grid, cnn: Grid, found: Found) -> Outcome:
    models = {"small VGG": fc, "ResNet-20": cnn}
    asked = {name: {at: steps for at, steps in grid.items() if at.workers in (4, 8)} for name, grid in models.items()}
    parts = {f"{name} over all-reduce": every(at_every(grid, _all_sooner))[0] for name, grid in asked.items()}
    for name, grid in asked.items():
        gathered = {str(at): _all_sooner(steps, _gathered(steps, found, at)) for at, steps in grid.items()}
        parts[f"{name} over all-gather"] = every(gathered)[0]
    return Outcome(*every(parts), measured="; ".join(_leads(models)))


def _all_sooner(steps: Steps, times: float = 1.0) -> str:
    """Whether all four are sooner than a dense step that takes so many times as long, and FFT is the first of them."""
    first, *others = _FOUR
    sooner_than_dense = {label: sooner(steps.range(label), steps.range("dense"), times) for label in _FOUR}
    return every(sooner_than_dense | {f"over {label}": steps.ahead(first, label) for label in others})[0]


def _leads(models: Mapping[str, Grid]) -> Iterator[str]:
    """Yield how many times as fast as dense, and as the fastest of the others, FFT is."""
    first, *others = _FOUR
    yield "FFT over dense: " + ", ".join(f"{name} {faster(grid, first)}" for name, grid in models.items())
    best = {
        name: spans(grid, lambda steps: [min(steps.faster(first, o) for o in others)]) for name, grid in models.items()
    }
    yield "FFT over the best other: " + ", ".join(f"{name} {each}" for name, each in best.items())


def _gathered(steps: Steps, found: Found, place: Place) -> float:
    """Return how many times longer a dense step is whose gradients are gathered."""
    world, link = place.workers, place.link if place.link in links(found) else links(found)[-1]
    nbytes = steps.gradient(world)
    more = seconds(found, "all-gather", link, world, nbytes) - seconds(found, "all-reduce", link, world, nbytes)
    return 1 + more / steps.seconds("dense")


@FFT_PAPER.judge("F24", benches.FC_STEPS, benches.CNN_STEPS, benches.TEXT_STEPS)
def scales(*found: Grid) -> Outcome:
    models = dict(zip(_MODELS, found, strict=True))
    parts = {name: every(at_every(grid, _first, (4, 8)))[0] for name, grid in models.items()}
    _, over_others = _leads(models)
    return Outcome(*every(parts), measured=over_others)


def _first(steps: Steps) -> str:
    first, *others = _FOUR
    return every({label: sooner(steps.range(first), steps.range(label), 1.03) for label in others})[0]


_MODELS = ("small VGG", "ResNet-20", "transformer")


@FFT_PAPER.judge("F25", benches.FC_STEPS, benches.CNN_STEPS, benches.TEXT_STEPS)
def slower_is_better(*found: Grid) -> Outcome:
    models = dict(zip(_MODELS, found, strict=True))
    parts = {
        f"{label} on {name}, P = {workers}": larger(slow.gain(label), fast.gain(label))
        for name, grid in models.items()
        for workers, (slow, fast) in by_workers(grid).items()
        for label in _FOUR
    }
    all_four = (
        f"{name} {spans(grid, lambda steps: [steps.faster(label) for label in _FOUR])}" for name, grid in models.items()
    )
    return Outcome(*every(parts), measured=f"all four over dense: {', '.join(all_four)}")


@FFT_PAPER.judge("F2", LAYERS)
def convolutions_compute(found: Mapping[str, Any]) -> Outcome:
    ratios = {
        name: [row["seconds"] * 1e9 / (8 * row["weights"]) for row in layers]
        for name, layers in found["layers"].items()
    }
    middle = {name: median(values) for name, values in ratios.items()}
    holds = middle["small VGG"] >= 10 * middle["ResNet-20"]
    measured = "; ".join(
        f"{name}: median {middle[name]:.0f} times, {min(values):.1f} to {max(values):.0f}"
        for name, values in ratios.items()
    )
    return Outcome(verdict=verdict(holds), measured=measured)
