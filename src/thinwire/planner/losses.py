"""What each method costs in loss, as measured: the one table that plans, warnings and pages read."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

OptimizerName = Literal["sgd", "adamw", "muon"]
"""Optimizers by what they do to a gradient: sgd adds it up, adamw and its family divide by the root of a second moment,
muon orthogonalises a matrix of them."""
ALLOWED = 1.01
"""The loss that a plan may cost unless more is asked for, over that of uncompressed training."""
INSTEAD: Mapping[OptimizerName, str] = MappingProxyType(
    {"adamw": "recipes.orthogonal, which is made for it,", "muon": "METHODS['bf16'], which costs Muon nothing,"}
)
"""What to use instead, where error feedback starves elements that are rarely sent.

With Muon, you can also switch to AdamW and `orthogonal`, which ended where uncompressed Muon did."""


class Measured(NamedTuple):
    """The final loss of `methods`, which deliver the same sums, at a density, and of `dense` in the same measurement.

    In docs/measurements/convergence.md `dense` is at the best settings found for it, elsewhere at the bench's, as are
    the methods: so a difference of a few percent between a ratio from there and one from elsewhere does not rank two
    methods.
    """

    methods: tuple[str, ...]
    optimizer: OptimizerName
    density: float | None
    loss: float
    dense: float
    source: str
    betas: tuple[float, float] | None = None

    @property
    def ratio(self) -> float:
        """How many times dense's loss it ends at."""
        return self.loss / self.dense


_RECIPES = "[recipes](../measurements/recipes.md)"
_OPTIMIZERS = "[optimizers](../measurements/optimizers.md)"
_CONVERGENCE = "[convergence](../measurements/convergence.md)"
_TOPK = ("topk", "sampled_topk", "doubling", "sampled_doubling", "owner", "sampled_owner")
_GTOPK = ("gtopk", "sampled_gtopk")

LOSSES: tuple[Measured, ...] = (
    Measured(("terngrad",), "sgd", None, 1.976, 2.014, _RECIPES),
    Measured(("bf16",), "sgd", None, 1.889, 1.889, _OPTIMIZERS),
    Measured(("fp16",), "sgd", None, 2.014, 2.014, _RECIPES),
    Measured(("qsgd",), "sgd", None, 2.016, 2.014, _RECIPES),
    Measured(("dgc",), "sgd", 0.01, 2.066, 2.014, _RECIPES),
    Measured(("powersgd",), "sgd", None, 2.089, 2.014, _RECIPES),
    Measured(("dragonn",), "sgd", 0.01, 2.104, 2.014, _RECIPES),
    Measured(("fft",), "sgd", 0.15, 2.120, 2.014, _RECIPES),
    Measured(("dct_steered",), "sgd", 0.01, 2.202, 2.014, _RECIPES),
    Measured((*_TOPK, "mstopk"), "sgd", 0.01, 2.209, 2.014, _RECIPES),
    Measured(("dct_dp",), "sgd", 0.01, 2.211, 2.014, _RECIPES),
    Measured(("s2_union",), "sgd", 1 / 32, 2.212, 2.014, _RECIPES),
    Measured(("s2_reducer",), "sgd", 1 / 32, 2.307, 2.014, _RECIPES),
    Measured(_GTOPK, "sgd", 0.01, 2.372, 2.014, _RECIPES),
    Measured(("signsgd",), "sgd", None, 2.559, 2.014, _RECIPES),
    Measured(("randomk",), "sgd", 0.01, 2.870, 2.014, _RECIPES),
    Measured(("bf16",), "adamw", None, 1.708, 1.711, _OPTIMIZERS),
    Measured(("qsgd",), "adamw", None, 1.709, 1.711, _OPTIMIZERS),
    Measured(("terngrad",), "adamw", None, 1.747, 1.711, _OPTIMIZERS),
    Measured(("orthogonal",), "adamw", 6 / 256, 1.616, 1.669, _CONVERGENCE, (0.9, 0.9)),
    Measured(("fading",), "adamw", 6 / 256, 1.711, 1.669, _CONVERGENCE, (0.95, 0.9)),
    Measured(("demo",), "adamw", 32 / 4096, 1.788, 1.669, _CONVERGENCE),
    Measured(("powersgd",), "adamw", None, 1.919, 1.669, _CONVERGENCE),
    Measured(_TOPK, "adamw", 0.01, 2.118, 1.711, _OPTIMIZERS),
    Measured(("bf16",), "muon", None, 1.945, 1.944, _OPTIMIZERS),
    Measured(_TOPK, "muon", 0.01, 2.538, 1.944, _OPTIMIZERS),
)
"""A new method or optimizer is a new row."""


def measured(name: str, optimizer: OptimizerName) -> Measured | None:
    """Return what was measured of a candidate such as ``bf16`` or ``topk:0.01``, or None."""
    method, _, density = name.partition(":")
    share = float(density) if density else None
    return next(
        (row for row in LOSSES if row.optimizer == optimizer and method in row.methods and row.density == share), None
    )


def within(limit: float, optimizer: OptimizerName, names: Iterable[str]) -> list[str]:
    """Return those of the candidates that were measured at `limit` times dense's loss or less, least harm first."""
    rows = {name: measured(name, optimizer) for name in names}
    harm = {name: max(1.0, row.ratio) for name, row in rows.items() if row is not None}  # below 1 is luck
    return sorted((name for name in harm if harm[name] <= limit), key=harm.__getitem__)


def in_words(names: Sequence[str], optimizer: OptimizerName) -> str:
    """Return in a sentence what these candidates are expected to cost; empty where there are none."""
    told = []
    for name in dict.fromkeys(names):
        row = measured(name, optimizer)
        if row is None:
            told.append(f"that of {name} was not measured")
        else:
            betas = f", with betas {row.betas}" if row.betas else ""
            told.append(
                f"{name} ended at {row.ratio:.2f} times dense's ({row.loss:.3f} against {row.dense:.3f}{betas})"
            )
    return f"Expected loss under {optimizer}: {'; '.join(told)}." if told else ""
