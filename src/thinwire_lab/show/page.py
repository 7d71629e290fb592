"""One HTML page that needs nothing beside it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from matplotlib.figure import Figure

from thinwire_lab.show.table import Table
from thinwire_lab.show.units import UNKNOWN

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
th { white-space: pre; font-weight: 600; }
thead th { vertical-align: bottom; }
tbody th, td { vertical-align: top; }
th:first-child { text-align: left; }
.best { color: var(--best); font-weight: 600; }
.figures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 32rem), 1fr)); }
figure { margin: 0; background: #fff; border: 1px solid var(--line); border-radius: 6px; padding: .5rem; }
img { display: block; width: 100%; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .875rem; }
dd { margin: 0; overflow-wrap: anywhere; }
th.text, td.text { text-align: left; }
td.text { white-space: normal; }
.figures.one { grid-template-columns: minmax(0, 60rem); }
"""


def page(title: str, *blocks: str) -> str:
    """Return the page: the blocks, which are HTML, one below the other."""
    body = "\n".join(filter(None, blocks))
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


def chapter(title: str, *blocks: str) -> str:
    """Return blocks under a heading of the first order."""
    return "\n".join((f"<h1>{escape(title)}</h1>", *filter(None, blocks)))


def section(title: str, *blocks: str) -> str:
    """Return blocks under a heading of the second order."""
    return "\n".join((f"<h2>{escape(title)}</h2>", *filter(None, blocks)))


def paragraphs(texts: Iterable[str], kind: str = "plain") -> str:
    """Return a paragraph for each text that is not empty."""
    return "\n".join(f'<p class="{kind}">{escape(text)}</p>' for text in texts if text)


def bullets(texts: Iterable[str]) -> str:
    """Return a list."""
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def table(found: Table) -> str:
    """Return the table: each row's sentence in a last column, the notes below."""
    heads = [*found.headings, *(["why"] if found.why else [])]
    text = {*found.left, len(found.headings)}
    head = "".join(f'<th scope="col"{_kind(["text"] * (at in text))}>{escape(t)}</th>' for at, t in enumerate(heads))
    body = "\n".join(f"<tr>{''.join(_cells(found, place))}</tr>" for place in range(len(found.rows)))
    html = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    return f'<div class="wide">{html}</div>\n{paragraphs(found.notes, "soft")}'


def _cells(found: Table, place: int) -> Iterator[str]:
    for column, text in enumerate(found.rows[place]):
        cell = (place, column)
        kinds = ["text"] * (column in found.left) + ["best"] * (cell in found.best) + ["alarm"] * (cell in found.wrong)
        opened, closed = ('th scope="row"', "th") if column == 0 else ("td", "td")
        yield f"<{opened}{_kind(kinds)}>{escape(text)}</{closed}>"
    if found.why:
        yield f'<td class="text">{escape(found.why[place])}</td>'


def _kind(kinds: Sequence[str]) -> str:
    return f' class="{" ".join(kinds)}"' if kinds else ""


def figures(*drawings: Figure, caption: str = "", one: bool = False, points: bool = False) -> str:
    """Return figures side by side, or `one` at full reading width. With `points` they are PNG, else SVG.

    SVG keeps every point of a scatter plot, so figures of many points are smaller as PNG.
    """
    kind = "figures one" if one else "figures"
    return f'<div class="{kind}">{"".join(_drawn(figure, caption, points) for figure in drawings)}</div>'


def _drawn(figure: Figure, caption: str, points: bool) -> str:
    drawing = io.BytesIO()
    name, media = ("png", "image/png") if points else ("svg", "image/svg+xml")
    figure.savefig(drawing, format=name, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    data = base64.b64encode(drawing.getvalue()).decode()
    title = escape(figure.axes[0].get_title(loc="left") or caption)
    said = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure><img alt="{title}" src="data:{media};base64,{data}">{said}</figure>'


def definitions(entries: Mapping[str, object]) -> str:
    """Return a list of names and values."""
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
