"""Parts of benchmarks/kernels.py: the kernels, their floors, and the results."""
