"""Picking large magnitudes, also in the same pass as the sum they are picked from."""

from thinwire.kernels.dispatch import Kernel
from thinwire.kernels.select import cpu, reference
from thinwire.kernels.select.reference import Picks, gather

__all__ = [
    "Picks",
    "accumulate_fading_select",
    "accumulate_momentum_select",
    "accumulate_rounded_select",
    "accumulate_select",
    "gather",
    "largest",
    "largest_of_each",
    "select",
]

select = Kernel(reference.select, cpu.select, by="x")
largest = Kernel(reference.largest, cpu.largest, by="x")
largest_of_each = Kernel(reference.largest_of_each, cpu.largest_of_each, by="*xs")
# Where a kernel widens the gradient first, the gradient does not decide.
accumulate_select = Kernel(reference.accumulate_select, cpu.accumulate_select, by="out residual")
accumulate_fading_select = Kernel(reference.accumulate_fading_select, cpu.accumulate_fading_select, by="out residual")
accumulate_momentum_select = Kernel(
    reference.accumulate_momentum_select, cpu.accumulate_momentum_select, by="out velocity_out residual velocity"
)
accumulate_rounded_select = Kernel(
    reference.accumulate_rounded_select, cpu.accumulate_rounded_select, by="out residual gradient", any_dtype=True
)
