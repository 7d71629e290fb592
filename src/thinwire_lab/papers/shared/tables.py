"""The tables of the papers' pages and of the docs, written from the ledger and from the runs."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from thinwire.files import write_atomically
from thinwire_lab.papers.dct import crossing
from thinwire_lab.papers.shared import benches, ledger
from thinwire_lab.papers.shared.benches import Grid, Place, Steps
from thinwire_lab.papers.shared.shelf import Shelf

PAGE = Path("docs/how-to/choose-a-recipe.md")
GAINS_HEAD = "| model | gradients | link | 2 workers | 4 | 8 |\n| --- | ---: | --- | ---: | ---: | ---: |\n"
MODELS = {
    "ResNet-20: much compute, few weights": benches.CNN_STEPS,
    "byte-level transformer": benches.TEXT_STEPS,
    "LSTM with an embedding": benches.LM_STEPS,
    "small VGG: most weights in fully connected layers": benches.FC_STEPS,
    "one linear layer of 12.7 M weights": benches.XL_STEPS,
}
SPARSE = ("topk 0.001", "dgc 0.001", "dragonn 0.001", "gtopk 0.001")


def _gains_of(name: str, found: Grid) -> str:
    megabytes = f"{found[Place(4, benches.LINKS[0])].gradient(4) / 1e6:.2g} MB"
    grid = [[found.get(Place(workers, link)) for workers in benches.WORKERS] for link in benches.LINKS]
    slow, fast = (" | ".join(_span(steps) if steps else ledger.NOTHING for steps in row) for row in grid)
    return f"| {name} | {megabytes} | 1 Gbit/s | {fast} |\n| | | 100 Mbit/s | {slow} |\n"


def _span(steps: Steps) -> str:
    gains = [steps.faster(label) for label in SPARSE]
    least, largest = (f"{each:.0f}" if each >= 10 else f"{each:.1f}" for each in (min(gains), max(gains)))
    return least if least == largest else f"{least} to {largest}"


HEAD = "| id | the paper's claim | it holds if | verdict | ours |\n| --- | --- | --- | --- | --- |\n"
_WORDS = {
    ledger.HOLDS: ("holds", "hold"),
    ledger.FAILS: ("does not", "do not"),
    ledger.DEPENDS: ("depends on the setting", "depend on the setting"),
    ledger.UNDECIDED: ("is undecided", "are undecided"),
    ledger.OPEN: ("is open", "are open"),
}
"""Of one claim, and of several."""
_COUNTED = (ledger.HOLDS, ledger.FAILS, ledger.DEPENDS, ledger.UNDECIDED)
"""What the table of counts has a column for; the sentence above it has all."""
TITLES = {
    "dragonn": "[DRAGONN](dragonn/README.md) (2022)",
    "fft": "[FFT sparsification and the offset float](fft/README.md) (2020)",
    "s2": "[S2 Reducer](s2/README.md) (2021)",
    "dct": "[Dynamic Communication Thresholding](dct/README.md) (2021)",
    "gtopk": "[gTop-k](gtopk/README.md) (2019)",
}
_BAR = r"\|"
_RANGE = re.compile(r"\(([\d.,e+]+)%? to ([\d.,e+]+%?)\)")
"""From where to where seeds go, where no sign is in between."""


def renew(rows: Mapping[str, ledger.Row], folder: Path = ledger.FOLDER) -> None:
    for path, text in _pages(rows, folder):
        write_atomically(path, text)


def stale(rows: Mapping[str, ledger.Row], folder: Path = ledger.FOLDER) -> list[str]:
    """Return the pages whose tables are not what the ledger says."""
    return [str(path.relative_to(folder.parent)) for path, text in _pages(rows, folder) if path.read_text() != text]


def counted(rows: Sequence[ledger.Row]) -> str:
    """Return how many claims have which verdict, as a sentence."""
    if not rows:
        return "None."
    numbers = Counter(row.verdict for row in rows)
    found = [(numbers[verdict], words) for verdict, words in _WORDS.items() if numbers[verdict]]
    said = ", ".join(f"{number} {several if number > 1 else one}" for number, (one, several) in found)
    return f"Of {len(rows)} claims {said}."


def _pages(rows: Mapping[str, ledger.Row], folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the pages with tables, and what they are to say. Raises Absent where a run is missing."""
    for name in ledger.NAMES:
        path, mine = folder / name / "README.md", [row for row in rows.values() if row.paper == name]
        text = _put(_counted(path, mine), HEAD, "".join(map(_line, mine)))
        yield path, _put(text, crossing.HEAD, crossing.lines(Shelf())) if name == "dct" else text
    path = folder / "README.md"
    yield path, _put(_counted(path, list(rows.values())), *_numbers(rows))
    path = folder.parent / PAGE
    gains = "".join(_gains_of(name, runs.read(Shelf())) for name, runs in MODELS.items())
    yield path, _put(path.read_text(), GAINS_HEAD, gains)


def _counted(path: Path, rows: Sequence[ledger.Row]) -> str:
    return re.sub(r"Of \d+ claims [^.]*\.", counted(rows), path.read_text(), count=1)


def _put(text: str, head: str, lines: str) -> str:
    """Replace the lines of the table with this head."""
    before, found, after = text.partition(head)
    if not found:
        raise ValueError(f"the page has no table headed {head.splitlines()[0]!r}")
    return before + head + lines + re.sub(r"\A(\|.*\n)*", "", after)


def _line(row: ledger.Row) -> str:
    """Return a claim's line: of what we measured the clauses that decide."""
    clauses = row.measured.split("; ")[: ledger.catalogue()[row.id].clauses]
    ours = _RANGE.sub(rf"(\1{ledger.NOTHING}\2)", "; ".join(clauses)) + (f" ({row.spread})" if row.spread else "")
    *_, more = row.how.partition(ledger.DECIDES)
    verdict = f"**{row.verdict}**{row.note}" + (f"; {more} would decide" if more else "")
    cells = (row.id, row.claim, row.criterion, verdict, ours)
    return f"| {' | '.join(cell.replace('|', _BAR) for cell in cells)} |\n"


def _numbers(rows: Mapping[str, ledger.Row]) -> tuple[str, str]:
    """Return the head and the lines of the table of counts."""
    head = "| paper | claims | hold | do not hold | depend on the setting | undecided |\n"
    lines = [_cells(TITLES[name], [row for row in rows.values() if row.paper == name], "") for name in ledger.NAMES]
    lines.append(_cells("**all**", list(rows.values()), "**"))
    return head + "| --- |" + " ---: |" * (1 + len(_COUNTED)) + "\n", "".join(lines)


def _cells(title: str, rows: Sequence[ledger.Row], strong: str) -> str:
    counts = Counter(row.verdict for row in rows)
    numbers = [len(rows), *(counts[verdict] for verdict in _COUNTED)]
    return f"| {title} | " + " | ".join(f"{strong}{number}{strong}" for number in numbers) + " |\n"
