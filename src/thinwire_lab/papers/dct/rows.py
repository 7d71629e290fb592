"""The rows of the comparison: those of the paper's Tables 1, 4, 6, 7 and 8, and a few more."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from thinwire.pipeline import LaplaceBoundary, TopKBoundary
from thinwire_lab.papers.dct.comparisons import GaussianSketch, TopKGradient
from thinwire_lab.papers.dct.training import INSIDE

Make = Callable[[float, int], nn.Module]
SPARSITIES = (0.75, 0.90, 0.95, 0.98)
BASELINE = "baseline"
_SKETCH, _CORRECTED = "Gaussian sketch", "gradient top-k, error feedback"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method at one sparsity, between `cuts` + 1 stages, and before `inside` layers within them.

    make: (density, seed) -> the module at every cut. like: the row whose real density this one uses, run by run.
    """

    method: str
    sparsity: float = 0.0
    cuts: int = 1
    inside: int = 0
    make: Make
    like: str | None = None

    @property
    def name(self) -> str:
        """The name that tells it from a problem's other rows."""
        return f"{self.method} | {self.sparsity:.0%} | {self.place}"

    @property
    def place(self) -> str:
        """Where it is cut."""
        within = f"{self.inside} activation function{'s' * (self.inside > 1)}" if self.inside else ""
        between = f"{self.cuts + 1} workers" if self.cuts else ""
        return " + ".join(filter(None, (between, within))) or "none"


def _exact(density: float, _: int) -> nn.Module:
    return TopKBoundary(density)


def _bfloat16(density: float, _: int) -> nn.Module:
    return TopKBoundary(density, values=torch.bfloat16)


def _laplace(density: float, _: int) -> nn.Module:
    return LaplaceBoundary(density)


def _corrected(density: float, _: int) -> nn.Module:
    return TopKGradient(density)


def _lossy(density: float, _: int) -> nn.Module:
    return TopKGradient(density, error_feedback=False)


def _dropout(density: float, _: int) -> nn.Module:
    return nn.Dropout(1 - density)


def rows(problem: str) -> list[Row]:
    """All rows for that problem: the baseline first, and a row before those that take their density from it."""
    return [Row(method=BASELINE, cuts=0, make=_exact), *_boundaries(), *_comparisons(), *_others(problem)]


def _boundaries() -> Iterator[Row]:
    for method, make in (("exact", _exact), ("Laplace", _laplace)):
        for cuts in (1, 2):
            yield from (Row(method=method, sparsity=each, cuts=cuts, make=make) for each in SPARSITIES)
    for each in (0.75, 0.95):
        like = Row(method="Laplace", sparsity=each, make=_laplace).name
        yield Row(method="exact, as many as Laplace", sparsity=each, make=_exact, like=like)
    yield Row(method="exact, bfloat16", sparsity=0.95, make=_bfloat16)


def _comparisons() -> Iterator[Row]:
    for method, make, sparsities in (
        (_SKETCH, GaussianSketch, (0.5, 0.75, 0.9)),
        (_CORRECTED, _corrected, (0.5, 0.75, 0.9)),
        ("gradient top-k", _lossy, (0.5, 0.9)),
    ):
        yield from (Row(method=method, sparsity=each, make=make) for each in sparsities)


def _others(problem: str) -> Iterator[Row]:
    """Cuts behind activation functions, in a transformer as in the paper; elsewhere also more methods."""
    known = len(INSIDE.get(problem, ()))
    if problem == "transformer":
        yield from (Row(method="exact", sparsity=each, cuts=0, inside=1, make=_exact) for each in SPARSITIES)
        yield from (Row(method="exact", sparsity=each, cuts=0, inside=known, make=_exact) for each in (0.90, 0.95))
        yield Row(method="exact", sparsity=0.75, cuts=2, inside=known, make=_exact)
        return
    if known:
        yield Row(method="exact", sparsity=0.75, cuts=0, inside=known, make=_exact)
    yield from (Row(method="dropout", sparsity=each, make=_dropout) for each in (0.75, 0.9))
    yield from (Row(method=_CORRECTED, sparsity=each, cuts=2, make=_corrected) for each in (0.5, 0.75, 0.9))
    yield Row(method=_SKETCH, sparsity=0.5, cuts=2, make=GaussianSketch)
