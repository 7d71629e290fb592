"""Blocks of adjacent elements: their energies and norms, the largest blocks, and the largest elements of each."""
