"""One HTML page that needs nothing beside it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from html import escape

from matplotlib.figure import Figure

from thinwire.tools.show.units import UNKNOWN

STYLE = """
:root { color-scheme: light dark; --ink: #222; --soft: #666; --line: #ddd; --best: #0a6b3d; --alarm: #b00020; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --soft: #a0a0a0; --line: #3a3a3a; --best: #6fd29b; --alarm: #ff7b87; }
}
body { color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; }
h2 { font-size: 1.1rem; margin-top: 2rem; }
.soft, dt, figcaption { color: var(--soft); }
.soft { font-size: .875rem; }
.alarm { color: var(--alarm); font-weight: 600; }
.wide { overflow-x: auto; }
p { margin: .4rem 0; }
table { border-collapse: collapse; font-size: .8125rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .3rem .5rem; text-align: right; border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; white-space: pre; font-weight: 600; }
th:first-child { text-align: left; }
.best { color: var(--best); font-weight: 600; }
.figures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 32rem), 1fr)); }
figure { margin: 0; background: #fff; border: 1px solid var(--line); border-radius: 6px; padding: .5rem; }
img { display: block; width: 100%; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .875rem; }
dd { margin: 0; overflow-wrap: anywhere; }
"""


def page(title: str, body: str) -> str:
    """Return the page; `body` is HTML."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def paragraphs(texts: Iterable[str], kind: str = "plain") -> str:
    """Return a paragraph for each text that is not empty."""
    return "\n".join(f'<p class="{kind}">{escape(text)}</p>' for text in texts if text)


def drawn(figure: Figure, caption: str = "") -> str:
    """Return the figure as SVG within the page."""
    drawing = io.BytesIO()
    figure.savefig(drawing, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    data = base64.b64encode(drawing.getvalue()).decode()
    title = escape(figure.axes[0].get_title(loc="left"))
    said = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure><img alt="{title}" src="data:image/svg+xml;base64,{data}">{said}</figure>'


def definitions(entries: Mapping[str, object]) -> str:
    """Return what is known, name by name."""
    listed = (
        f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(_said(key, value))}</dd>"
        for key, value in entries.items()
    )
    return "<dl>\n" + "\n".join(listed) + "\n</dl>"


def _said(key: str, value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_said(key, entry)}" for name, entry in value.items())
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1%}" if key == "protocol_overhead" else f"{value:.4g}"
    return str(value)
