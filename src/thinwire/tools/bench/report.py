"""The results as one HTML file that needs nothing beside it."""

from __future__ import annotations

from html import escape
from pathlib import Path

from thinwire.tools.bench.plots import loss_over_bytes, loss_over_seconds, step_time
from thinwire.tools.bench.results import Results
from thinwire.tools.bench.table import columns, notes
from thinwire.tools.bench.words import in_words
from thinwire.tools.inputs import write_atomically
from thinwire.tools.show.page import definitions, drawn, page, paragraphs

FIGURES = (loss_over_seconds, loss_over_bytes, step_time)


def write_html(results: Results, path: Path) -> None:
    """Write the report; an earlier file stays whole if that fails."""
    write_atomically(path, html(results))


def html(results: Results) -> str:
    """The whole page: conclusions, table, figures and environment."""
    return page(
        f"thinwire bench: {results.title}",
        f"""<h1>thinwire bench</h1>
{_head(results)}
{paragraphs(in_words(results))}
<h2>Recipes</h2>
<div class="wide">{_table(results)}</div>
{paragraphs(notes(results), "soft")}
<h2>Figures</h2>
<div class="figures">{"".join(drawn(draw(results)) for draw in FIGURES)}</div>
<h2>Environment</h2>
{definitions(results.environment)}""",
    )


def _head(results: Results) -> str:
    title = paragraphs([results.title], "plain" if results.throttled else "alarm")
    trouble = paragraphs([results.incomplete or ""], "alarm")
    description = paragraphs([str(results.environment.get("model_description", ""))], "soft")
    return f"{title}\n{trouble}\n{description}"


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
