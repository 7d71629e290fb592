"""Adding gradients to the residual, and picking with a threshold from a sample: several vectors in one call."""

from thinwire.kernels.dispatch import Kernel
from thinwire.kernels.sampled import cpu, reference
from thinwire.kernels.sampled.reference import Draw, momentum_sum

__all__ = ["Draw", "accumulate_momentum_sampled_select", "accumulate_sampled_select", "momentum_sum"]

accumulate_sampled_select = Kernel(
    reference.accumulate_sampled_select, cpu.accumulate_sampled_select, by="*outs *residuals"
)
accumulate_momentum_sampled_select = Kernel(
    reference.accumulate_momentum_sampled_select,
    cpu.accumulate_momentum_sampled_select,
    by="*outs *velocity_outs *residuals *velocities",
)
