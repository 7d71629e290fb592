"""Do all ranks mean the same thing?"""

import torch.distributed as dist
from torch import nn

from thinwire.collectives import Group
from thinwire.errors import FingerprintError
from thinwire.integrations.state import words
from thinwire.reducer import Reducer


def check_fingerprint(recipe: Reducer, parameters: dict[str, nn.Parameter], group: Group, settings: str = "") -> None:
    """Compare recipe, parameters and settings. Raises FingerprintError on every rank, naming what differs."""
    mine = {"recipe": words(recipe), "what DDP or the optimizer is set to": settings} | {
        f"parameter {name}": f"{tuple(p.shape)} {p.dtype}" for name, p in parameters.items()
    }
    everyone: list[dict[str, str]] = [{} for _ in range(group.size())]
    dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        for key in everyone[0] | theirs:
            first, other = everyone[0].get(key, "absent"), theirs.get(key, "absent")
            if first != other:
                raise FingerprintError(f"{key} differs: rank 0 has {first}, rank {rank} has {other}")
