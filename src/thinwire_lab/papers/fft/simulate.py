"""The FFT paper's speed-ups beside what its own compression ratios predict.

python -m thinwire_lab.papers.fft.simulate [--json out.json] [--plot out.png] [--html out.html]
"""

from typing import NamedTuple

from matplotlib.figure import Figure

from thinwire_lab.papers.shared.implied import compared, gain, share
from thinwire_lab.papers.shared.simulating import app_of
from thinwire_lab.show.table import Table
from thinwire_lab.simulate.outputs import Outcome, starred

RATIOS = {"FFT": 21.3, "Top-k": 6.67, "QSGD": 10.6, "TernGrad": 16.0}
GAINS = {
    "AlexNet": {"FFT": 2.26, "Top-k": 1.53, "QSGD": 1.73, "TernGrad": 1.81},
    "ResNet-32": {"FFT": 1.33, "Top-k": 1.12, "QSGD": 1.21, "TernGrad": 1.24},
}
"""Table 2: 8 P100, 56 Gbit/s; and the ratios of Section 4.2."""
NBYTES = {"AlexNet": 250e6, "ResNet-32": 6e6}
WORKERS, BANDWIDTH = 8, 56e9 / 8


class Line(NamedTuple):
    """A method: the published gain, the share of a dense step it implies, and the gain that FFT's share predicts.

    lost: what separates the two, as a share of the dense step: compressing, or waiting.
    """

    network: str
    method: str
    published: float
    implied: float
    predicted: float
    lost: float


def lines() -> list[Line]:
    """Return every method of Table 2."""
    found = []
    for network, gains in GAINS.items():
        most = share(gains["FFT"], 1 / RATIOS["FFT"])
        for method, published in gains.items():
            predicted = gain(most, 1 / RATIOS[method])
            lost = 1 / published - 1 / predicted
            found.append(Line(network, method, published, share(published, 1 / RATIOS[method]), predicted, lost))
    return found


def exchanges(network: str) -> tuple[float, float]:
    """Return the seconds of a dense all-gather and of a ring all-reduce, at the link's rate."""
    nbytes = NBYTES[network]
    return (WORKERS - 1) * nbytes / BANDWIDTH, 2 * (WORKERS - 1) / WORKERS * nbytes / BANDWIDTH


def fft() -> Outcome:
    """Return Table 2, and what it implies."""
    return Outcome(
        title="FFT sparsification (Wang et al. 2020) from its own figures: Table 2, 8 GPUs at 56 Gbit/s",
        tables=[_table()],
        notes=_notes(),
        document={"schema": "thinwire.paper/1", "paper": "fft", "rows": [line._asdict() for line in lines()]},
        figure=_figure,
    )


def _table() -> Table:
    rows = [
        [network, method, f"{one:.2f}", f"{implied:.0%}", f"{other:.2f}", f"{lost:.0%}"]
        for network, method, one, implied, other, lost in lines()
    ]
    headings = (
        "network ",
        "method ",
        "  times as fast\n  published",
        "  implies\n  waiting",
        "  predicted\n  ",
        "  lost\n  ",
    )
    return starred(title="Table 2: speed-up over lossless SGD", headings=headings, rows=rows)


def _notes() -> list[str]:
    (gather, ring), (small, _) = map(exchanges, GAINS)
    alex, res = (share(gains["FFT"], 1 / RATIOS["FFT"]) for gains in GAINS.values())
    computing, reduced = (1 - alex) / alex * gather, ring / (ring + (1 - alex) / alex * gather)
    return [
        "implies: the share of a dense step that must be communication, if compressing is free. FFT's is the largest, "
        "so the others are predicted from it; lost: what they give away, of a dense step.",
        f"At the link's rate AlexNet's all-gather takes {1e3 * gather:.0f} ms, so FFT's share of {alex:.0%} leaves "
        f"{1e3 * computing:.0f} ms of computing. A dense all-reduce takes {1e3 * ring:.0f} ms; against "
        f"that FFT gains at most {gain(reduced, 1 / RATIOS['FFT']):.2f} times.",
        f"ResNet-32's takes {1e3 * small:.0f} ms, so its {res:.0%} leave {1e3 * small * (1 / res - 1):.0f} ms.",
    ]


def _figure() -> Figure:
    groups = {
        f"{line.network}\n{line.method}": {"published": line.published, "predicted from FFT's": line.predicted}
        for line in lines()
    }
    return compared("FFT (Wang et al. 2020): speed-up over lossless SGD, 8 GPUs", "times as fast", groups)


app = app_of(fft)

if __name__ == "__main__":
    app()
