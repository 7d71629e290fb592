"""Hashing indices to slots of a table, and coding indices that are in slot order."""

from thinwire.kernels.dispatch import Kernel
from thinwire.kernels.hashing import cpu, reference
from thinwire.kernels.hashing.reference import keys, mix

__all__ = [
    "hashed_slots",
    "hashed_slots_of_each",
    "index_of",
    "keys",
    "mix",
    "slot_codes",
    "slot_indices",
    "slot_of",
]

hashed_slots = Kernel(reference.hashed_slots, cpu.hashed_slots, by="indices priorities", any_dtype=True)
hashed_slots_of_each = Kernel(reference.hashed_slots_of_each, cpu.hashed_slots_of_each, by="*xs")
slot_of = Kernel(reference.slot_of, cpu.slot_of, by="indices", any_dtype=True)
index_of = Kernel(reference.index_of, cpu.index_of, by="slot quotient", any_dtype=True)
# On a GPU these are a few operations of torch on few elements.
slot_codes = Kernel(reference.slot_codes, cpu.slot_codes, reference.slot_codes, by="indices", any_dtype=True)
slot_indices = Kernel(reference.slot_indices, cpu.slot_indices, reference.slot_indices, by="codes", any_dtype=True)
