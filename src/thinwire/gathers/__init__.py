"""Gathers: how the parameters of a sharded model travel, where FSDP2 gathers them before it computes."""

from thinwire.gathers.differences import Differences, Lossless

Gathers = Differences | Lossless
"""What `thinwire.scatter` takes as `gathers`."""

__all__ = ["Differences", "Gathers", "Lossless"]
