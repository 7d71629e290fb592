"""Parts of benchmarks/planner.py."""
