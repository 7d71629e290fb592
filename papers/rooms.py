"""All rooms: importing this registers every paper's checks, judges, figures and tables."""

import papers.dct.activations
import papers.dct.claims
import papers.dct.convex
import papers.dct.crossing
import papers.dct.learning
import papers.dct.redrawn
import papers.dct.served
import papers.dct.timing
import papers.dragonn.claims
import papers.dragonn.learning
import papers.dragonn.lemmas
import papers.dragonn.redrawn
import papers.dragonn.steps
import papers.dragonn.timing
import papers.fft.claims
import papers.fft.convergence
import papers.fft.learning
import papers.fft.offset_float
import papers.fft.redrawn
import papers.fft.timing
import papers.fft.tuning
import papers.gtopk.claims
import papers.gtopk.learning
import papers.gtopk.redrawn
import papers.gtopk.timing
import papers.s2.claims
import papers.s2.learning
import papers.s2.redrawn
import papers.s2.timing  # noqa: F401 - importing a paper's claims registers them
from papers.dct import DCT
from papers.dragonn import DRAGONN
from papers.fft import FFT_PAPER
from papers.gtopk import GTOPK
from papers.s2 import S2

PAPERS = (DRAGONN, FFT_PAPER, S2, DCT, GTOPK)
