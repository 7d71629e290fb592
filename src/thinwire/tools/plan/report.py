"""A plan as one HTML file that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from thinwire.planner import Plan, Profile
from thinwire.tools.inputs import write_atomically
from thinwire.tools.plan.plots import CAPTION, least_ratio, timeline
from thinwire.tools.plan.rows import Line, every
from thinwire.tools.plan.table import ADVICE, COLUMNS, NOTE
from thinwire.tools.plan.words import conclusions, network, origin, title
from thinwire.tools.show.page import definitions, drawn, page, paragraphs

STYLE = (
    "<style>th.text, td.text { text-align: left; } .figures.one { grid-template-columns: minmax(0, 60rem); }</style>"
)


def write_html(measured: Profile, plan: Plan, path: Path) -> None:
    """Write the report; an earlier file stays whole if that fails."""
    write_atomically(path, html(measured, plan))


def html(measured: Profile, plan: Plan) -> str:
    """The whole page."""
    name = f"thinwire plan: {title(plan.profile)}"
    return page(name, f"{STYLE}\n<h1>thinwire plan</h1>\n{sections(measured, plan)}")


def sections(measured: Profile, plan: Plan) -> str:
    """Conclusions, the step drawn, every tensor, the network, and the least ratio that pays."""
    return f"""{paragraphs([title(plan.profile)])}
{paragraphs(origin(measured, plan.profile), "soft")}
{paragraphs(conclusions(plan))}
{_advice(plan.advice)}
<h2>A step</h2>
<div class="figures one">{drawn(timeline(plan))}</div>
<h2>Tensors</h2>
<div class="wide">{_table(every(plan))}</div>
{paragraphs([NOTE], "soft")}
<h2>Network</h2>
{_network(plan.profile)}
{_least(plan.profile)}
<h2>How it was measured</h2>
{definitions(measured.made)}"""


def _advice(texts: Sequence[str]) -> str:
    if not texts:
        return ""
    return f"<p>{ADVICE}</p><ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def _table(lines: Sequence[Line]) -> str:
    heads = "".join(f'<th scope="col">{escape(column.heading)}</th>' for column in COLUMNS)
    rows = "\n".join(f'<tr><th scope="row" class="text">{escape(line.label)}</th>{_cells(line)}</tr>' for line in lines)
    why = '<th scope="col" class="text">why</th>'
    return f'<table><thead><tr><th scope="col">tensor</th>{heads}{why}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>'


def _cells(line: Line) -> str:
    figures = "".join(f"<td>{escape(column.text(line))}</td>" for column in COLUMNS)
    return f'{figures}<td class="text">{escape(line.reason)}</td>'


def _network(profile: Profile) -> str:
    links = {name: f"latency {latency}, bandwidth {bandwidth}" for name, latency, bandwidth in network(profile)}
    return definitions(links) + paragraphs(profile.tiers, "soft")


def _least(profile: Profile) -> str:
    if not profile.costs or not profile.timeline.gradients:
        return ""
    figure = drawn(least_ratio(profile), CAPTION)
    return f'<h2>The least compression that pays</h2>\n<div class="figures one">{figure}</div>'
