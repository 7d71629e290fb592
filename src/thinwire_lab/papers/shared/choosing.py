"""The table of the page on choosing a recipe: how many times as fast as plain DDP steps are, by model and place."""

from pathlib import Path

from thinwire_lab.papers.shared.benches import (
    CNN_STEPS,
    FC_STEPS,
    LINKS,
    LM_STEPS,
    TEXT_STEPS,
    WORKERS,
    XL_STEPS,
    Grid,
    Place,
    Steps,
)
from thinwire_lab.papers.shared.ledger import NOTHING
from thinwire_lab.papers.shared.shelf import Shelf

PAGE = Path("docs/how-to/choose-a-recipe.md")
HEAD = (
    "| model | gradients | 1 Gbit/s: 2 | 4 | 8 | 100 Mbit/s: 2 | 4 | 8 |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
)
MODELS = {
    "ResNet-20: computes much, has few weights": CNN_STEPS,
    "byte-level transformer": TEXT_STEPS,
    "LSTM with an embedding": LM_STEPS,
    "small VGG: dense layers hold its weights": FC_STEPS,
    "one linear layer of 12.7 M weights": XL_STEPS,
}
SPARSE = ("topk 0.001", "dgc 0.001", "dragonn 0.001", "gtopk 0.001")


def lines(shelf: Shelf) -> str:
    """Return a line for each model. Raises Absent where a run is missing."""
    return "".join(_line(name, benches.read(shelf)) for name, benches in MODELS.items())


def _line(name: str, found: Grid) -> str:
    megabytes = f"{found[Place(4, LINKS[0])].gradient(4) / 1e6:.2g} MB"
    places = [Place(workers, link) for link in reversed(LINKS) for workers in WORKERS]
    cells = [_span(found[place]) if place in found else NOTHING for place in places]
    return f"| {' | '.join((name, megabytes, *cells))} |\n"


def _span(steps: Steps) -> str:
    """Return the least and the largest gain."""
    gains = [steps.faster(label) for label in SPARSE]
    least, largest = (f"{each:.0f}" if each >= 10 else f"{each:.1f}" for each in (min(gains), max(gains)))
    return least if least == largest else f"{least} to {largest}"
