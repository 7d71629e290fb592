"""Chunks of tensors: the largest coefficients of each, and their inverse transform."""
