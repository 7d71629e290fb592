"""Adding gradients to residuals, and picking with a threshold from a sample: several vectors in one call."""

from thinwire.kernels.dispatch import Kernel
from thinwire.kernels.sampled import cpu, reference
from thinwire.kernels.sampled.reference import Draw, limited

__all__ = ["Draw", "accumulate_sampled_select", "limited"]

accumulate_sampled_select = Kernel(reference.accumulate_sampled_select, cpu.accumulate_sampled_select, by="sums")
