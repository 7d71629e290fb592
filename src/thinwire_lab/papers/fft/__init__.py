"""FFT sparsification and the offset float (Wang et al. 2020)."""

from thinwire_lab.papers.shared.claims import Paper

FFT_PAPER = Paper(name="fft")
