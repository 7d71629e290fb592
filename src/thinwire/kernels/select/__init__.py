"""Picking large magnitudes, also in the same pass as the sum they are picked from."""
