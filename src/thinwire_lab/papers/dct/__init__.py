"""Dynamic Communication Thresholding (Gupta et al. 2021), data and model parallel."""
