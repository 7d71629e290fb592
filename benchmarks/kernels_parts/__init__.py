"""What `benchmarks/kernels.py` measures, against what, and what becomes of it."""
