"""What a command prints, and figures, on one HTML page that needs nothing beside it."""

import base64
import io
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from thinwire_lab.show.terminal import say

_WIDTH = 160  # characters


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
