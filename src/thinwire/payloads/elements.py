"""What a vector of single elements does, however they travel."""

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.payloads.keyed import Keyed


class Elements(Keyed):
    """Values at int32 `indices`; elements of the spans that are not named are zero. `runs` are as in `Sparse`."""

    indices: Tensor
    runs: tuple[int, ...]
    agreed: bool

    @property
    def summable(self) -> bool:
        """Whether all ranks agreed on the indices beforehand, and values travel as such."""
        return self.agreed and self.coded is None

    @property
    def keys(self) -> Tensor:  # type: ignore[override]  # a table of one column
        """The indices."""
        return self.indices

    @property
    def rows(self) -> Tensor:
        """The values, one to a row."""
        return self.values[:, None]

    @property
    def key_space(self) -> int:
        """One row for each element."""
        return self.numel

    @property
    def most_rows(self) -> int:
        """How many elements the spans have."""
        return sum(length for _, length in self.spans)

    def every_key(self) -> Tensor:
        """Return all indices within the spans."""
        device = self.values.device
        return torch.cat([torch.arange(o, o + n, dtype=torch.int32, device=device) for o, n in self.spans])

    def span_counts(self) -> list[int]:
        """Return how many elements lie in each span."""
        return list(self.runs)

    def write(self, out: Tensor) -> None:
        """Set the spans of `out` to zero and add the values."""
        kernels.scatter(out, self.spans, self.indices, self.values, self.runs)

    def subtract_from(self, x: Tensor) -> None:
        """Subtract the values from `x`."""
        kernels.scatter_add(x, self.indices, self.values, self.runs, -1.0)

    def mask(self, x: Tensor) -> None:
        """Set `x` to zero at every index that carries a value other than 0."""
        kernels.mask(x, self.indices, self.values)

    def is_finite(self, out: Tensor) -> bool:
        """Whether `out` is finite at every index."""
        return bool(out.index_select(0, self.indices).isfinite().all())
