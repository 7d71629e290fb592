"""Do all ranks mean the same thing?"""

import re

import torch.distributed as dist
from torch import nn

from thinwire.errors import FingerprintError
from thinwire.exchanges.compat import Group
from thinwire.reducer import Reducer

# where a function lies in memory, as one in a schedule
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def check_fingerprint(recipe: Reducer, parameters: dict[str, nn.Parameter], group: Group, settings: str = "") -> None:
    """Compare recipe, parameters and settings. Raises FingerprintError on every rank, naming what differs."""
    mine = {"recipe": _ADDRESS.sub("", repr(recipe)), "what DDP or the optimizer is set to": settings} | {
        f"parameter {name}": f"{tuple(p.shape)} {p.dtype}" for name, p in parameters.items()
    }
    everyone: list[dict[str, str]] = [{} for _ in range(group.size())]
    dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        for key in everyone[0] | theirs:
            first, other = everyone[0].get(key, "absent"), theirs.get(key, "absent")
            if first != other:
                raise FingerprintError(f"{key} differs: rank 0 has {first}, rank {rank} has {other}")
