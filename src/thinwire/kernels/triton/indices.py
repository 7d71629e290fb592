"""Ascending indices in little more than the bits they hold: as the reference; the host must know anyway."""

from thinwire.kernels.reference.indices import elias_fano_decode, elias_fano_encode

__all__ = ["elias_fano_decode", "elias_fano_encode"]
