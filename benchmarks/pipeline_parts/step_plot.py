"""The changes in step time as bars, the paper's as lines across them."""

from pathlib import Path
from statistics import median
from typing import Any

from thinwire.tools.show.canvas import COLOURS, INK, MUTED, blank, name, restrain


def draw(
    runs: dict[str, dict[str, dict[str, list[dict[str, float]]]]], published: dict[str, float], path: Path
) -> None:
    """Draw a panel per model, and write it as PNG."""
    figure = blank((5.5 * len(runs), 4.4))
    for panel, (problem, links) in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs.items(), strict=True):
        for place, (rate, rounds) in enumerate(links.items()):
            _bars(panel, place, len(links), rate, rounds, list(published))
        for x, change in enumerate(published.values()):
            panel.plot(
                [x - 0.45, x + 0.45], 2 * [100 * change], color=INK, linewidth=1.2, label="published" if not x else None
            )
        panel.axhline(0, color=MUTED, linewidth=0.8)
        panel.set_xticks(range(len(published)), list(published))
        restrain(panel)
        name(panel, problem, "2 stages x 2 replicas; dots: rounds")
        panel.set_ylabel("change in step time, %", fontsize=9.5, color=MUTED)
        panel.legend(frameon=False, fontsize=9, labelcolor=INK)
    figure.savefig(path)


def _bars(
    panel: Any, place: int, of: int, rate: str, rounds: dict[str, list[dict[str, float]]], labels: list[str]
) -> None:
    width = 0.8 / of
    for x, label in enumerate(labels):
        pairs = zip(rounds[label], rounds["plain"], strict=True)
        change = [100 * (one["total"] / plain["total"] - 1) for one, plain in pairs]
        at = x - 0.4 + width * (place + 0.5)
        panel.bar(at, median(change), 0.9 * width, color=COLOURS[place], label=rate if not x else None)
        panel.plot(len(change) * [at], change, ".", color=INK, markersize=3)
