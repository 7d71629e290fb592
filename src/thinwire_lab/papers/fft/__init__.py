"""FFT sparsification and the offset float (Wang et al. 2020)."""
