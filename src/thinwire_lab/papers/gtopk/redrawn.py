"""gTop-k's Figs. 5 to 10 beside ours."""

from statistics import median

from matplotlib.figure import Figure

from thinwire_lab.papers.gtopk import GTOPK
from thinwire_lab.papers.gtopk.learning import CNN, FC, LM, Ways
from thinwire_lab.papers.shared.benches import TEXT_STEPS, Grid
from thinwire_lab.papers.shared.figures import Bars, Lines, Words, beside, curve
from thinwire_lab.papers.shared.links import SWEEP, Found, links


@GTOPK.redraws("figure_5", CNN, FC)
def figure_5(cnn: Ways, fc: Ways) -> Figure:
    """Loss over steps of two networks."""
    names = ("dense", "topk", "0.001", "density warm-up")
    return beside(
        _losses("ResNet-20, 4 virtual workers", cnn, names),
        _losses("small VGG, 4 virtual workers", fc, names),
        "Figs. 1, 5 and 6, of which the text gives no numbers: gTop-k as dense on ResNet-20, "
        "slightly better on VGG-16, slightly worse "
        "on AlexNet",
    )


def _losses(title: str, ways: Ways, names: tuple[str, ...]) -> Lines:
    labels = {"0.001": "gTop-k 0.001", "density warm-up": "gTop-k, warmed up", "topk": "Top-k 0.001"}
    lines = {labels.get(name, name): curve(ways[name]) for name in names}
    return Lines(title=title, along="steps", up="held-out loss, mean of 3 seeds", lines=lines)


@GTOPK.redraws("figure_7", LM.on(5))
def figure_7(lm: Ways) -> Figure:
    """Loss over steps of a language model."""
    lines = {"dense": curve(lm["dense"]), "gTop-k 0.005": curve(lm["gtopk"])}
    return beside(
        Words(
            title="Fig. 7: LSTM on PTB, P = 4", text="No numbers in the text but:\nalmost the same as S-SGD at 0.005."
        ),
        Lines(title="Ours: LSTM on WikiText-2", along="steps", up="held-out loss, mean of 5 seeds", lines=lines),
        "Loss of a language model, density 0.005, 4 virtual workers",
    )


@GTOPK.redraws("figure_8", SWEEP)
def figure_8(found: Found) -> Figure:
    """A message's time over its size."""
    elements = [250, 4_000, 16_000, 64_000, 250_000, 1_000_000]
    theirs = {"alpha + beta n": (elements, [0.436 + 3.6e-5 * n for n in elements])}
    ours = {}
    for link in links(found):
        sizes = sorted({row["bytes"] for row in found["pings"] if row["link"] == link})
        times = [
            median(r["seconds"] for r in found["pings"] if (r["link"], r["bytes"]) == (link, size)) for size in sizes
        ]
        ours[link] = [size / 4 for size in sizes], [1e3 * each for each in times]
    return beside(
        Lines(title="Fig. 8: 1 Gbit/s Ethernet, their fit", along="elements", up="ms", lines=theirs, log="xy"),
        Lines(title="Ours: ping-pong between namespaces", along="elements", up="ms", lines=ours, log="xy"),
        "Time of a message over its size",
    )


@GTOPK.redraws("figure_10", TEXT_STEPS)
def figure_10(text: Grid) -> Figure:
    """Gains by number of workers."""
    published = {
        "32 GPUs, mean": {"over dense": 6.7, "over Top-k": 1.4},
        "AlexNet": {"over dense": 12, "over Top-k": 1.7},
    }
    ours = {
        f"P = {place.workers}\n{said}": {
            "over dense": steps.faster("gtopk 0.001"),
            "over Top-k": steps.faster("gtopk 0.001", "topk 0.001"),
        }
        for link, said in (("100mbit", "100 Mbit/s"), ("1gbit", "1 Gbit/s"))
        for place, steps in text.items()
        if place.link == link
    }
    up = "gTop-k: times as fast"
    return beside(
        Bars(title="Fig. 10: 1 Gbit/s", up=up, groups=published),
        Bars(title="Ours: transformer, workers share 2 cores", up=up, groups=ours),
        "Gains of gTop-k, density 0.001",
    )
