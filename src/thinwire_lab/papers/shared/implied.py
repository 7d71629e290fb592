"""What published gains imply, if a step first computes and then communicates, and sending less costs nothing."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from thinwire_lab.papers.shared.redrawn import Bars
from thinwire_lab.show.canvas import blank, head


def share(gain: float, sent: float) -> float:
    """Return which share of the slower step was communication.

    gain: how many times as fast the other step is. sent: the share of the bytes, or of their time, that is left in it.
    From 1/gain = 1 − share + share · sent. Above 1 where no share explains the gain.
    """
    return (1 - 1 / gain) / (1 - sent)


def gain(share: float, sent: float) -> float:
    """Return how many times as fast a step is that spends `share` on communication, and sends `sent` of it."""
    return 1 / (1 - share * (1 - sent))


def compared(above: str, up: str, groups: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw published values beside others, in groups."""
    figure = blank((9.5, 4.8))
    Bars(title="", up=up, groups=groups, line=None).draw(figure.subplots())
    head(figure, above)
    return figure
