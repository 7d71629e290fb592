"""Inverse Fourier transforms with the same bits on every processor.

A GPU uses its own library. That chooses its order of additions, which is the same on all GPUs of one kind. It expects
0 where the spectrum of a real vector has no imaginary part. Encoders send 0 there, and the others overwrite what is
there.
"""

import torch
from torch import Tensor

from thinwire.kernels.dispatch import Kernel
from thinwire.kernels.fourier import cpu, reference

__all__ = ["inverse_fourier"]


def _on_gpu(pairs: Tensor, numel: int, width: int) -> Tensor:
    spectra = torch.view_as_complex(pairs.view(-1, width // 2 + 1, 2))
    return torch.fft.irfft(spectra, n=width, norm="ortho").view(-1)[:numel]


inverse_fourier = Kernel(reference.inverse_fourier, cpu.inverse_fourier, _on_gpu, by="pairs")
