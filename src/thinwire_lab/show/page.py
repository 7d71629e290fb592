"""One HTML page that needs nothing beside it."""

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from thinwire_lab.show.table import Table
from thinwire_lab.show.units import UNKNOWN

STYLE = "\n" + Path(__file__).with_suffix(".css").read_text(encoding="utf-8")


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


def figures(*drawings: Figure, one: bool = False) -> str:
    """Return figures side by side, or `one` at full reading width, as SVG."""
    return f'<div class="{"figures one" if one else "figures"}">{"".join(map(_drawn, drawings))}</div>'


def _drawn(figure: Figure) -> str:
    drawing = io.BytesIO()
    figure.savefig(drawing, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    data = base64.b64encode(drawing.getvalue()).decode()
    title = escape(figure.axes[0].get_title(loc="left"))
    return f'<figure><img alt="{title}" src="data:image/svg+xml;base64,{data}"></figure>'


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
