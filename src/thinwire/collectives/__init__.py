"""Collectives: what every room above uses of torch.distributed.

`groups` has the collectives, `peers` messages between two ranks, `thread` the thread on which exchanges of several
rounds run, and `exit` lets all of them come to rest before the interpreter ends.
"""

from thinwire.collectives.groups import Group, all_gather, all_or, all_reduce
from thinwire.collectives.peers import Peers
from thinwire.collectives.thread import communication_thread

__all__ = ["Group", "Peers", "all_gather", "all_or", "all_reduce", "communication_thread"]
