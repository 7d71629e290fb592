"""The rows of the comparison: those of the paper's Tables 1, 4, 6, 7 and 8, and a few more."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from thinwire.checked import Share, Size, checked
from thinwire.codecs.base import kept
from thinwire.codecs.row_topk import largest_in_rows
from thinwire.pipeline import LaplaceBoundary, TopKBoundary
from thinwire_lab.papers.dct.training import INSIDE


@final
@checked
class TopKGradient(nn.Module):
    """Activations pass unchanged. Of each row (d) of the gradient, the round(density · d) largest magnitudes pass.

    The gradient alone decides which, whereas behind a `Boundary` the activation does. With error feedback the rest
    waits at its place in the batch. It is added to the next gradient there, even though that is of another sample: so
    batches have one shape.
    Without error feedback the rest is lost. The residual is `waiting`, in float32 or wider, and not in the state_dict.
    Of equal magnitudes the first pass, NaN counts as largest, and what is not finite leaves no rest. For unsplit models
    only.
    """

    waiting: Tensor | None

    def __init__(self, density: Share, error_feedback: bool = True) -> None:
        super().__init__()
        self.density, self.error_feedback = density, error_feedback
        self.register_buffer("waiting", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., d)."""
        out: Tensor = _Filter.apply(x, self)
        return out

    def filtered(self, gradient: Tensor) -> Tensor:
        """Return what passes of a gradient (..., d), and zero elsewhere. The rest waits, or is lost."""
        whole = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
        if self.waiting is not None:
            whole = whole + self.waiting
        flat = whole.view(-1)
        picks = largest_in_rows(flat, max(1, whole.shape[-1]), self.density).long()
        taken = flat.index_select(0, picks)
        passed = taken.to(gradient.dtype)
        if self.error_feedback:
            rest = torch.where(passed.isfinite(), taken - passed, 0)
            self.waiting = flat.index_copy(0, picks, rest).view_as(whole)
        return passed.new_zeros(flat.numel()).index_copy_(0, picks, passed).view_as(gradient)


@final
@checked
class GaussianSketch(nn.Module):
    """A random sketch: x → x S Sᵀ for rows of width d, with S (d, m) of N(0, 1/m) and m = round(density · d).

    Its mean over S is x, but its error is √((d + 1)/m) times as long as x. Each forward draws S anew, from `seed` and
    the number of calls so far; torch's own random state is left alone. The gradient is autograd's, g S Sᵀ. For unsplit
    models only: a negative result needs no wire.
    """

    def __init__(self, density: Share, seed: Size = 0) -> None:
        super().__init__()
        self.density, self.seed, self._calls = density, seed, 0

    def forward(self, x: Tensor) -> Tensor:
        """Return the sketched x (..., d), of the same shape and floating-point dtype."""
        sketch = self._draw(x.shape[-1], x.device).to(x.dtype)
        return x @ sketch @ sketch.mT

    def _draw(self, width: int, device: torch.device) -> Tensor:
        m = kept(self.density, width)
        mixed = int(np.random.SeedSequence((self.seed, self._calls)).generate_state(1)[0])
        self._calls += 1
        generator = torch.Generator(device=device).manual_seed(mixed)
        return torch.randn(width, m, generator=generator, device=device) * max(1, m) ** -0.5


class _Filter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: TopKGradient) -> Tensor:
        ctx.owner = owner
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.owner.filtered(gradient), None


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
        within = f"{self.inside} activation function{'s' * (self.inside > 1)}" if self.inside else ""
        between = f"{self.cuts + 1} workers" if self.cuts else ""
        return " + ".join(filter(None, (between, within))) or "none"


def _unseeded(make: Callable[[float], nn.Module]) -> Make:
    return lambda density, _: make(density)


_exact, _laplace, _corrected = map(_unseeded, (TopKBoundary, LaplaceBoundary, TopKGradient))


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
    yield Row(
        method="exact, bfloat16", sparsity=0.95, make=lambda density, _: TopKBoundary(density, values=torch.bfloat16)
    )


def _comparisons() -> Iterator[Row]:
    for method, make, sparsities in (
        (_SKETCH, GaussianSketch, (0.5, 0.75, 0.9)),
        (_CORRECTED, _corrected, (0.5, 0.75, 0.9)),
        ("gradient top-k", lambda density, _: TopKGradient(density, error_feedback=False), (0.5, 0.9)),
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
    yield from (
        Row(method="dropout", sparsity=each, make=lambda density, _: nn.Dropout(1 - density)) for each in (0.75, 0.9)
    )
    yield from (Row(method=_CORRECTED, sparsity=each, cuts=2, make=_corrected) for each in (0.5, 0.75, 0.9))
    yield Row(method=_SKETCH, sparsity=0.5, cuts=2, make=GaussianSketch)
