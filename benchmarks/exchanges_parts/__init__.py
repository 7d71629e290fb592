"""Parts of benchmarks/exchanges.py: the workers, and the figures from what they emit."""
