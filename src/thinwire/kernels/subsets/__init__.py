"""Sorted positions as numbers of a few bits, and back."""
