"""Ours of gTop-k's Figs. 5 to 10."""

from statistics import median

from thinwire_lab.papers.gtopk import GTOPK
from thinwire_lab.papers.gtopk.learning import CNN, FC, LM, Ways
from thinwire_lab.papers.shared.benches import TEXT_STEPS, Grid
from thinwire_lab.papers.shared.figures import Bars, Lines, curve
from thinwire_lab.papers.shared.links import SWEEP, Found, links


@GTOPK.redraws("figure_5", CNN, FC)
def figure_5(cnn: Ways, fc: Ways) -> tuple[Lines, Lines]:
    """Loss over steps of two networks."""
    names = {"dense": "dense", "topk": "Top-k 0.001", "0.001": "gTop-k 0.001", "density warm-up": "gTop-k, warmed up"}

    def losses(model: str, ways: Ways) -> Lines:
        lines = {said: curve(ways[name]) for name, said in names.items()}
        title, up = f"{model}, 4 virtual workers", "held-out loss, mean of 3 seeds"
        return Lines(title=title, along="steps", up=up, lines=lines)

    return losses("ResNet-20", cnn), losses("small VGG", fc)


@GTOPK.redraws("figure_7", LM.on(5))
def figure_7(lm: Ways) -> Lines:
    """Loss over steps of a language model."""
    lines = {"dense": curve(lm["dense"]), "gTop-k 0.005": curve(lm["gtopk"])}
    return Lines(title="Ours: LSTM on WikiText-2", along="steps", up="held-out loss, mean of 5 seeds", lines=lines)


@GTOPK.redraws("figure_8", SWEEP)
def figure_8(found: Found) -> tuple[Lines, Lines]:
    """A message's time over its size."""
    elements = [250, 4_000, 16_000, 64_000, 250_000, 1_000_000]
    theirs = {"alpha + beta n": (elements, [0.436 + 3.6e-5 * n for n in elements])}
    ours = {}
    for link in links(found):
        rows = [row for row in found["pings"] if row["link"] == link]
        sizes = sorted({row["bytes"] for row in rows})
        times = [1e3 * median(row["seconds"] for row in rows if row["bytes"] == size) for size in sizes]
        ours[link] = [size / 4 for size in sizes], times
    titles = ("Fig. 8: 1 Gbit/s Ethernet, their fit", "Ours: ping-pong between namespaces")
    fit, pings = (
        Lines(title=title, along="elements", up="ms", lines=lines, log="xy")
        for title, lines in zip(titles, (theirs, ours), strict=True)
    )
    return fit, pings


@GTOPK.redraws("figure_10", TEXT_STEPS)
def figure_10(text: Grid) -> Bars:
    """Gains by number of workers."""
    ours = {
        f"P = {place.workers}\n{said}": {
            "over dense": steps.faster("gtopk 0.001"),
            "over Top-k": steps.faster("gtopk 0.001", "topk 0.001"),
        }
        for link, said in (("100mbit", "100 Mbit/s"), ("1gbit", "1 Gbit/s"))
        for place, steps in text.items()
        if place.link == link
    }
    return Bars(title="Ours: transformer, workers share 2 cores", up="gTop-k: times as fast", groups=ours)
