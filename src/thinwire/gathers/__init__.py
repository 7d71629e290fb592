"""Gathers: how the parameters of a sharded model travel, where FSDP2 gathers them before it computes."""

from thinwire.gathers.differences import Differences

__all__ = ["Differences"]
