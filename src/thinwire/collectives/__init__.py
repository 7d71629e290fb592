"""Collectives: the parts of torch.distributed that the rest of the package uses.

`groups` has process groups, `gathers` the collectives of tensors, `messages` carries plain values and states without
pickle, `peers` sends bytes between two ranks, `queued` does what follows on a GPU, `staging` keeps buffers, `thread`
runs exchanges of several rounds, and `exit` waits for all of them to finish before the interpreter ends.
"""

from thinwire.collectives.gathers import Pool, all_gather, all_reduce, all_to_all, pooled, pooling
from thinwire.collectives.groups import Group, adopt_group, all_or, backend_of, forget_group, plain_device
from thinwire.collectives.messages import all_gather_plain, broadcast_state, packed, receive_state, send_state, unpacked
from thinwire.collectives.peers import Peers
from thinwire.collectives.queued import fulfil, of_torch, promised, queued
from thinwire.collectives.staging import Staging, room, taking, used_here
from thinwire.collectives.thread import communication_thread

__all__ = [
    "Group",
    "Peers",
    "Pool",
    "Staging",
    "adopt_group",
    "all_gather",
    "all_gather_plain",
    "all_or",
    "all_reduce",
    "all_to_all",
    "backend_of",
    "broadcast_state",
    "communication_thread",
    "forget_group",
    "fulfil",
    "of_torch",
    "packed",
    "plain_device",
    "pooled",
    "pooling",
    "promised",
    "queued",
    "receive_state",
    "room",
    "send_state",
    "taking",
    "unpacked",
    "used_here",
]
