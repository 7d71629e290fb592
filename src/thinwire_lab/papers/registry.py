"""All papers: importing this registers every paper's checks, judges, figures and tables."""

from importlib import import_module
from pkgutil import iter_modules

from thinwire_lab.papers.dct import DCT
from thinwire_lab.papers.dragonn import DRAGONN
from thinwire_lab.papers.fft import FFT_PAPER
from thinwire_lab.papers.gtopk import GTOPK
from thinwire_lab.papers.s2 import S2

PAPERS = (DRAGONN, FFT_PAPER, S2, DCT, GTOPK)

for paper in PAPERS:
    package = import_module(f"thinwire_lab.papers.{paper.name}")
    for module in iter_modules(package.__path__, f"{package.__name__}."):
        import_module(module.name)
