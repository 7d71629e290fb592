"""The results as one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from thinwire.bench.plots import loss_over_bytes, loss_over_seconds, step_time
from thinwire.bench.results import Results, write_atomically
from thinwire.bench.table import columns, notes
from thinwire.bench.units import UNKNOWN
from thinwire.bench.words import in_words

FIGURES = (loss_over_seconds, loss_over_bytes, step_time)
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


def write_html(results: Results, path: Path) -> None:
    """Write the report; an earlier file stays whole if that fails."""
    write_atomically(path, html(results))


def html(results: Results) -> str:
    """The whole page: conclusions, table, figures and environment."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>thinwire bench: {escape(results.title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>thinwire bench</h1>
{_head(results)}
{_paragraphs(in_words(results))}
<h2>Recipes</h2>
<div class="wide">{_table(results)}</div>
{_paragraphs(notes(results), "soft")}
<h2>Figures</h2>
<div class="figures">{"".join(_figure(draw(results)) for draw in FIGURES)}</div>
<h2>Environment</h2>
{_definitions(results.environment)}
</body>
</html>
"""


def _head(results: Results) -> str:
    title = _paragraphs([results.title], "plain" if results.throttled else "alarm")
    trouble = _paragraphs([results.incomplete or ""], "alarm")
    description = _paragraphs([str(results.environment.get("model_description", ""))], "soft")
    return f"{title}\n{trouble}\n{description}"


def _paragraphs(texts: Iterable[str], kind: str = "plain") -> str:
    return "\n".join(f'<p class="{kind}">{escape(text)}</p>' for text in texts if text)


def _table(results: Results) -> str:
    chosen = columns(results)
    heads = "".join(f'<th scope="col">{escape(column.heading)}</th>' for column in chosen)
    cells = [column.cells(results.rows) for column in chosen]
    body = "\n".join(
        f'<tr><th scope="row">{escape(row.label)}</th>{"".join(_cell(*column[place]) for column in cells)}</tr>'
        for place, row in enumerate(results.rows)
    )
    return f'<table>\n<thead><tr><th scope="col">recipe</th>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>'


def _cell(text: str, best: bool) -> str:
    return f'<td class="best">{escape(text)}</td>' if best else f"<td>{escape(text)}</td>"


def _figure(figure: Figure) -> str:
    drawing = io.BytesIO()
    figure.savefig(drawing, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    data = base64.b64encode(drawing.getvalue()).decode()
    title = escape(figure.axes[0].get_title(loc="left"))
    return f'<figure><img alt="{title}" src="data:image/svg+xml;base64,{data}"></figure>'


def _definitions(environment: Mapping[str, object]) -> str:
    entries = (
        f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(_said(key, value))}</dd>"
        for key, value in environment.items()
    )
    return "<dl>\n" + "\n".join(entries) + "\n</dl>"


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
