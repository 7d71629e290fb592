"""Fourier coefficients of a vector. Ranks' coefficients are summed, and the sum is transformed back once."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import ClassVar, Self, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.payloads import wire
from thinwire.payloads.base import Regional, Regions, Scratch, real
from thinwire.payloads.blocks import Blocks


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Spectral(Regional):
    """Real Fourier coefficients of blocks of elements.

    Args:
        coefficients: Pairs (real, imaginary).
        block: Elements of a block.
        numel: Elements of the whole vector.
        regions: (offset, length) of each part that it covers; by default one, the whole vector.
    """

    masks: ClassVar[bool] = False

    coefficients: Blocks
    block: int
    numel: int
    regions: Regions = field(default=())

    @property
    def values(self) -> Tensor:  # type: ignore[override]  # those of the coefficients
        """The pairs."""
        return self.coefficients.values

    transformed: ClassVar[bool] = True
    summable: ClassVar[bool] = False  # never: which frequencies travel differs by rank

    @property
    @override
    def nbytes(self) -> int:
        return wire.HEADER_BYTES + self.coefficients.nbytes

    @override
    def counts(self) -> list[int]:
        return self.coefficients.counts()

    @override
    def carried(self) -> int:
        return self.coefficients.carried()

    @override
    def with_values(self, values: Tensor) -> Self:
        return replace(self, coefficients=self.coefficients.with_values(values))

    @override
    def to_buffer(self) -> Tensor:
        return wire.pack(self._head(), self.coefficients.to_buffer())

    @classmethod
    def from_buffer(cls, buffer: Tensor) -> "Spectral":
        """Return what `to_buffer` wrote, as one region.

        Raises:
            PayloadError: If it is malformed.
        """
        head = wire.parse(buffer, wire.SPECTRAL)
        coefficients = Blocks.from_buffer(buffer[wire.HEADER_BYTES :])
        found, expected = (coefficients.width, coefficients.key_space), (2, spectrum_size(head.numel, head.count))
        if not head.count or head.dtype != torch.float32 or found != expected:
            raise PayloadError(f"a spectrum of (width, coefficients) {found}; expected {expected} of float32")
        return cls(coefficients=coefficients, block=head.count, numel=head.numel)

    @override
    def from_buffers(self, buffers: Tensor) -> Self:
        wire.check_buffers(buffers, self._head(), self.coefficients.nbytes)
        return replace(self, coefficients=self.coefficients.from_buffers(buffers[:, wire.HEADER_BYTES :]))

    # the whole spectrum and its inverse transform, beside what arrives
    scratch: ClassVar[Scratch] = Scratch(element=11.5, arriving=35)

    @classmethod
    @override
    def assemble(cls, parts: Sequence[Self], offsets: Sequence[int], numel: int) -> Self:
        sizes = [part.coefficients.numel for part in parts]
        *starts, end = accumulate(sizes, initial=0)
        spectrum = Blocks.assemble([part.coefficients for part in parts], starts, end)
        regions = tuple((offset, part.numel) for offset, part in zip(offsets, parts, strict=True))
        return cls(coefficients=spectrum, block=parts[0].block, numel=numel, regions=regions)

    @override
    def vectors(self) -> list[Tensor]:
        spectrum = self.coefficients.dense()
        spectra = spectrum.split([length for _, length in self.coefficients.regions])
        return [inverse(part, length, self.block) for (_, length), part in zip(self.regions, spectra, strict=True)]

    def _head(self) -> bytes:
        return wire.Header(wire.SPECTRAL, torch.float32, self.block, self.numel).pack()


def forward(x: Tensor, width: int) -> Tensor:
    """Return the orthonormal real FFT of every `width` elements of flat float `x`, zero-padded: (coefficients, 2)."""
    if not x.numel():
        return x.view(0, 2)
    missing = -x.numel() % width
    padded = torch.nn.functional.pad(x, (0, missing)) if missing else x
    return torch.view_as_real(torch.fft.rfft(padded.view(-1, width), norm="ortho")).reshape(-1, 2)


def inverse(pairs: Tensor, numel: int, block: int) -> Tensor:
    """Return the first `numel` elements of the inverse of `forward`. Every CPU gives the same bits."""
    if not numel:
        return pairs.view(-1)
    wide = pairs.view(-1, 2).to(real(pairs.dtype)).contiguous()
    return kernels.inverse_fourier(wide, numel, min(block, numel))


def spectrum_size(numel: int, block: int) -> int:
    """Return how many coefficients `forward` gives for `numel` elements."""
    width = max(1, min(block, numel))
    return -(-numel // width) * (width // 2 + 1)
