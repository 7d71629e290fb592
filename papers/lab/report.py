"""All results: as a document, as tables on the console, and as a page."""

import base64
import io
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from papers.lab.claims import FAILS, HOLDS, OPEN, Sheet, Verdict
from papers.lab.errors import AT_BITS, Measured, at_equal_bytes
from thinwire.tools.show.page import STYLE

SCHEMA = "thinwire.fidelity/1"
MORE_STYLE = (
    "td.text { text-align: left; white-space: normal; min-width: 14rem; } .figures { display: block; } "
    "figure { margin: 1rem 0; }"
)
ERROR_KEYS = ("model", "step", "method", "density", "bytes", "bits_per_element", "error", "cosine")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Errors, verdicts, the papers' own tables, and figures with captions, by file name."""

    environment: Mapping[str, Any]
    errors: Sequence[Measured]
    claims: Sequence[Verdict]
    sheets: Sequence[Sheet] = ()
    figures: Mapping[str, tuple[str, Figure]] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return plain JSON values."""
        rows = [{key: value for key, value in asdict(row).items() if key in ERROR_KEYS} for row in self.errors]
        claims = [asdict(claim) for claim in self.claims]
        return {
            "schema": SCHEMA,
            "environment": dict(self.environment),
            "errors": rows,
            "claims": claims,
            **{sheet.key: list(sheet.rows) for sheet in self.sheets},
        }

    def show(self, console: Console) -> None:
        """Print the late errors, the comparison at equal bytes and the verdicts."""
        columns, verdicts = self._verdicts()
        judged = [row for row in verdicts if row[2] != OPEN]
        for title, heads, rows in (*self._late(), *self._equal(), *self._own(), ("Claims", columns, judged)):
            table = Table(title=title, title_justify="left")
            for place, head in enumerate(heads):
                table.add_column(head, justify="left" if place == 0 or title == "Claims" else "right")
            for row in rows:
                table.add_row(*row)
            console.print(table)
        console.print(f"{self._counts()} Why a claim is not testable here, the document and the page say.")

    def html(self) -> str:
        """Return one page that needs nothing beside it."""
        tables = "".join(
            f'<h2>{escape(title)}</h2><div class="wide">{_table(heads, rows, title == "Claims")}</div>'
            for title, heads, rows in (("Claims", *self._verdicts()), *self._equal(), *self._own(), *self._late())
        )
        figures = "".join(_picture(caption, figure) for caption, figure in self.figures.values())
        facts = "".join(
            f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in self.environment.items()
        )
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>thinwire fidelity</title>'
            f"<style>{STYLE}{MORE_STYLE}</style></head><body><h1>thinwire fidelity</h1>"
            f'<p class="soft">{escape(self._counts())}</p><h2>Figures</h2><div class="figures">{figures}</div>{tables}'
            f"<h2>Environment</h2><dl>{facts}</dl></body></html>\n"
        )

    def _counts(self) -> str:
        counts = {verdict: sum(claim.verdict == verdict for claim in self.claims) for verdict in (HOLDS, FAILS, OPEN)}
        return (
            f"{len(self.claims)} claims: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + "."
        )

    def _verdicts(self) -> tuple[list[str], list[list[str]]]:
        heads = ["id", "claim", "verdict", "figure", "how"]
        return heads, [list(map(str, asdict(claim).values())) for claim in self.claims]

    def _late(self) -> list[tuple[str, list[str], list[list[str]]]]:
        heads = ["method", "density", "bytes", "bits per element", "err²", "cosine"]
        return [
            (
                f"{model}, step {rows[0].step}",
                heads,
                [
                    [
                        r.method,
                        f"{r.density:g}",
                        f"{r.bytes:,.0f}",
                        f"{r.bits_per_element:.3f}",
                        f"{r.error:.3g}",
                        f"{r.cosine:.4f}",
                    ]
                    for r in rows
                ],
            )
            for model, rows in self._by_model().items()
        ]

    def _equal(self) -> list[tuple[str, list[str], list[list[str]]]]:
        heads = ["method", *(f"{bits:g} bits" for bits in AT_BITS)]
        return [
            (
                f"{model}, step {rows[0].step}: err² at equal bytes, interpolated",
                heads,
                [
                    [family, *("-" if e is None else f"{e:.3g}" for e in found)]
                    for family, found in at_equal_bytes(rows).items()
                    if any(found)
                ],
            )
            for model, rows in self._by_model().items()
        ]

    def _own(self) -> list[tuple[str, list[str], list[list[str]]]]:
        return [
            (sheet.title, list(sheet.heads), [list(cells) for cells in sheet.cells])
            for sheet in self.sheets
            if sheet.cells
        ]

    def _by_model(self) -> dict[str, list[Measured]]:
        last = {
            model: max(row.step for row in self.errors if row.model == model)
            for model in {r.model: 0 for r in self.errors}
        }
        return {model: [r for r in self.errors if r.model == model and r.step == step] for model, step in last.items()}


def environment(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a reader needs to judge the figures."""
    return {
        **options,
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "thinwire": version("thinwire"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], prose: bool) -> str:
    kind = ' class="text"' if prose else ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _picture(caption: str, figure: Figure) -> str:
    drawing = io.BytesIO()
    figure.savefig(drawing, format="png")
    data = base64.b64encode(drawing.getvalue()).decode()
    text = escape(caption)
    return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'
