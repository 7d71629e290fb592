"""Picking large magnitudes, also in the same pass as the sum they are picked from."""

from thinwire.kernels.dispatch import Kernel
from thinwire.kernels.select import cpu, reference
from thinwire.kernels.select.reference import Picks, gather

__all__ = [
    "Picks",
    "accumulate_select",
    "gather",
    "largest",
    "largest_of_each",
    "select",
]

select = Kernel(reference.select, cpu.select, by="x")
largest = Kernel(reference.largest, cpu.largest, by="x")
largest_of_each = Kernel(reference.largest_of_each, cpu.largest_of_each, by="*xs")
accumulate_select = Kernel(reference.accumulate_select, cpu.accumulate_select, by="sums")
