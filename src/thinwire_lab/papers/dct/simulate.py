"""DCT's savings in time beside what its own sparsities predict.

python -m thinwire_lab.papers.dct.simulate [--json out.json] [--plot out.png] [--html out.html]
"""

from typing import NamedTuple

from matplotlib.figure import Figure

from thinwire_lab.papers.shared.implied import compared, share
from thinwire_lab.papers.shared.simulating import app_of
from thinwire_lab.show.table import Table
from thinwire_lab.simulate.outputs import Outcome, starred

SAVED = {"MP": {0.75: 0.0704, 0.90: 0.1395, 0.95: 0.1443}, "DP": {0.95: 0.23}}
"""Share of the training time saved, by share dropped: Table 5 and Fig. 8."""
BOTH, SORTING = 0.371, 0.11
"""Saved by MP at 90 and DP at 99 %; and lost by DP at 95 % where the threshold is found at each step."""


class Line(NamedTuple):
    """A sparsity: what was saved, and the share of a step it implies was communication."""

    part: str
    dropped: float
    saved: float
    sent: float
    implied: float


def lines() -> list[Line]:
    """Return every published saving; what is sent has a mask of a bit an element, and float32 values."""
    return [
        Line(part, dropped, saved, sent := 1 - dropped + 1 / 32, share(1 / (1 - saved), sent))
        for part, found in SAVED.items()
        for dropped, saved in found.items()
    ]


def dct() -> Outcome:
    """Return Table 5 and Fig. 8, and what they imply."""
    rows = [
        [part, f"{dropped:.0%}", f"{saved:.1%}", f"{sent:.0%}", f"{implied:.0%}"]
        for part, dropped, saved, sent, implied in lines()
    ]
    headings = ("part ", "dropped ", "  time saved\n  published", "  bytes\n  left", "  implies\n  waiting")
    return Outcome(
        title="Dynamic Communication Thresholding (Gupta et al. 2021) from its own figures: 12.5 Gbit/s",
        tables=[_titled(headings, rows)],
        notes=_notes(),
        document={"schema": "thinwire.paper/1", "paper": "dct", "rows": [line._asdict() for line in lines()]},
        figure=_figure,
    )


def _titled(headings: tuple[str, ...], rows: list[list[str]]) -> Table:
    return starred(title="Table 5 and Fig. 8: training time", headings=headings, rows=rows)


def _notes() -> list[str]:
    one, two = SAVED["MP"][0.90], SAVED["DP"][0.95]
    return [
        "implies: the share of a step that must be communication, if thresholds are free.",
        f"One after the other, {one:.1%} and {two:.0%} make {one + two:.1%}; {BOTH:.1%} is published. So neither "
        "hides behind the other.",
        f"Finding the threshold at each step costs {two + SORTING:.0%} of a step, once in 1,000 steps nothing.",
    ]


def _figure() -> Figure:
    groups: dict[str, dict[str, float]] = {
        f"{line.part}, {line.dropped:.0%}": {"published": 100 * line.saved, "implied waiting": 100 * line.implied}
        for line in lines()
    }
    return compared("DCT (Gupta et al. 2021): time saved, and the waiting it implies", "% of a step", groups)


app = app_of(dct)

if __name__ == "__main__":
    app()
