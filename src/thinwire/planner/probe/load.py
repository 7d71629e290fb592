"""Do the ranks leave any core to communication?"""

import os
import socket
import zlib

import torch

from thinwire.collectives import Group
from thinwire.planner.probe.agreed import gathered


def contention(group: Group, device: torch.device) -> float:
    """Return by how many seconds a processor second of each rank's communication delays what they compute.

    0 where backward runs elsewhere or leaves cores free.
    """
    host = float(zlib.crc32(socket.gethostname().encode()))
    ranks = gathered([host], group, device)[:, 0].eq(host).sum().item()
    load = ranks * torch.get_num_threads() / (os.cpu_count() or 1)
    return float(gathered([load if device.type == "cpu" and load >= 1 else 0.0], group, device).max())
