"""The table of DCT's page: what a boundary costs in loss, by method, cut and the share that is left out."""

from thinwire_lab.papers.dct.crossing import DLRM, TEXT
from thinwire_lab.papers.dct.rows import BASELINE, Row, rows
from thinwire_lab.papers.shared.shelf import Shelf

LEFT_OUT = (0.5, 0.75, 0.9, 0.95, 0.98)
HEAD = (
    f"| method | cut | {' | '.join(f'{each:.0%}' for each in LEFT_OUT)} |\n| --- | --- |{' ---: |' * len(LEFT_OUT)}\n"
)
_TITLES = {DLRM: "DLRM", TEXT: "Transformer"}


def lines(shelf: Shelf) -> str:
    """Return how far losses end above dense's, a line for each method and cut. Raises Absent without a run."""
    found = ""
    for boundaries, title in _TITLES.items():
        losses, cells = boundaries.read(shelf), dict[tuple[str, str], dict[float, Row]]()
        for row in rows(boundaries.problem):
            if row.method != BASELINE:
                cells.setdefault((row.method, row.place), {})[row.sparsity] = row
        found += f"| **{title}** | |{' |' * len(LEFT_OUT)}\n"
        for (method, place), by_sparsity in cells.items():
            said = (losses.over(by_sparsity[each].name).bare if each in by_sparsity else "" for each in LEFT_OUT)
            found += " ".join(f"| {method} | {place} | {' | '.join(said)} |".split()) + "\n"
    return found
