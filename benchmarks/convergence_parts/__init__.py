"""What benchmarks/convergence.py is made of."""
