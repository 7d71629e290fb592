"""How far off does each of the paper's four methods leave an element? And does Assumption 3.2 hold?"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from thinwire.codecs import FFT, Cast, Codec, TopK
from thinwire.formats import Levels, Ternary
from thinwire_lab.papers.shared.claims import FFT_PAPER
from thinwire_lab.papers.shared.errors import offset
from thinwire_lab.papers.shared.figures import MARKS, label, side_by_side
from thinwire_lab.papers.shared.material import Run
from thinwire_lab.show.canvas import COLOURS, DASHES, FAINT

# ruff: noqa: RUF001 - the paper's symbols


THETA = 0.85
FOUR: dict[str, Codec] = {
    "fft": FFT(density=1 - THETA, values=offset(10, 5)),
    "topk": TopK(density=1 - THETA),
    "qsgd 3 bits": Cast(values=Levels(bits=3, norm="max", group_size=None)),
    "terngrad": Cast(values=Ternary()),
}
RANGE = torch.logspace(-5, -2, 61)


@lru_cache(maxsize=2)
def four_restored(run: Run) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the late gradient and each method's reconstruction of it, tensor by tensor."""
    tensors = list(run.late.mean.values())
    whole = torch.cat([x.reshape(-1) for x in tensors])
    return {name: (whole, torch.cat([codec.encode(x).dense() for x in tensors])) for name, codec in FOUR.items()}


def absolute_errors(run: Run) -> dict[str, Tensor]:
    """Return |g - ĝ| of every element by method."""
    return {name: (x - restored).abs() for name, (x, restored) in four_restored(run).items()}


def distribution(errors: Tensor) -> Tensor:
    """Return the share of errors below each number of RANGE."""
    return torch.searchsorted(errors.sort().values, RANGE, right=True) / errors.numel()


@FFT_PAPER.figure("absolute_errors")
def error_distribution(runs: Sequence[Run]) -> Figure:
    """The share of elements whose absolute error lies below a bound, as the FFT paper's Fig. 15(e)."""

    def draw(axes: Axes, run: Run) -> None:
        for place, (name, errors) in enumerate(absolute_errors(run).items()):
            axes.plot(RANGE, distribution(errors), DASHES[place % 4], color=COLOURS[place], label=name, linewidth=1.8)
        axes.set_xscale("log")
        axes.set_ylim(0, 1.02)
        axes.legend(frameon=False, fontsize=9, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.17))
        label(axes, f"{run.model}, step {run.late.step}", "absolute error of an element", "share of elements below")

    return side_by_side(runs, draw)


@FFT_PAPER.figure("assumption")
def alpha_over_training(runs: Sequence[Run]) -> Figure:
    """α of Assumption 3.2 over training by share dropped."""

    def draw(axes: Axes, run: Run) -> None:
        for place, theta in enumerate(sorted({a.theta for a in run.alphas})):
            points = sorted((a.step, a.value) for a in run.alphas if a.theta == theta and not a.quantised)
            steps, values = zip(*points, strict=True)
            mark = MARKS[place % len(MARKS)]
            axes.plot(steps, values, marker=mark, color=COLOURS[place % 6], label=f"θ = {theta:g}", linewidth=1.5)
        axes.set_ylim(0, 1.05)
        axes.grid(axis="y", color=FAINT, linewidth=0.7)
        axes.legend(frameon=False, fontsize=9, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.17))
        label(axes, f"{run.model}: α by share dropped, 4 workers", "step", "‖v − v̄‖ / ‖v‖")

    return side_by_side([run for run in runs if run.alphas], draw)
