"""Adding gradients to residuals: plainly, with decay, with momentum, or rounded to 16 bits."""

from thinwire.kernels.accumulate import cpu, reference
from thinwire.kernels.dispatch import Kernel

__all__ = ["accumulate", "subtract_rounded"]

accumulate = Kernel(reference.accumulate, cpu.accumulate, by="sums")
subtract_rounded = Kernel(reference.subtract_rounded, cpu.subtract_rounded, by="x indices", any_dtype=True)
