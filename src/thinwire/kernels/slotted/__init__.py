"""Indices in slot order, region by region: the code of each slot, packed."""

from thinwire.kernels.dispatch import Kernel
from thinwire.kernels.slotted import cpu, reference
from thinwire.kernels.slotted.reference import Slotted

__all__ = ["Slotted", "slots_decode", "slots_encode"]

slots_encode = Kernel(reference.slots_encode, cpu.slots_encode, by="indices", any_dtype=True)
slots_decode = Kernel(reference.slots_decode, cpu.slots_decode, by="*rows", any_dtype=True)
