"""Sums of rows, products with thin factors and orthonormal columns, with the same bits on every processor."""
