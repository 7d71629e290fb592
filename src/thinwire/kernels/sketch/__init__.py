"""Count sketches."""

from thinwire.kernels.dispatch import Kernel
from thinwire.kernels.sketch import cpu, reference

__all__ = ["sketch_insert", "sketch_query"]

sketch_insert = Kernel(reference.sketch_insert, cpu.sketch_insert, by="x")
sketch_query = Kernel(reference.sketch_query, cpu.sketch_query, by="table")
