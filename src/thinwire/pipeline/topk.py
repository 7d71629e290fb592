"""The largest of each sample, exactly (Gupta et al. 2021, Algorithm 2)."""

from typing import final

from torch import Tensor

from thinwire.codecs.base import kept
from thinwire.codecs.row_topk import largest_in_rows
from thinwire.payloads import Narrow
from thinwire.pipeline.boundary import Boundary
from thinwire.pipeline.tally import Choice


@final
class TopKBoundary(Boundary):
    """Keeps k = round(density · width) of each row: the k largest magnitudes, zeros among them where a row has fewer.

    Of equal magnitudes the first are kept. At density 1 everything travels, unchanged unless `values` narrows it.
    """

    def __init__(self, density: float, *, values: Narrow = None, start_dim: int = -1) -> None:
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
