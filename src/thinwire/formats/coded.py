"""Encoded numbers: codes, their scales, and the format that decodes them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self, final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.formats.base import Format
from thinwire.kernels.memory import empty
from thinwire.kernels.parts import Parts, together


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Coded:
    """Several vectors, one after another, encoded in one format.

    Args:
        codes: Of the format's `code_dtype` (n).
        scales: float32. Each run begins a new group.
        runs: The vectors' lengths; by default it is one vector.
        format: What decodes them.

    Raises:
        PayloadError: If codes, scales and runs do not match.
    """

    codes: Tensor
    scales: Tensor
    runs: tuple[int, ...] = field(default=())
    format: Format

    def __post_init__(self) -> None:
        object.__setattr__(self, "runs", self.runs or (self.codes.numel(),))
        count, dtype = sum(self.runs), self.format.code_dtype
        if self.codes.dtype != dtype or self.codes.numel() != count:
            raise PayloadError(f"{self.codes.numel()} {self.codes.dtype} codes; expected {count} of {dtype}")
        groups = sum(self.format.groups(self.runs).counts)
        if self.scales.dtype != torch.float32 or self.scales.numel() != groups:
            raise PayloadError(f"{self.scales.numel()} {self.scales.dtype} scales; expected {groups} of float32")

    @classmethod
    def of(cls, x: Tensor, format: Format, *, seed: int = 0) -> Self:
        """Encode a tensor of any shape as a single run.

        Args:
            x: The tensor.
            format: What encodes it.
            seed: For stochastic rounding.

        Returns:
            Codes and scales for all of it.
        """
        return cls.of_each(together([x.detach().reshape(-1).contiguous()]), format, seeds=[seed])

    @classmethod
    def of_each(
        cls, xs: Parts, format: Format, *, seeds: Sequence[int], out: Tensor | None = None, factor: float = 1.0
    ) -> Self:
        """Encode several vectors, each as a run of its own.

        Args:
            xs: The vectors, of one flat tensor.
            format: What encodes them.
            seeds: For stochastic rounding, one for each.
            out: Where what `values` returns is written right away (n).
            factor: What the vectors are multiplied by first.

        Returns:
            Codes and scales for all of them.
        """
        codes, scales = format.encode_each(xs, seeds=seeds, factor=factor, out=out)
        return cls(codes=codes, scales=scales, runs=xs.cut.lengths, format=format)

    def packed(self) -> Tensor:
        """Return the codes as uint8 (⌈n · bits / 8⌉), least significant bit first, padded with zeros."""
        return kernels.pack_bits(self.codes, self.format.bits)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers (n) in `dtype`. Those beyond the range of a narrower dtype become infinite."""
        out = empty(self.codes.numel(), dtype, self.codes.device)
        self.format.decode_into(out, self.codes, self.scales, self.runs)
        return out

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Return parts of the same format as one, one after another.

        Raises:
            ValueError: If their formats differ.
        """
        if any(part.format != parts[0].format for part in parts):
            raise ValueError(
                f"formats are {', '.join(str(part.format) for part in parts)}; expected the same for all parts"
            )
        return cls(
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            runs=tuple(run for part in parts for run in part.runs),
            format=parts[0].format,
        )
