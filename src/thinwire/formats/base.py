"""What a format does: it takes numbers and returns scales and codes of a few bits."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Annotated, final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.checked import Range
from thinwire.kernels import Groups
from thinwire.kernels.memory import constant, empty, kept, sent
from thinwire.kernels.parts import Parts, together

GroupSize = Annotated[int, Range("at least 1 value per scale", least=1, most=2**31 - 1)] | None
"""How many consecutive numbers share a scale; None for one scale in all."""
Bits = Annotated[int, Range("2 to 15 bits", least=2, most=15)]


class Format(ABC):
    """How one number travels: as one of 2^bits codes, times a scale.

    Frozen, hashable and stateless. If a group contains a NaN or an infinity (or a float64 beyond float32's range), its
    scale is NaN, and all of the group decodes to NaN.

    Args:
        bits: Bits of a code.
        group_size: Consecutive numbers that share a scale; with None a whole vector does.
    """

    bits: int
    group_size: GroupSize

    @abstractmethod
    def encode_each(
        self, xs: Parts, *, seeds: Sequence[int], factor: float = 1.0, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Encode several vectors, each as `encode` does.

        Args:
            xs: The vectors, of one flat tensor.
            seeds: One for each.
            factor: What each vector is multiplied by first.
            out: Where the numbers go that the codes stand for, as `decode_into` writes them.

        Returns:
            Codes and scales, as of `encode`, of one vector after another.
        """

    @abstractmethod
    def table(self) -> Tensor:
        """Return what each code stands for at scale 1: float32 (2^bits), NaN for codes that are never sent."""

    @final
    def encode(self, x: Tensor, *, seed: int) -> tuple[Tensor, Tensor]:
        """Encode a flat floating-point tensor.

        Args:
            x: The tensor (n).
            seed: For stochastic rounding.

        Returns:
            Codes, `code_dtype` (n), and scales, float32 (scale_count(n)).
        """
        return self.encode_each(together([x.detach().reshape(-1).contiguous()]), seeds=[seed])

    @final
    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the numbers of codes (n) and scales (scale_count(n)) as float32 (n); see `decode_into`."""
        out = empty(codes.numel(), torch.float32, codes.device)
        self.decode_into(out, codes, scales)
        return out

    @final
    def decode_into(self, out: Tensor, codes: Tensor, scales: Tensor, runs: tuple[int, ...] = ()) -> None:
        """Write the numbers of codes (n) and scales (scale_count(n)) to `out`.

        Args:
            out: Any floating-point dtype (n). Numbers beyond a narrower dtype's range become infinite.
            codes: Of `code_dtype` (n).
            scales: float32 (scale_count(n)).
            runs: The lengths of several vectors, one after another; by default it is one.

        Raises:
            ValueError: If the lengths do not match.
        """
        groups = self.groups(runs or (codes.numel(),))
        numel, count = codes.numel(), sum(groups.counts)
        if out.numel() != numel or scales.numel() != count:
            raise ValueError(
                f"{numel} codes, {scales.numel()} scales and room for {out.numel()} numbers; "
                f"expected {count} scales and room for {numel}"
            )
        kernels.table_decode(out, codes, self.on(codes.device), scales, groups)

    @final
    def on(self, device: torch.device) -> Tensor:
        """Return the table on a device."""
        return _table(self, device)

    @final
    def groups(self, runs: tuple[int, ...]) -> Groups:
        """Return how vectors of lengths `runs`, one after another, are divided into groups that share a scale."""
        return _groups(runs, self.group_size)

    @final
    @property
    def code_dtype(self) -> torch.dtype:
        """The dtype of codes: uint8 for up to 8 bits, int16 for more."""
        return torch.uint8 if self.bits <= 8 else torch.int16

    @final
    def width(self, numel: int) -> int:
        """Return how many of `numel` values share a scale."""
        return self.group_size or max(1, numel)

    @final
    def scale_count(self, numel: int) -> int:
        """Return how many scales `numel` values have."""
        return -(-numel // self.width(numel))


# A format is a value, so its table need be computed only once.
@kept
def _table(form: Format, device: torch.device) -> Tensor:
    return sent(form.table(), device)


@lru_cache(maxsize=1024)  # layouts stay the same from step to step
def _groups(runs: tuple[int, ...], size: int | None) -> Groups:
    return Groups(runs, size)


def flat32(xs: Parts, factor: float = 1.0) -> Tensor:
    """Return vectors times a factor as one, float32. A float64 beyond that range becomes infinite."""
    x = kernels.joined(xs, torch.float32)
    return x if factor == 1 else x * factor


@kept  # layouts stay the same from step to step
def widths(groups: Groups, device: torch.device) -> Tensor:
    """Return the number of elements of each group, float64."""
    found = torch.full((sum(groups.counts),), groups.size or 0, dtype=torch.float64, device=device)
    ends = accumulate(groups.counts)
    parts = [part for part in zip(groups.runs, groups.widths, groups.counts, ends, strict=True) if part[0]]
    places = constant(tuple(end - 1 for *_, end in parts), torch.int64, device)
    sizes = constant(tuple(run - (count - 1) * width for run, width, count, _ in parts), torch.float64, device)
    return found.index_copy_(0, places, sizes)
