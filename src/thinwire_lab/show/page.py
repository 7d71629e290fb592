"""The files that a command writes: JSON, a figure, and what it prints on one HTML page that needs nothing beside it."""

import base64
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from json import dumps
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from thinwire.files import write_atomically
from thinwire_lab.inputs import check_writable
from thinwire_lab.show.canvas import check_drawable
from thinwire_lab.show.terminal import say

_WIDTH = 160  # characters


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files asked for. Raises BadInput for one that cannot be written, or a plot in an unknown format.

    profile: what the planner has measured, which is no report.
    """

    json: Path | None = None
    html: Path | None = None
    plot: Path | None = None
    profile: Path | None = None

    def __post_init__(self) -> None:
        check_writable(self.paths)
        check_drawable(self.plot)

    @property
    def paths(self) -> tuple[Path | None, ...]:
        """All of them, for `check_writable` and `print_written`."""
        return self.profile, self.json, self.html, self.plot

    def write(
        self, document: Mapping[str, Any], html: Callable[[], str], figure: Callable[[], Figure] | None = None
    ) -> None:
        """Write each of them but the profile; an earlier file stays whole if that fails."""
        if self.json is not None:
            write_atomically(self.json, dumps(document, indent=1) + "\n")
        if self.html is not None:
            write_atomically(self.html, html())
        if self.plot is not None and figure is not None:
            drawing = io.BytesIO()
            figure().savefig(drawing, format=self.plot.suffix[1:].lower())
            write_atomically(self.plot, drawing.getvalue())


def page(title: str, show: Callable[[Console], None], *figures: Figure, made: Mapping[str, Any] | None = None) -> str:
    """Return the page: what `show` prints, how it was `made`, and the figures."""
    console = Console(file=io.StringIO(), record=True, width=_WIDTH)
    show(console)
    if made:
        say(console, "\n" + "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in made.items()), "dim")
    printed = console.export_html(inline_styles=True, code_format="{code}")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{escape(title)}</title>
<style>:root {{ color-scheme: light dark }} pre {{ font-size: 13px; overflow-x: auto }} img {{ width: 48rem }}</style>
</head>
<body>
<pre>{printed}</pre>
{"".join(map(_drawn, figures))}
</body>
</html>
"""


def _drawn(figure: Figure) -> str:
    drawing = io.BytesIO()
    figure.savefig(drawing, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    title, data = escape(figure.axes[0].get_title(loc="left")), base64.b64encode(drawing.getvalue()).decode()
    return f'<img alt="{title}" src="data:image/svg+xml;base64,{data}">\n'
