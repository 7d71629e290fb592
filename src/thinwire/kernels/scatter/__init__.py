"""Adding, overwriting and clearing elements by index, and adding sorted tables."""

from thinwire.kernels.dispatch import Kernel
from thinwire.kernels.scatter import cpu, reference

__all__ = ["mask", "merge", "scatter", "scatter_add"]

scatter = Kernel(reference.scatter, cpu.scatter, by="out")
scatter_add = Kernel(reference.scatter_add, cpu.scatter_add, by="*outs")
mask = Kernel(reference.mask, cpu.mask, by="*xs")
# The host must learn the length of the result anyway, so a GPU needs no kernel of its own.
merge = Kernel(reference.merge, cpu.merge, reference.merge, by="*rows")
