"""Dynamic Communication Thresholding (Gupta et al. 2021), data and model parallel."""

from papers.lab.claims import Paper

DCT = Paper(name="dct")
