"""Fourier coefficients of a vector. Ranks' coefficients are summed, and the sum is transformed back once."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.payloads import wire
from thinwire.payloads.base import Payload, Regions, regions_are_finite
from thinwire.payloads.blocks import Blocks
from thinwire.payloads.scratch import Scratch


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Spectral(Payload):
    """Real Fourier coefficients of blocks of elements.

    Args:
        coefficients: Pairs (real, imaginary).
        block: Elements of a block.
    """

    masks: ClassVar[bool] = False

    coefficients: Blocks
    block: int
    numel: int
    regions: Regions = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "regions", self.regions or ((0, self.numel),))

    @property
    def values(self) -> Tensor:  # type: ignore[override]  # those of the coefficients
        """The pairs."""
        return self.coefficients.values

    summable: ClassVar[bool] = False  # never: which frequencies travel differs by rank

    @property
    def nbytes(self) -> int:
        """Length of `to_buffer()` in bytes."""
        return wire.HEADER_BYTES + self.coefficients.nbytes

    def counts(self) -> list[int]:
        """Return how many numbers travel for each region, two per frequency."""
        return self.coefficients.counts()

    def carried(self) -> int:
        """Return how many numbers travel."""
        return self.coefficients.carried()

    def with_values(self, values: Tensor) -> Self:
        """Return the same frequencies with other values."""
        return replace(self, coefficients=self.coefficients.with_values(values))

    def to_buffer(self) -> Tensor:
        """Return header and coefficients as uint8."""
        return torch.cat([self._head(), self.coefficients.to_buffer()])

    @classmethod
    def from_buffer(cls, buffer: Tensor) -> "Spectral":
        """Read what `to_buffer` wrote, as one region, or raise PayloadError if it is malformed."""
        head = wire.parse(buffer, wire.SPECTRAL)
        wire.check_coding(head.coding, (wire.NUMBERS,))
        coefficients = Blocks.from_buffer(buffer[wire.HEADER_BYTES :])
        found, expected = (coefficients.width, coefficients.key_space), (2, spectrum_size(head.numel, head.count))
        if not head.count or head.dtype != torch.float32 or found != expected:
            raise PayloadError(f"a spectrum of (width, coefficients) {found}; expected {expected} of float32")
        return cls(coefficients=coefficients, block=head.count, numel=head.numel)

    def from_buffers(self, buffers: Tensor) -> Self:
        """Return the sum of the spectra of all ranks."""
        wire.check_buffers(buffers, self._head(), self.nbytes)
        return replace(self, coefficients=self.coefficients.from_buffers(buffers[:, wire.HEADER_BYTES :]))

    def dense(self) -> Tensor:
        """Return the vector in float32 or wider: the transform of 16-bit values does not fit in 16 bits."""
        out = self.values.new_zeros(self.numel, dtype=_real(self.values.dtype))
        self.write(out)
        return out

    # the whole spectrum and its inverse transform, beside what arrives
    scratch: ClassVar[Scratch] = Scratch(element=11.5, arriving=35)

    def write(self, out: Tensor) -> None:
        """Overwrite the regions of `out` with the inverse transform."""
        for (offset, length), x in zip(self.regions, self._inverse(), strict=True):
            out[offset : offset + length].copy_(x)

    def subtract_from(self, parts: Sequence[Tensor]) -> None:
        """Subtract the inverse transform of each region from its part."""
        for part, x in zip(parts, self._inverse(), strict=True):
            part.sub_(x)

    def mask(self, parts: Sequence[Tensor | None]) -> None:
        """Do nothing: no element was picked out."""

    def is_finite(self, out: Tensor) -> bool:
        """Whether the regions of `out` are finite."""
        return regions_are_finite(out, self.regions)

    @classmethod
    def assemble(cls, parts: Sequence[Self], offsets: Sequence[int], numel: int) -> Self:
        """Place vectors side by side."""
        sizes = [part.coefficients.numel for part in parts]
        *starts, end = accumulate(sizes, initial=0)
        spectrum = Blocks.assemble([part.coefficients for part in parts], starts, end)
        regions = tuple((offset, part.numel) for offset, part in zip(offsets, parts, strict=True))
        return cls(coefficients=spectrum, block=parts[0].block, numel=numel, regions=regions)

    @classmethod
    def concat(cls, payloads: Sequence[Self]) -> Self:
        """Return the sum of payloads over the same spectrum."""
        return replace(payloads[0], coefficients=Blocks.concat([p.coefficients for p in payloads]))

    def _inverse(self) -> list[Tensor]:
        spectrum = self.coefficients.dense()
        spectra = spectrum.split([length for _, length in self.coefficients.regions])
        return [inverse(part, length, self.block) for (_, length), part in zip(self.regions, spectra, strict=True)]

    def _head(self) -> Tensor:
        return wire.Header(wire.SPECTRAL, torch.float32, self.block, self.numel).pack(self.values.device)


def forward(x: Tensor, width: int) -> Tensor:
    """Return the orthonormal real FFT of every `width` elements of flat float `x`, as pairs: (coefficients, 2).

    The last block is padded with zeros.
    """
    if not x.numel():
        return x.view(0, 2)
    missing = -x.numel() % width
    padded = torch.nn.functional.pad(x, (0, missing)) if missing else x
    return torch.view_as_real(torch.fft.rfft(padded.view(-1, width), norm="ortho")).reshape(-1, 2)


def inverse(pairs: Tensor, numel: int, block: int) -> Tensor:
    """Return the first `numel` elements of the inverse of `forward`. Every CPU gives the same bits."""
    if not numel:
        return pairs.view(-1)
    wide = pairs.view(-1, 2).to(_real(pairs.dtype)).contiguous()
    found = kernels.inverse_fourier(wide, numel, min(block, numel))
    return found


def spectrum_size(numel: int, block: int) -> int:
    """Return how many coefficients `forward` gives for `numel` elements."""
    width = max(1, min(block, numel))
    return -(-numel // width) * (width // 2 + 1)


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
