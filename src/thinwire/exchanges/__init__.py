"""Exchanges: every rank's payload → the sum."""

from thinwire.exchanges.all_gather import AllGather
from thinwire.exchanges.all_reduce import AllReduce
from thinwire.exchanges.base import Exchange, Exchanged, Link

__all__ = ["AllGather", "AllReduce", "Exchange", "Exchanged", "Link"]
