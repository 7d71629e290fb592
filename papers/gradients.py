"""Judge the claims that gradients decide, and measure every method's error on real gradients.

python -m papers.gradients --data DATA --json out.json --html out.html [--paper fft] [--bench bench.json] [--quick]
"""

import sys

from papers.lab.program import main
from papers.rooms import PAPERS

if __name__ == "__main__":
    main(sys.argv[1:], PAPERS)
