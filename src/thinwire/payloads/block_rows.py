"""What a vector of whole blocks does, however they travel."""

from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from thinwire.payloads.keyed import Keyed
from thinwire.payloads.spans import block_elements
from thinwire.payloads.sparse import Sparse


class BlockRows(Keyed):
    """Block `keys[i]` (int32) of `width` elements is row i; blocks that are not named are zero. As in `Blocks`."""

    width: int
    runs: tuple[int, ...]

    @property
    def summable(self) -> bool:
        """Never: which blocks travel differs by rank."""
        return False

    @property
    def rows(self) -> Tensor:
        """The blocks, of shape (blocks, width)."""
        return self.values.view(-1, self.width)

    @property
    def key_space(self) -> int:
        """How many blocks there are."""
        return self._edges[-1]

    @property
    def most_rows(self) -> int:
        """How many blocks there are."""
        return self.key_space

    def every_key(self) -> Tensor:
        """Return the numbers of all blocks."""
        return torch.arange(self.key_space, dtype=torch.int32, device=self.keys.device)

    def span_counts(self) -> list[int]:
        """Return how many blocks lie in each span; keys must ascend."""
        edges = torch.tensor(self._edges, dtype=torch.int32, device=self.keys.device)
        return torch.searchsorted(self.keys, edges).diff().tolist()

    def elements(self) -> Sparse:
        """Return the same vector element by element."""
        places, inside = block_elements(self.keys, self._edges, self.spans, self.width)
        runs, values = tuple(run * self.width for run in self.runs), torch.where(inside, self.values, 0)
        ascending = len(self.runs) == 1
        return Sparse(indices=places, values=values, numel=self.numel, spans=self.spans, runs=runs, ascending=ascending)

    def write(self, out: Tensor) -> None:
        """Set the spans of `out` to zero and add the blocks."""
        self.elements().write(out)

    def subtract_from(self, x: Tensor) -> None:
        """Subtract the blocks from `x`."""
        self.elements().subtract_from(x)

    def mask(self, x: Tensor) -> None:
        """Set `x` to zero at every element sent that is not 0."""
        self.elements().mask(x)

    def is_finite(self, out: Tensor) -> bool:
        """Whether `out` is finite in every block."""
        return self.elements().is_finite(out)

    @cached_property
    def _edges(self) -> tuple[int, ...]:
        """The number of the first block of each span, and of all blocks."""
        return tuple(accumulate((-(-length // self.width) for _, length in self.spans), initial=0))
