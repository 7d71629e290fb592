"""Momentum orthogonalised on each rank before anything is chosen: Muon's update is sent."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire import kernels
from thinwire.checked import Fraction, checked
from thinwire.kernels import Picks
from thinwire.kernels.replay import lasting
from thinwire.memories.fading_momentum import AppliedMomentum
from thinwire.memories.staged import Staged
from thinwire.payloads import Payload, Scratch
from thinwire.signals import Signal, Signals, numbers
from thinwire.waits import known, on_host

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # singular values from 0.01 on come to lie between 0.68 and 1.14
_ITERATIONS = 5


@final
@checked
@dataclass(kw_only=True)
class OrthogonalMomentum(AppliedMomentum):
    """Keep m ← μ·m + g and E ← β·E + O(μ·m + g)/K − delivered, where O is Muon's (Jordan et al. 2024).

    O brings the singular values of a matrix close to 1, on each of the K ranks by itself. So no rank and no direction
    outweighs the others, whatever the size of its gradient or its loss weight. A large gradient still decides where m
    points, until it has faded. A rank with an all-zero gradient, such as one out of data within Join, contributes
    nothing. The invariant of `FadingMomentum` holds with O/K in the place of the gradient. A tensor of more
    dimensions is treated as a matrix with its first dimension as rows; a vector, as a matrix of one row. O is
    multiplied by the loss scale, if there is one, as gradients are.

    The result has lost the gradient's length, so use an optimizer that does not need it, such as AdamW. The residual
    cannot be added to an uncompressed gradient: if the recipe is removed, E is dropped, and so is m if the optimizer
    has no momentum. It takes 16 bytes per element, counting the copies that let a step be rolled back.

    Args:
        momentum: μ; None takes each parameter's from the optimizer: `attach(..., optimizer=)` moves m out of the
            optimizer.
        decay: β, which shrinks E, the residual, once a step.
    """

    residual: ClassVar[str] = "update"
    own: ClassVar[str] = "momentum"
    keeps_length: ClassVar[bool] = False

    # the polynomials and products of one matrix at a time on a CPU, and of all matrices on a GPU
    scratch: ClassVar[Scratch] = Scratch(longest=25)

    momentum: Fraction | None = None
    decay: Fraction = 0.95
    _momentum: Staged = field(default_factory=Staged, init=False, repr=False)
    _update: Staged = field(default_factory=Staged, init=False, repr=False)
    _adopted: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _begun: "dict[str, Callable[[], _Update]]" = field(default_factory=dict, init=False, repr=False)

    def compensate_each(
        self, names: Sequence[str], gradients: Sequence[Tensor], scale: float, seeds: Sequence[int]
    ) -> Signals:
        """Return β·E + scale · O of each.

        Raises:
            RuntimeError: When no momentum is known.
        """
        if self._momentum.continue_any(names):
            return Signals([self._one(name, x, scale) for name, x in zip(names, gradients, strict=True)])
        decays = [self._decay(name) for name in names]
        columns = (*self._momentum.open_each(names, gradients), *self._update.open_each(names, gradients))
        signals = _Updates((*columns, gradients, decays), (self.decay, scale, self._loss_scale * scale))
        self._begun.update((name, partial(signals.__getitem__, i)) for i, name in enumerate(names))
        return signals

    def _one(self, name: str, gradient: Tensor, scale: float) -> Signal:
        factors = _Factors(self._decay(name), self.decay, scale, self._loss_scale * scale)
        earlier = self._begun[name]() if self.begun(name) and name in self._begun else None
        parts = self._momentum.open(name, gradient), self._update.open(name, gradient)
        signal = _Update(*parts, gradient, factors, earlier)
        self._begun[name] = lambda: signal
        return signal

    def receive(self, name: str, momentum: Tensor) -> None:
        """Add an optimizer's momentum (flat). If a step has begun, m and O are updated with it."""
        signal = self._begun[name]() if name in self._begun else None
        if signal is not None:
            signal.add_ahead(-1)
        super().receive(name, momentum)
        if signal is not None:
            signal.add_ahead(1)

    @override
    def retain(self, names: Sequence[str], delivered: Payload) -> None:
        delivered.subtract_from(self._update.staged_each(names))

    def tensors(self) -> Mapping[str, Staged]:
        """Return m and E."""
        return {"momentum": self._momentum, "update": self._update}

    @override
    def drop(self, names: Collection[str]) -> None:
        super().drop(names)
        self._end(names)

    @override
    def commit(self, names: Collection[str] | None = None) -> None:
        super().commit(names)
        self._end(names)

    @override
    def rollback(self, names: Collection[str] | None = None) -> None:
        super().rollback(names)
        self._end(names)

    def restore(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load copies of the momenta and the residuals."""
        super().restore(state)
        self._end()

    def _end(self, names: Collection[str] | None = None) -> None:
        """Let go of the signals of a step that is over."""
        for name in list(self._begun) if names is None else names:
            self._begun.pop(name, None)


def orthogonal(x: Tensor) -> Tensor:
    """Return U·Vᵀ of x = U·S·Vᵀ, roughly: a polynomial, five times over, brings singular values close to 1.

    x: (rows, columns), or several such matrices; float32 or float64. The sign of every singular value is kept, and
    zeros stay. This is Newton–Schulz's iteration with the coefficients of Muon, and, as in Muon, it runs in bfloat16 on
    a GPU, where matrix products are then about ten times as fast.
    """
    if x.dim() == 2 and not on_host(x):
        return orthogonal(x[None])[0]  # as it goes with others of its shape
    a, b, c = _COEFFICIENTS
    y = x.mT if x.shape[-2] > x.shape[-1] else x
    of_each: dict[str, Any] = {"dim": (-2, -1), "keepdim": True} if x.dim() > 2 else {}
    for size in (torch.amax, torch.linalg.vector_norm):  # the largest first: squares could overflow, or vanish
        y = y / size(y.abs(), **of_each).clamp_min(torch.finfo(x.dtype).tiny)
    if on_host(y) and y.shape[-2] == 1:
        return (y * _grown(float(torch.linalg.vector_norm(y)))).view_as(x)
    if on_host(y) and y.shape[-1] > 1.5 * y.shape[-2]:
        y = _grown_of_gram(y @ y.mT) @ y
    else:
        y = y if on_host(y) else y.bfloat16()
        for _ in range(_ITERATIONS):
            gram = y @ y.mT
            if on_host(y):
                y = ((c * gram @ gram).add_(gram.mul_(b)) @ y).add_(y.mul_(a))  # in place: a third of the memory
            else:  # fewer launches, other roundings
                y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return (y.mT if x.shape[-2] > x.shape[-1] else y).to(x.dtype)


def _grown_of_gram(gram: Tensor) -> Tensor:
    """Return P of O = P·y from y·yᵀ: where y is wide, the polynomials of the smaller matrix take half the time.

    Squaring costs half the digits, so not in bfloat16; in float32 O differs by 2e-4.
    """
    (a, b, c), whole = _COEFFICIENTS, None
    for left in reversed(range(_ITERATIONS)):
        each = b * gram + c * gram @ gram
        each.diagonal(dim1=-2, dim2=-1).add_(a)
        whole = each if whole is None else each @ whole
        gram = each @ gram @ each if left else gram
    assert whole is not None
    return whole


def _grown(size: float) -> float:
    """Return how many times as large the polynomial makes a vector of this norm, its one singular value."""
    (a, b, c), times = _COEFFICIENTS, 1.0
    for _ in range(_ITERATIONS):
        square = (size * times) ** 2
        times *= a + b * square + c * square * square
    return times


class _Factors(NamedTuple):
    """μ and β, and what is multiplied with g and with O."""

    momentum: float
    decay: float
    of_gradient: float
    of_update: float


@final
class _Update(Signal):
    """β·E + O, computed into the staged E, and the staged m with it. `earlier`: of what g this is a further part.

    `moves`: whether g has anything but zeros, or there is no O; a 0-dim tensor where only a GPU knows.
    """

    def __init__(
        self,
        momenta: tuple[Tensor, Tensor],
        updates: tuple[Tensor, Tensor],
        gradient: Tensor,
        factors: _Factors,
        earlier: "_Update | None",
    ) -> None:
        self._momenta, self._updates = momenta, updates
        self._gradient: Tensor | None = gradient  # until it has been added
        self._factors, self._earlier = factors, earlier
        self.moves: bool | Tensor = False
        self.dtype, self.numel, self.device = gradient.dtype, gradient.numel(), gradient.device

    def settle(self, other: "_Update") -> None:
        """Take it that this has been computed as the other has."""
        self._gradient, self.computed, self.moves = None, True, other.moves

    def tensor(self) -> Tensor:
        (before, m), (waited, update), factors = self._momenta, self._updates, self._factors
        if self._gradient is None:
            return update
        if self._earlier is not None:  # its O has been added: add what that lacks
            self._earlier.add_ahead(-1)
            self.moves, self._earlier = self._earlier.moves, None
        else:
            torch.mul(before, factors.momentum, out=m)
            torch.mul(waited, factors.decay, out=update)
        self.moves = self.moves | known(self._gradient.any())
        if isinstance(self.moves, Tensor):
            (self.moves,) = lasting([self.moves])
        m.add_(self._gradient, alpha=factors.of_gradient)
        self._gradient, self.computed = None, True
        return self.add_ahead(1)

    def add_ahead(self, times: int) -> Tensor:
        """Add O of what is staged now, so many times, and return E."""
        (before, m), (_, update) = self._momenta, self._updates
        if self.moves is False:
            return update
        ahead = self._ahead(m, before)
        ahead = ahead if self.moves is True else torch.where(self.moves, ahead, 0)
        return update.add_(ahead, alpha=times * self._factors.of_update)

    def sample(self, offset: int, stride: int) -> Tensor:
        return self.tensor()[offset::stride]

    def select(self, threshold: Tensor, capacity: int) -> Picks:
        return kernels.select(self.tensor(), threshold, capacity)

    def _ahead(self, m: Tensor, before: Tensor) -> Tensor:
        """Return O(μ·m + g), flat, where g is m less what is left in it of m before."""
        if not self.numel:
            return m
        ahead = m.mul(1 + self._factors.momentum).sub_(before, alpha=self._factors.momentum)
        return orthogonal(ahead.view(self._matrix)).reshape(-1)

    @property
    def _matrix(self) -> tuple[int, int]:
        rows = self.shape[0] if len(self.shape) > 1 else 1
        return rows, self.numel // rows


@final
class _Updates(Signals):
    """The updates of a bucket: m and E before and after, gradients and decays of each, and factors of all."""

    def __init__(self, columns: tuple[Sequence[Any], ...], factors: tuple[float, ...]) -> None:
        super().__init__((), *columns)
        self._factors, self._like = factors, cast("_Updates | None", None)
        self.dtype, self.device = columns[4][0].dtype, columns[4][0].device

    def __getitem__(self, i: Any) -> Any:
        signal = super().__getitem__(i)
        if self._like is not None:
            signal.settle(self._like[i])
        return signal

    def settle(self, other: Signals) -> None:
        assert isinstance(other, _Updates)
        self._like = other

    def _make(self, i: int) -> Signal:
        before, m, waited, update, gradient, decay = (column[i] for column in self._columns)
        return _Update((before, m), (waited, update), gradient, _Factors(decay, *self._factors), None)

    def _tensors(self, some: slice, _: object = None) -> Sequence[Tensor]:
        return _computed([self[i] for i in numbers(some)])


def _computed(signals: Sequence[_Update]) -> list[Tensor]:
    """Return the vectors. A GPU computes all m together, and O of matrices of one shape."""
    if on_host(signals[0]._momenta[1]) or any(s._gradient is None or s._earlier or not s.numel for s in signals):
        return [signal.tensor() for signal in signals]
    before, m = (list(each) for each in zip(*(s._momenta for s in signals), strict=True))
    waited, updates = (list(each) for each in zip(*(s._updates for s in signals), strict=True))
    gradients = [s._gradient for s in signals if s._gradient is not None]
    momentum = [s._factors.momentum for s in signals]
    fading = torch._foreach_mul(before, momentum)
    torch._foreach_copy_(m, gradients)
    torch._foreach_mul_(m, [s._factors.of_gradient for s in signals])
    torch._foreach_add_(m, fading)
    ahead = list(torch._foreach_mul(m, [1 + each for each in momentum]))
    torch._foreach_sub_(ahead, fading)
    (moving,) = lasting([torch.stack(torch._foreach_norm(gradients, math.inf)) != 0])
    moves = moving.unbind()
    for signal, moved in zip(signals, moves, strict=True):
        signal._gradient, signal.computed, signal.moves = None, True, moved
    by_shape: dict[tuple[int, int], list[int]] = {}
    for i, signal in enumerate(signals):
        by_shape.setdefault(signal._matrix, []).append(i)
    for alike in by_shape.values():
        found = orthogonal(torch.stack([ahead[i].view(signals[i]._matrix) for i in alike]))
        these = torch.stack([moves[i] for i in alike])[:, None, None]
        for i, update in zip(alike, torch.where(these, found, 0).contiguous(), strict=True):
            ahead[i] = update.view(-1)
    torch._foreach_copy_(updates, waited)
    torch._foreach_mul_(updates, [s._factors.decay for s in signals])
    torch._foreach_mul_(ahead, [s._factors.of_update for s in signals])
    torch._foreach_add_(updates, ahead)
    return updates
