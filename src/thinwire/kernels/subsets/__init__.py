"""Sorted positions as numbers of a few bits, and back."""

from thinwire.kernels.dispatch import Kernel
from thinwire.kernels.subsets import cpu, reference
from thinwire.kernels.subsets.numbering import Numbering

__all__ = ["Numbering", "subsets_decode", "subsets_encode"]

subsets_encode = Kernel(reference.subsets_encode, cpu.subsets_encode, by="positions", any_dtype=True)
subsets_decode = Kernel(reference.subsets_decode, cpu.subsets_decode, by="rows", any_dtype=True)
