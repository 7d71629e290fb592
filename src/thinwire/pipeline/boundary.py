"""Boundaries between stages: x → mask ⊙ x forward, g → mask ⊙ g backward. Each side undoes what the other packs."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as untraced
from torch.autograd.function import once_differentiable

from thinwire import trace
from thinwire.checked import Part, Range, Share, Whole, checked
from thinwire.codecs.base import kept
from thinwire.codecs.row_topk import largest_in_rows
from thinwire.codecs.thresholding import filled
from thinwire.kernels import gather
from thinwire.payloads import Dense, Narrow, Sparse, Words, narrowed
from thinwire.trace import Listener
from thinwire.waits import refuse_captured


class Choice(NamedTuple):
    """What travels: flat indices (int32, ascending, −1 for padding), or None for all; and the thresholds used."""

    kept: Tensor | None
    thresholds: Tensor


Mean = Annotated[float, Range("a number of at least 0, or NaN if nothing was sent", least=0, most=math.inf, nan=True)]


@checked
class Report(NamedTuple):
    """Means over what a boundary sent; NaN if it has sent nothing.

    Args:
        wanted, sent, kept, nonzero: Shares of the activations' elements that the density asks for, that were sent
            (padding included), that the threshold kept, and that were not zero.
        threshold: The mean threshold.
    """

    wanted: Part
    sent: Mean
    kept: Mean
    nonzero: Mean
    threshold: Mean


@checked
class Boundary(nn.Module, ABC):
    """Keeps the largest magnitudes of each row, about `density` of it; only their gradients come back.

    Also works in a model that is not split. It then does exactly what the split model does to activations and
    gradients.

    Args:
        density: The share to keep.
        values: Narrows the numbers that travel: None keeps the activation's dtype. Gradients come back in the same
            number of bytes: in their own dtype if that fits, else as rounded float32.
        start_dim: A row is what `flatten(start_dim)` leaves as the last dimension: by default the features of one
            sample or token, and with 1 a whole sample, which suits images.
    """

    density: float
    values: Narrow
    start_dim: int

    def __init__(self, density: Share, values: Narrow, start_dim: Whole) -> None:
        super().__init__()
        self.density, self.values, self.start_dim = density, values, start_dim
        self._sums, self._crossings = dict[str, Any](), 0
        self.listeners: tuple[Listener, ...] = ()

    @abstractmethod
    def count(self, rows: int, width: int) -> int | None:
        """Return how many elements of a matrix of `rows` × `width` travel, padding included.

        None means all, sent without indices.
        """

    @abstractmethod
    def choose(self, matrix: Tensor) -> Choice:
        """Choose what travels.

        Args:
            matrix: The activation (rows, width), not empty, with a row per sample.

        Returns:
            The `count` elements, and the threshold of each row, or one of all.
        """

    @untraced  # or a model that is compiled would compile what chooses elements, anew at every crossing
    def forward(self, x: Tensor) -> Tensor:
        """Return `x` as it arrives on the other side, of the same shape and dtype."""
        return self.receive(*self.send(x))

    @final
    def send(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what to send in place of `x`.

        Returns:
            float32 words (n), and an empty frame `(*x.shape, 0)`, which tells the receiver the shape and dtype; n
            depends on nothing else.

        Raises:
            TypeError: If `x` is not floating-point.
            RuntimeError: Within the capture of a CUDA graph.
        """
        refuse_captured("an activation is sent", "leave out this stage, or remove() the handle")
        if not x.is_floating_point():
            raise TypeError(f"an activation is floating-point; got {x.dtype}")
        layout = self._layout(x.shape, x.dtype)
        self._crossings += 1
        words, frame = _Pack.apply(x, layout, self)
        return words, frame

    @final
    def receive(self, words: Tensor, frame: Tensor) -> Tensor:
        """Return what was sent, and zero elsewhere.

        It accepts any words, because pipelines infer shapes on uninitialised memory.

        Raises:
            PayloadError: If their number is not what this boundary sends for such a frame.
        """
        layout = self._layout(frame.shape[:-1], frame.dtype)
        flat: Tensor = _Unpack.apply(words, frame, layout, self.listeners)
        return flat.view(frame.shape[:-1])

    @final
    def nbytes(self, shape: torch.Size, dtype: torch.dtype = torch.float32) -> int:
        """Return the bytes of the words that cross, each way, for an activation of this shape and dtype."""
        return 4 * self._layout(shape, dtype).length

    @final
    def report(self) -> Report:
        """Return means over everything sent since the last report."""
        sums, self._sums = self._sums, {}
        if not sums:
            return Report(self.density, *[math.nan] * 4)
        sent, kept, nonzero = (float(sums[name]) / sums["elements"] for name in ("sent", "kept", "nonzero"))
        return Report(self.density, sent, kept, nonzero, float(sums["threshold"]) / sums["crossings"])

    def _chosen(self, flat: Tensor, width: int) -> tuple[Sparse | Dense, Tensor | None]:
        """Return an activation's payload, and which elements get a gradient: a `Choice.kept`."""
        if not flat.numel():
            return Dense(values=flat), None
        choice = self.choose(flat.view(-1, width))
        taken = flat if choice.kept is None else gather(flat, choice.kept)
        values, coded = narrowed(taken, self.values, flat.dtype, self._crossings)
        self._count(flat.numel(), values, choice)
        if choice.kept is None:
            return Dense(values=values, coded=coded), None
        indices = filled(choice.kept, flat.numel())
        return Sparse(indices=indices, values=values, numel=flat.numel(), coded=coded), choice.kept

    def _count(self, elements: int, values: Tensor, choice: Choice) -> None:
        """Add to the report's sums. They stay on the device, so counting does not make the host wait."""
        kept = values.numel() if choice.kept is None else (choice.kept >= 0).sum()
        found = {"crossings": 1, "elements": elements, "sent": values.numel(), "kept": kept}
        found |= {"nonzero": values.count_nonzero(), "threshold": choice.thresholds.mean(dtype=torch.float32)}
        self._sums = {name: self._sums.get(name, 0) + amount for name, amount in found.items()}
        for listener in self.listeners:
            listener.add("elements", elements)
            listener.add("values", kept)

    def _layout(self, shape: torch.Size, dtype: torch.dtype) -> Words:
        width, numel = self._width(shape), math.prod(shape)
        named = self.count(numel // width if width else 0, width)
        return Words(named=named, numel=numel, dtype=dtype, values=self.values)

    def _width(self, shape: torch.Size) -> int:
        if not shape:
            return 1
        if not -len(shape) <= self.start_dim < len(shape):
            raise ValueError(
                f"start_dim is {self.start_dim}; an activation of shape {tuple(shape)} has no such dimension"
            )
        return math.prod(shape[self.start_dim :])


@final
@checked
class TopKBoundary(Boundary):
    """Keeps the k = round(density · width) largest magnitudes of each row, exactly (Gupta et al. 2021, Algorithm 2).

    A row with fewer than k nonzero elements sends some zeros. Of equal magnitudes the first are kept. At density 1
    everything travels, unchanged unless `values` narrows it. Arguments are those of `Boundary`.
    """

    def __init__(self, density: Share, *, values: Narrow = None, start_dim: Whole = -1) -> None:
        super().__init__(density, values, start_dim)

    def count(self, rows: int, width: int) -> int | None:
        """Return k for each row, or None at k = width."""
        k = kept(self.density, width)
        return rows * k if k < width else None

    def choose(self, matrix: Tensor) -> Choice:
        """Choose k of each row; the thresholds are the rows' k-th largest magnitudes."""
        rows, width = matrix.shape
        if self.count(rows, width) is None:
            return Choice(None, matrix.abs().amin(1))
        flat = matrix.view(-1)
        picks = largest_in_rows(flat, width, self.density)
        return Choice(picks, flat.index_select(0, picks).view(rows, -1).abs().amin(1))


class _Pack(torch.autograd.Function):
    """The chosen elements of an activation as words, and an empty frame, which carries shape and dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Words, boundary: Boundary) -> tuple[Tensor, Tensor]:
        with trace.span("encode", *boundary.listeners):
            payload, kept = boundary._chosen(x.contiguous().view(-1), boundary._width(x.shape))
            words = layout.write(payload)
        ctx.layout, ctx.shape, ctx.listeners = layout, x.shape, boundary.listeners
        ctx.save_for_backward(kept)
        return words, x.new_empty((*x.shape, 0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, words: Tensor, frame: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        with trace.span("decode", *ctx.listeners):
            values, numel = ctx.layout.read_gradient(words), ctx.layout.numel
            if kept is None:
                gradient = values.clone()
            else:  # values for padding fall off the end
                places = kept.masked_fill(kept < 0, numel).long()
                gradient = values.new_zeros(numel + 1).index_copy_(0, places, values)[:numel]
        return gradient.view(ctx.shape), None, None


class _Unpack(torch.autograd.Function):
    """Undoes `_Pack`: the chosen elements in their places, flat, and zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, words: Tensor, frame: Tensor, layout: Words, listeners: Sequence[Listener]) -> Tensor:
        with trace.span("decode", *listeners):
            payload = layout.read(words)
            x = payload.dense()
        ctx.layout, ctx.frame, ctx.listeners = layout, frame.shape, listeners
        ctx.save_for_backward(payload.indices if isinstance(payload, Sparse) else None)
        return x  # flat: a view made in here could not be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        with trace.span("encode", *ctx.listeners):
            flat = gradient.contiguous()
            words = ctx.layout.write_gradient(flat if indices is None else flat.index_select(0, indices))
        # Older pipelines want a gradient for everything they sent. So the frame gets one, and it is empty too.
        return words, gradient.new_empty(ctx.frame), None, None
