"""Vectors in slot order: in plain torch, a few operations on little."""

from thinwire.kernels.reference.slots import slot_codes, slot_indices

__all__ = ["slot_codes", "slot_indices"]
