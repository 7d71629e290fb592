"""Adding, overwriting and clearing elements by index, and adding sorted tables."""

from thinwire.kernels.dispatch import Kernel
from thinwire.kernels.scatter import cpu, reference

__all__ = ["mask", "mask_each", "merge", "scatter", "scatter_add", "scatter_add_each"]

scatter = Kernel(reference.scatter, cpu.scatter, by="out")
scatter_add = Kernel(reference.scatter_add, cpu.scatter_add, by="out")
scatter_add_each = Kernel(reference.scatter_add_each, cpu.scatter_add_each, by="*outs")
mask_each = Kernel(reference.mask_each, cpu.mask_each, by="*xs")
mask = Kernel(reference.mask, cpu.mask, by="x")
# The host must learn the length of the result anyway, so a GPU needs no kernel of its own.
merge = Kernel(reference.merge, cpu.merge, reference.merge, by="*rows")
