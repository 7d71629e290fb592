"""What an activation goes through between two stages: x → mask ⊙ x on the way there, g → mask ⊙ g on the way back."""

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor, nn

from thinwire.codecs.base import check_density
from thinwire.codecs.thresholding import filled
from thinwire.formats import Format
from thinwire.kernels import gather
from thinwire.payloads import Dense, Narrow, Sparse, Words, narrowed
from thinwire.payloads.wire import DTYPE_CODES
from thinwire.pipeline.crossing import pack, unpack
from thinwire.pipeline.tally import Choice, Report, Tally


class Boundary(nn.Module, ABC):
    """Keeps about the share `density` of largest magnitudes of each row; only their gradients return.

    A row is what `flatten(start_dim)` leaves as the last dimension: by default the features of one sample or token;
    with start_dim=1 a whole sample, as images want it. `values` narrows the numbers on the way there: None leaves them
    in the activation's own dtype, or another dtype, or a `formats.Format`. Gradients come back in as many bytes: in
    their own dtype where that fits, else as float32 rounded to the bits there are. As a module in an unsplit model it
    does to activations and gradients exactly what the crossing does.
    """

    density: float
    values: Narrow
    start_dim: int

    def __init__(self, density: float, values: Narrow, start_dim: int) -> None:
        super().__init__()
        check_density(density)
        if not (values is None or isinstance(values, Format) or values in DTYPE_CODES):
            known = ", ".join(map(str, DTYPE_CODES))
            raise TypeError(f"values is {values!r}; expected None, {known} or one of thinwire.formats")
        self.density, self.values, self.start_dim = density, values, start_dim
        self._tally, self._crossings = Tally(), 0

    @abstractmethod
    def count(self, rows: int, width: int) -> int | None:
        """Return how many elements of a matrix travel, padding included; None for all of them, which none need name."""

    @abstractmethod
    def choose(self, matrix: Tensor) -> Choice:
        """Choose `count` elements of a matrix (rows, width) that is not empty, one row per sample."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` as it arrives on the other side, of the same shape and dtype."""
        return self.receive(*self.send(x))

    @final
    def send(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what travels in place of floating-point `x`: float32 words (n), and a frame without elements.

        The frame, of shape (*x.shape, 0), tells the receiver the shape and the dtype. n depends on these alone.
        """
        if not x.is_floating_point():
            raise TypeError(f"an activation is floating-point; got {x.dtype}")
        layout, width = self._layout(x.shape, x.dtype), self._width(x.shape)
        self._crossings += 1
        return pack(x, layout, lambda flat: self._chosen(flat, width))

    @final
    def receive(self, words: Tensor, frame: Tensor) -> Tensor:
        """Return what was sent, zero where nothing was.

        Words may hold anything, as pipelines try shapes out on memory that nobody has written. Raises PayloadError
        where there are more or fewer than this boundary sends for such a frame.
        """
        return unpack(words, frame, self._layout(frame.shape[:-1], frame.dtype))

    @final
    def nbytes(self, shape: torch.Size, dtype: torch.dtype = torch.float32) -> int:
        """Return how many bytes cross for an activation of this shape, in each direction: those of the words."""
        return 4 * self._layout(shape, dtype).length

    @final
    def report(self) -> Report:
        """Return the means over what was packed since the last report."""
        tally, self._tally = self._tally, Tally()
        return tally.report(self.density)

    def _chosen(self, flat: Tensor, width: int) -> tuple[Sparse | Dense, Tensor | None]:
        if not flat.numel():
            return Dense(values=flat), None
        choice = self.choose(flat.view(-1, width))
        taken = flat if choice.kept is None else gather(flat, choice.kept)
        values, coded = narrowed(taken, self.values, flat.dtype, self._crossings)
        self._tally.add(flat.numel(), values, choice)
        if choice.kept is None:
            return Dense(values=values, coded=coded), None
        indices = filled(choice.kept, flat.numel())
        return Sparse(indices=indices, values=values, numel=flat.numel(), coded=coded), choice.kept

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
