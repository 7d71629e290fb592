"""Exchanges: every rank's payload → the sum."""

from thinwire.exchanges.all_gather import AllGather
from thinwire.exchanges.all_reduce import AllReduce
from thinwire.exchanges.base import Exchange, Exchanged, Hops, Link, Network, Transport
from thinwire.exchanges.doubling import RecursiveDoubling
from thinwire.exchanges.merging import Rounds
from thinwire.exchanges.owner_sharded import OwnerSharded
from thinwire.exchanges.tree import GlobalTopKTree
from thinwire.exchanges.union import UnionAllReduce

__all__ = [
    "AllGather",
    "AllReduce",
    "Exchange",
    "Exchanged",
    "GlobalTopKTree",
    "Hops",
    "Link",
    "Network",
    "OwnerSharded",
    "RecursiveDoubling",
    "Rounds",
    "Transport",
    "UnionAllReduce",
]
