"""Judge the claims that gradients decide, and measure every method's error on real gradients.

python -m thinwire_lab.papers.gradients --data DATA --json out.json --html out.html [--paper fft] [--bench x.json]
"""

import sys

from thinwire_lab.papers.rooms import PAPERS
from thinwire_lab.papers.shared.program import main

if __name__ == "__main__":
    main(sys.argv[1:], PAPERS)
