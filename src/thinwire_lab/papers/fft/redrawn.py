"""Ours of the FFT paper's Figs. 11 and 13, and Table 2."""

from thinwire_lab.papers.fft import FFT_PAPER
from thinwire_lab.papers.fft.learning import FC, Ways
from thinwire_lab.papers.shared.benches import CNN_1G, FC_1G, Steps
from thinwire_lab.papers.shared.figures import Bars, Lines, curve
from thinwire_lab.papers.shared.links import SWEEP, Found, links, seconds, worlds

_NAMES = {"FFT": "fft 0.15", "Top-k": "topk 0.15", "QSGD": "qsgd", "TernGrad": "terngrad"}


@FFT_PAPER.redraws("figure_11", SWEEP)
def figure_11(found: Found) -> Lines:
    """An all-gather's time over the number of workers."""
    counts = worlds(found)
    lines = {
        link: (counts, [1e3 * seconds(found, "all-gather", link, p, 2**20) for p in counts]) for link in links(found)
    }
    return Lines(title="Ours: Gloo, 1 MiB a worker", along="workers", up="ms", lines=lines, log="y")


@FFT_PAPER.redraws("figure_13", FC)
def figure_13(fc: Ways) -> Lines:
    """Loss over steps, by theta."""
    names = ("dense", "theta 0.5", "theta 0.85", "theta 0.9", "theta 0.99", "recovery")
    lines, up = {name: curve(fc[name]) for name in names}, "held-out loss, mean of 3 seeds"
    return Lines(title="Ours: small VGG, 4 virtual workers", along="steps", up=up, lines=lines)


@FFT_PAPER.redraws("table_2", FC_1G, CNN_1G)
def table_2(fc: Steps, cnn: Steps) -> Bars:
    """Speed-up over SGD, by method."""
    ours = {
        name: {method: steps.faster(label) for method, label in _NAMES.items()}
        for name, steps in (("small VGG", fc), ("ResNet-20", cnn))
    }
    title = "Ours: 4 workers on 2 cores, 1 Gbit/s; dense reduces"
    return Bars(title=title, up="times as fast as dense", groups=ours)
