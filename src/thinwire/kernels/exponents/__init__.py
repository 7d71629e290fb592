"""The exponents of bfloat16 numbers in a prefix code, block by block."""

from thinwire.kernels.dispatch import Kernel
from thinwire.kernels.exponents import cpu, reference
from thinwire.kernels.exponents.reference import CODED, LONGEST

__all__ = ["CODED", "LONGEST", "exponents_count", "exponents_decode", "exponents_encode"]

# On a GPU torch's own is one kernel.
exponents_count = Kernel(
    reference.exponents_count, cpu.exponents_count, reference.exponents_count, by="x", any_dtype=True
)
exponents_encode = Kernel(reference.exponents_encode, cpu.exponents_encode, by="x codes", any_dtype=True)
exponents_decode = Kernel(
    reference.exponents_decode, cpu.exponents_decode, by="out rest sizes stream table", any_dtype=True
)
