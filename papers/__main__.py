"""Judge the papers' claims, and measure every method's error on real gradients.

python -m papers --data DATA --json out.json --html out.html [--paper fft] [--bench bench.json] [--steps N] [--quick]
"""

import sys

import papers.dct.claims
import papers.dragonn.claims
import papers.dragonn.lemmas
import papers.fft.claims
import papers.fft.convergence
import papers.fft.offset_float
import papers.fft.tuning
import papers.gtopk.claims
import papers.s2.claims  # noqa: F401 - importing a paper's claims registers them
from papers.dct import DCT
from papers.dragonn import DRAGONN
from papers.fft import FFT_PAPER
from papers.gtopk import GTOPK
from papers.lab.program import main
from papers.s2 import S2

PAPERS = (DRAGONN, FFT_PAPER, S2, DCT, GTOPK)

if __name__ == "__main__":
    main(sys.argv[1:], PAPERS)
