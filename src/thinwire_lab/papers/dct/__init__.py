"""Dynamic Communication Thresholding (Gupta et al. 2021), data and model parallel."""

from thinwire_lab.papers.shared.claims import Paper

DCT = Paper(name="dct")
