"""Sums, products, factors and Fourier transforms with the same bits on every processor."""
