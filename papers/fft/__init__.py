"""FFT sparsification and the offset float (Wang et al. 2020)."""

from papers.lab.claims import Paper

FFT_PAPER = Paper(name="fft")
