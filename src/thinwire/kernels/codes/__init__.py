"""Numbers as codes of a few bits, and back."""

from thinwire.kernels.codes import cpu, reference
from thinwire.kernels.codes.reference import OffsetGrid, Rounding
from thinwire.kernels.dispatch import Kernel

__all__ = [
    "OffsetGrid",
    "Rounding",
    "levels_encode",
    "offset_encode",
    "sign_encode",
    "table_decode",
    "ternary_encode",
]

offset_encode = Kernel(reference.offset_encode, cpu.offset_encode, by="x scales")
levels_encode = Kernel(reference.levels_encode, cpu.levels_encode, by="x scales")
ternary_encode = Kernel(reference.ternary_encode, cpu.ternary_encode, by="x scales")
sign_encode = Kernel(reference.sign_encode, cpu.sign_encode, reference.sign_encode, by="x")
table_decode = Kernel(reference.table_decode, cpu.table_decode, by="out codes scales", any_dtype=True)
