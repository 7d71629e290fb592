"""Inverse Fourier transforms with the same bits on every processor."""
