"""Errors of every method on real gradients, and the papers' claims that such figures decide.

python benchmarks/fidelity.py --data DATA --json out.json --html out.html [--bench bench.json] [--steps N] [--quick]
"""

import sys

from fidelity_parts.program import main

if __name__ == "__main__":
    main(sys.argv[1:])
