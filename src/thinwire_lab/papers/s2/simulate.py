"""The S2 Reducer's speed-ups beside what its own communication times, and its bytes, predict.

python -m thinwire_lab.papers.s2.simulate [--json out.json] [--plot out.png] [--html out.html]
"""

from dataclasses import asdict, dataclass
from typing import Any

from matplotlib.figure import Figure

from thinwire_lab.papers.shared.implied import compared
from thinwire_lab.papers.shared.simulating import app_of
from thinwire_lab.show.table import Table
from thinwire_lab.simulate.outputs import Outcome, starred

WORKERS, DENSITY, RATIO, BLOCK = 16, 1 / 32, 0.5, 32
"""GPUs, density of blocks, and λ. The size of a block is not given; 32 elements here."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A block-sparsified model: bytes of its gradients, bytes a second, and what the paper says of the sketch.

    saved: by which share its communication is shorter than another method's. gains: how many times as fast a step is.
    """

    name: str
    nbytes: float
    bandwidth: float
    saved: dict[str, float]
    gains: dict[str, float]

    def longer(self, method: str) -> float:
        """Return the method's communication over the sketch's."""
        return 1 / (1 - self.saved[method])

    def computing(self, method: str) -> float:
        """Return the computing, over the sketch's communication, that makes a gain of what is saved."""
        gain = self.gains[method]
        return (self.longer(method) - gain) / (gain - 1)

    @property
    def gather(self) -> float:
        """Seconds of an all-gather of the blocks and their bitmap, at the link's rate."""
        return (WORKERS - 1) * (DENSITY * self.nbytes + self._bitmap) / self.bandwidth

    @property
    def sketch(self) -> float:
        """Seconds of a ring all-reduce of the sketch and the bitmap."""
        return 2 * (WORKERS - 1) / WORKERS * (RATIO * DENSITY * self.nbytes + self._bitmap) / self.bandwidth

    @property
    def _bitmap(self) -> float:
        return self.nbytes / 4 / BLOCK / 8


MODELS = (
    Model(
        name="ResNet-50",
        nbytes=94.8e6,
        bandwidth=1e9 / 8,
        saved={"OmniReduce": 0.81, "SparCML": 0.94, "all-gather": 0.87},
        gains={"SparCML": 4.1, "all-gather": 2.3},
    ),
    Model(
        name="GNMT-8",
        nbytes=460e6,
        bandwidth=10e9 / 8,
        saved={"OmniReduce": 0.65, "SparCML": 0.83, "all-gather": 0.59},
        gains={"OmniReduce": 1.8},
    ),
)


def s2() -> Outcome:
    """Return Section 4 and Appendix B.2, and what they imply."""
    return Outcome(
        title="S2 Reducer (2021) from its own figures: blocks, density 1/32, 16 GPUs",
        tables=[_table()],
        notes=_notes(),
        document={"schema": "thinwire.paper/1", "paper": "s2", "models": [_document(model) for model in MODELS]},
        figure=_figure,
    )


def _document(model: Model) -> dict[str, Any]:
    implied = {method: model.computing(method) for method in model.gains}
    return asdict(model) | {"computing": implied, "gather_seconds": model.gather, "sketch_seconds": model.sketch}


def _table() -> Table:
    rows = [
        [model.name, method, f"{saved:.0%}", f"{model.longer(method):.1f}", *_gained(model, method)]
        for model in MODELS
        for method, saved in model.saved.items()
    ]
    headings = (
        "model ",
        "against ",
        "  communication\n  saved",
        "  times the\n  sketch's",
        "  step\n  gains",
        "  so computing\n  is",
    )
    return starred(title="Blocks: what the sketch saves", headings=headings, rows=rows)


def _gained(model: Model, method: str) -> list[str]:
    return [f"{model.gains[method]:.1f}", f"{model.computing(method):.2f}"] if method in model.gains else ["", ""]


def _notes() -> list[str]:
    notes = [
        "so computing is: over the sketch's communication, the one number that makes the step's gain of what is saved."
    ]
    for model in MODELS:
        gather, sketch, longer = 1e3 * model.gather, 1e3 * model.sketch, model.longer("all-gather")
        notes.append(
            f"{model.name}: by bytes an all-gather takes {gather:.0f} ms and the sketch {sketch:.0f} ms, "
            f"{gather / sketch:.0f} times as long and not {longer:.1f}. If the all-gather is right, the sketch takes "
            f"{gather / longer:.0f} ms."
        )
    return notes


def _figure() -> Figure:
    groups = {
        model.name: {"published": model.longer("all-gather"), "by bytes": model.gather / model.sketch}
        for model in MODELS
    }
    return compared("S2 Reducer: an all-gather's communication over the sketch's, 16 GPUs", "times as long", groups)


app = app_of(s2)

if __name__ == "__main__":
    app()
