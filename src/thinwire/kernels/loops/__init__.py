"""The loops behind `cpu`, compiled by Numba; one file for each of `reference`.

Where elements are given as `bits`, a vector is seen as integers, so that magnitudes compare without the sign bit and
NaN ranks highest.
"""
