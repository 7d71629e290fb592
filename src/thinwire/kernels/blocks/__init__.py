"""Blocks of adjacent elements: their energies and norms, the largest blocks, and the largest elements of each."""

from thinwire.kernels.blocks import cpu, reference
from thinwire.kernels.dispatch import Kernel

__all__ = ["block_energies", "group_norms", "largest_blocks", "largest_in_rows"]

block_energies = Kernel(reference.block_energies, cpu.block_energies, by="x")
largest_blocks = Kernel(reference.largest_blocks, cpu.largest_blocks, by="x")
largest_in_rows = Kernel(reference.largest_in_rows, cpu.largest_in_rows, by="x")
group_norms = Kernel(reference.group_norms, cpu.group_norms, by="x")
