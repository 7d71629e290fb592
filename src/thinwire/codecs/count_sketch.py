"""Count sketches (Charikar et al. 2002), as the S2 reducer sends them (Ge et al. 2021, §3.1)."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from thinwire import kernels
from thinwire.codecs.base import Codec
from thinwire.payloads import Sketch, Table
from thinwire.signals import Signal


@final
@dataclass(frozen=True, kw_only=True)
class CountSketch(Codec):
    """Send S[j, h_j(i)] = Σ s_j(i) · x[i], `rows` rows j of ratio · d / rows buckets; h and s are drawn by the seed.

    `ratio` is the paper's λ: cells over elements, zeros included. Zeros change nothing. Unbiased over seeds: an
    estimate is the median of the rows, of two middle ones the mean. At one row its variance is about ‖x‖²/buckets.
    """

    rows: int = 3
    ratio: float = 0.5
    shared_seed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (1 <= self.rows <= 63 and 0 < self.ratio < float("inf")):
            raise ValueError(f"rows is {self.rows}, ratio {self.ratio}; expected 1 to 63 rows and a ratio above 0")

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Sketch:
        """Return the table, in float32 or wider."""
        x = signal.tensor()
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        table = Table(self.rows, max(1, round(self.ratio * x.numel() / self.rows)), seed)
        cells = kernels.sketch_insert(x, *table)
        return Sketch(values=cells.view(-1), tables=(table,), numel=signal.numel)
