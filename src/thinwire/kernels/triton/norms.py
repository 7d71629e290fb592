"""Norms of groups: as the reference, whose reduction is as good as a kernel."""

from thinwire.kernels.reference.norms import group_norms

__all__ = ["group_norms"]
