"""The papers' rooms: every claim has a row with a verdict, and totals are the rows'."""

import re
from collections import Counter
from pathlib import Path

import pytest

from papers.__main__ import PAPERS
from papers.lab.claims import Paper

HOUSE = Path(__file__).parents[2] / "papers"
VERDICTS = ("holds", "does not hold", "depends", "undecided", "open")
ROW = re.compile(r"^\| ([DFSTG]\d+) \| .*? \| \*\*([a-z ]+)\*\*", re.M)


def _rows(paper: Paper) -> list[tuple[str, str]]:
    return ROW.findall((HOUSE / paper.name / "README.md").read_text())


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_a_room_has_one_row_with_a_verdict_for_every_claim(paper: Paper) -> None:
    rows = _rows(paper)
    assert {verdict for _, verdict in rows} <= set(VERDICTS)
    assert Counter(name for name, _ in rows) == Counter([*paper.checks, *paper.elsewhere])


def test_the_table_over_all_counts_the_rows_of_the_rooms() -> None:
    page, total = (HOUSE / "README.md").read_text(), Counter[str]()
    for paper in PAPERS:
        counts = Counter(verdict for _, verdict in _rows(paper))
        total += counts
        numbers = " | ".join(str(n) for n in (counts.total(), *(counts[verdict] for verdict in VERDICTS)))
        assert re.search(rf"\({paper.name}/README.md\).*\| {re.escape(numbers)} \|", page), paper.name
    assert "| **all** | " + " | ".join(f"**{n}**" for n in (total.total(), *(total[v] for v in VERDICTS))) in page
