"""The FFT paper's Figs. 11 and 13, and Table 2, beside ours."""

from matplotlib.figure import Figure

from thinwire_lab.papers.fft import FFT_PAPER
from thinwire_lab.papers.fft.learning import FC, Ways
from thinwire_lab.papers.shared.benches import CNN_1G, FC_1G, Steps
from thinwire_lab.papers.shared.figures import Bars, Lines, Words, beside, curve
from thinwire_lab.papers.shared.links import SWEEP, Found, links, seconds, worlds

_NAMES = {"FFT": "fft 0.15", "Top-k": "topk 0.15", "QSGD": "qsgd", "TernGrad": "terngrad"}


@FFT_PAPER.redraws("figure_11", SWEEP)
def figure_11(found: Found) -> Figure:
    """An all-gather's time over the number of workers."""
    counts = worlds(found)
    lines = {
        link: (counts, [1e3 * seconds(found, "all-gather", link, p, 2**20) for p in counts]) for link in links(found)
    }
    return beside(
        Words(title="Fig. 11: NCCL, 56 Gbit/s", text="No numbers in the text but:\nalmost linear from 2 to 32 GPUs."),
        Lines(title="Ours: Gloo, 1 MiB a worker", along="workers", up="ms", lines=lines, log="y"),
        "Time of an all-gather of a fixed payload",
    )


@FFT_PAPER.redraws("figure_13", FC)
def figure_13(fc: Ways) -> Figure:
    """Loss over steps, by theta."""
    names = ("dense", "theta 0.5", "theta 0.85", "theta 0.9", "theta 0.99", "recovery")
    return beside(
        Words(
            title="Fig. 13: ResNet-32 and AlexNet, 8 GPUs",
            text=(
                "No numbers in the text but:\ntheta 0.5 trains as SGD, 0.9 is clearly "
                "worse,\nand recovers when theta drops to 0."
            ),
        ),
        Lines(
            title="Ours: small VGG, 4 virtual workers",
            along="steps",
            up="held-out loss, mean of 3 seeds",
            lines={name: curve(fc[name]) for name in names},
        ),
        "Loss by share of frequencies dropped, without error feedback",
    )


@FFT_PAPER.redraws("table_2", FC_1G, CNN_1G)
def table_2(fc: Steps, cnn: Steps) -> Figure:
    """Speed-up over SGD, by method."""
    published = {
        "AlexNet": dict(zip(_NAMES, (2.26, 1.53, 1.73, 1.81), strict=True)),
        "ResNet-32": dict(zip(_NAMES, (1.33, 1.12, 1.21, 1.24), strict=True)),
    }
    ours = {
        name: {method: steps.faster(label) for method, label in _NAMES.items()}
        for name, steps in (("small VGG", fc), ("ResNet-20", cnn))
    }
    up = "times as fast as dense"
    return beside(
        Bars(title="Table 2, Fig. 14: 8 P100; dense gathers", up=up, groups=published),
        Bars(title="Ours: 4 workers on 2 cores, 1 Gbit/s; dense reduces", up=up, groups=ours),
        "Speed-up over dense SGD at theta 0.85 and 10 bits, density 0.15, 3 to 4 bits, 2 bits",
    )
