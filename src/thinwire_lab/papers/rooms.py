"""All rooms: importing this registers every paper's checks, judges, figures and tables."""

import thinwire_lab.papers.dct.activations
import thinwire_lab.papers.dct.claims
import thinwire_lab.papers.dct.convex
import thinwire_lab.papers.dct.crossing
import thinwire_lab.papers.dct.learning
import thinwire_lab.papers.dct.redrawn
import thinwire_lab.papers.dct.served
import thinwire_lab.papers.dct.timing
import thinwire_lab.papers.dragonn.claims
import thinwire_lab.papers.dragonn.learning
import thinwire_lab.papers.dragonn.lemmas
import thinwire_lab.papers.dragonn.redrawn
import thinwire_lab.papers.dragonn.steps
import thinwire_lab.papers.dragonn.timing
import thinwire_lab.papers.fft.claims
import thinwire_lab.papers.fft.convergence
import thinwire_lab.papers.fft.learning
import thinwire_lab.papers.fft.offset_float
import thinwire_lab.papers.fft.redrawn
import thinwire_lab.papers.fft.timing
import thinwire_lab.papers.fft.tuning
import thinwire_lab.papers.gtopk.claims
import thinwire_lab.papers.gtopk.learning
import thinwire_lab.papers.gtopk.redrawn
import thinwire_lab.papers.gtopk.timing
import thinwire_lab.papers.s2.claims
import thinwire_lab.papers.s2.learning
import thinwire_lab.papers.s2.redrawn
import thinwire_lab.papers.s2.timing  # noqa: F401 - importing a paper's claims registers them
from thinwire_lab.papers.dct import DCT
from thinwire_lab.papers.dragonn import DRAGONN
from thinwire_lab.papers.fft import FFT_PAPER
from thinwire_lab.papers.gtopk import GTOPK
from thinwire_lab.papers.s2 import S2

PAPERS = (DRAGONN, FFT_PAPER, S2, DCT, GTOPK)
