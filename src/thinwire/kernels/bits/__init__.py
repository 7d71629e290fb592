"""Packed numbers of a few bits each, and ascending indices in little more than the fewest bits possible."""

from thinwire.kernels.bits import cpu, reference
from thinwire.kernels.bits.reference import EliasFano
from thinwire.kernels.dispatch import Kernel

__all__ = [
    "EliasFano",
    "elias_fano_decode",
    "elias_fano_decode_rows",
    "elias_fano_encode",
    "ones",
    "pack_bits",
    "unpack_bits",
]

pack_bits = Kernel(reference.pack_bits, cpu.pack_bits, by="codes", any_dtype=True)
unpack_bits = Kernel(reference.unpack_bits, cpu.unpack_bits, by="buffer", any_dtype=True)
# On a GPU this is a few operations of torch.
ones = Kernel(reference.ones, cpu.ones, reference.ones, by="bits", any_dtype=True)
elias_fano_encode = Kernel(reference.elias_fano_encode, cpu.elias_fano_encode, by="indices", any_dtype=True)
elias_fano_decode = Kernel(reference.elias_fano_decode, cpu.elias_fano_decode, by="buffer", any_dtype=True)
elias_fano_decode_rows = Kernel(
    reference.elias_fano_decode_rows, cpu.elias_fano_decode_rows, by="*rows", any_dtype=True
)
