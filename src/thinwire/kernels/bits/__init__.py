"""Packed numbers of a few bits each, and ascending indices in little more than the fewest bits possible."""
