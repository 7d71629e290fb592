"""Count sketches, as the S2 Reducer sends them."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch

from thinwire import kernels
from thinwire.checked import Positive, Range, checked
from thinwire.codecs.base import Codec
from thinwire.payloads import Sketch, SketchTable
from thinwire.signals import Signal

Rows = Annotated[int, Range("1 to 63 rows", least=1, most=63)]


@final
@checked
@dataclass(frozen=True, kw_only=True)
class CountSketch(Codec):
    """Send a table that ranks can sum: S[j, h_j(i)] = Σ s_j(i) · x[i] (Charikar et al. 2002; Ge et al. 2021, §3.1).

    The seed gives the hashes h and the signs s. An estimate is the median of the rows, or the mean of the two middle
    ones; it is unbiased over seeds. With one row of c cells its variance is about ‖x‖²/c.

    Args:
        rows: Rows of the table, each of ratio · d / rows cells.
        ratio: The paper's λ: cells divided by the number of elements, zeros included. Zeros change nothing.
    """

    rows: Rows = 3
    ratio: Positive = 0.5
    shared_seed: ClassVar[bool] = True

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Sketch:
        """Return the table, in float32 or wider."""
        x = signal.tensor()
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        table = SketchTable(self.rows, max(1, round(self.ratio * x.numel() / self.rows)), seed)
        cells = kernels.sketch_insert(x, *table)
        return Sketch(values=cells.view(-1), tables=(table,), numel=signal.numel)
