"""A plan for a pipeline as one HTML file that needs nothing beside it."""

from html import escape

from thinwire.planner import PipelinePlan
from thinwire.tools.plan.boundaries import COLUMNS, NOTE, OWN, heading, links, stage_heading
from thinwire.tools.plan.report import STYLE, sections
from thinwire.tools.plan.words import boundary_reason
from thinwire.tools.show.page import definitions, page, paragraphs


def html(plan: PipelinePlan) -> str:
    """The whole page: the cuts, their links, and each stage's plan."""
    return page(
        f"thinwire plan: {heading(plan)}",
        f"""{STYLE}
<h1>thinwire plan</h1>
{paragraphs([heading(plan), f"{plan.verdict[0].upper()}{plan.verdict[1:]}."])}
<h2>Boundaries</h2>
<div class="wide">{_table(plan)}</div>
{paragraphs([f"{plan.crossings.micro_batches} micro-batches a step. {NOTE}"], "soft")}
{definitions(dict(links(plan)))}
{"".join(_stage(plan, stage) for stage in range(len(plan.stages)))}
{paragraphs([OWN], "soft")}""",
    )


def _stage(plan: PipelinePlan, stage: int) -> str:
    own = plan.stages[stage]
    text = sections(own.profile, own) if own.profile.world_size > 1 else ""
    return f"<h1>{escape(stage_heading(plan, stage))}</h1>\n{text}"


def _table(plan: PipelinePlan) -> str:
    heads = "".join(f'<th scope="col">{escape(column.heading)}</th>' for column in COLUMNS)
    cells = (
        [*(f"<td>{escape(column.text(row))}</td>" for column in COLUMNS), _why(boundary_reason(row))]
        for row in plan.boundaries
    )
    rows = "\n".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    why = '<th scope="col" class="text">why</th>'
    return f"<table><thead><tr>{heads}{why}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>"


def _why(reason: str) -> str:
    return f'<td class="text">{escape(reason)}</td>'
