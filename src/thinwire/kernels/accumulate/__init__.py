"""Adding a gradient to the residual: plainly, with decay, with momentum, or rounded to 16 bits."""

from thinwire.kernels.accumulate import cpu, reference
from thinwire.kernels.dispatch import Kernel

__all__ = [
    "accumulate",
    "accumulate_each",
    "accumulate_fading",
    "accumulate_momentum",
    "accumulate_rounded",
    "subtract_rounded",
]

# Where a kernel widens the gradient first, it does not decide. Torch's own operations are as good as loops.
accumulate = Kernel(reference.accumulate, gpu=reference.accumulate, by="out residual")
accumulate_each = Kernel(reference.accumulate_each, cpu.accumulate_each, by="*outs *residuals")
accumulate_fading = Kernel(reference.accumulate_fading, cpu.accumulate_fading, by="out residual")
accumulate_momentum = Kernel(reference.accumulate_momentum, by="out velocity_out residual velocity")
accumulate_rounded = Kernel(
    reference.accumulate_rounded, cpu.accumulate_rounded, by="out residual gradient", any_dtype=True
)
subtract_rounded = Kernel(reference.subtract_rounded, cpu.subtract_rounded, by="x indices", any_dtype=True)
