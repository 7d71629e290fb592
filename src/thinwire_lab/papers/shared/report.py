"""All results: as a document, and as tables on the console."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from thinwire_lab.papers.shared.claims import UNTESTABLE, Sheet, Verdict
from thinwire_lab.papers.shared.errors import AT_BITS, Measured, at_equal_bytes
from thinwire_lab.papers.shared.ledger import FAILS, HOLDS
from thinwire_lab.show.table import Column, Table, tabulated
from thinwire_lab.show.terminal import print_titled, say

SCHEMA = "thinwire.fidelity/1"
ERROR_KEYS = ("model", "step", "method", "density", "bytes", "bits_per_element", "error", "cosine")
_COLUMNS: tuple[Column[Measured], ...] = (
    Column(heading="method", text=lambda row: row.method, left=True),
    Column(heading="density", text=lambda row: f"{row.density:g}"),
    Column(heading="bytes", text=lambda row: f"{row.bytes:,.0f}"),
    Column(heading="bits per element", text=lambda row: f"{row.bits_per_element:.3f}"),
    Column(heading="err²", text=lambda row: f"{row.error:.3g}"),
    Column(heading="cosine", text=lambda row: f"{row.cosine:.4f}"),
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Errors, verdicts, the papers' own tables, and figures by file name."""

    environment: Mapping[str, Any]
    errors: Sequence[Measured]
    claims: Sequence[Verdict]
    sheets: Sequence[Sheet] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)

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
        for table in (*self._late(), *self._equal(), *self._own(), self._judged()):
            print_titled(console, table)
        say(console, f"\n{self._counts()} Why a claim is not testable here, the document says.")

    def _counts(self) -> str:
        counts = {
            verdict: sum(claim.verdict == verdict for claim in self.claims) for verdict in (HOLDS, FAILS, UNTESTABLE)
        }
        return (
            f"{len(self.claims)} claims: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + "."
        )

    def _judged(self) -> Table:
        """Return the verdicts for a terminal, where sentences stand below their row."""
        claims = [claim for claim in self.claims if claim.verdict != UNTESTABLE]
        return Table(
            title="Claims",
            headings=("id", "verdict"),
            rows=[(claim.id, claim.verdict) for claim in claims],
            left=(0, 1),
            under=[f"{claim.claim}: {claim.figure} ({claim.how})" for claim in claims],
        )

    def _late(self) -> Iterator[Table]:
        for model, rows in self._by_model().items():
            yield tabulated(_COLUMNS, rows, title=f"{model}, step {rows[0].step}")

    def _equal(self) -> Iterator[Table]:
        for model, rows in self._by_model().items():
            yield Table(
                title=f"{model}, step {rows[0].step}: err² at equal bytes, interpolated",
                headings=("method", *(f"{bits:g} bits" for bits in AT_BITS)),
                rows=[
                    [family, *("-" if e is None else f"{e:.3g}" for e in found)]
                    for family, found in at_equal_bytes(rows).items()
                    if any(found)
                ],
                left=(0,),
            )

    def _own(self) -> Iterator[Table]:
        for sheet in self.sheets:
            if sheet.cells:
                yield Table(title=sheet.title, headings=sheet.heads, rows=sheet.cells, left=(0,))

    def _by_model(self) -> dict[str, list[Measured]]:
        last = {
            model: max(row.step for row in self.errors if row.model == model)
            for model in {r.model: 0 for r in self.errors}
        }
        return {model: [r for r in self.errors if r.model == model and r.step == step] for model, step in last.items()}
