"""Where a rank stands among those that save together: which replica it is of, and which shard it holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch.distributed as dist
from torch import nn

from thinwire.collectives import Group
from thinwire.integrations.membership.together import union
from thinwire.integrations.sharding.fsdp import is_dtensor
from thinwire.integrations.sharding.recut import Cuts


@final
@dataclass(frozen=True, kw_only=True)
class Layout:
    """The place of this rank: its mesh's `groups` (the first has the same shard), all `ranks`, and its `shard`."""

    groups: Sequence[Group]
    ranks: tuple[int, ...]
    shard: list[list[int]] | None = None
    cuts: Cuts = field(default_factory=Cuts)

    @classmethod
    def whole(cls, group: Group, parameters: Mapping[str, nn.Parameter]) -> "Layout":
        """Return that of replicas of whole parameters. Raises TypeError for shards, whose place it does not know."""
        if any(map(is_dtensor, parameters.values())):
            raise TypeError(
                "this attachment is for shards, and does not know which: pass the handle that thinwire.shard returned, "
                "as in thinwire.Checkpoint(handle), not handle.attachment"
            )
        return cls(groups=[group], ranks=tuple(dist.get_process_group_ranks(group)))

    @classmethod
    def sharded(cls, group: Group, island: Sequence[Group], parameters: Mapping[str, nn.Parameter]) -> "Layout":
        """Return that of replicas of shards, which the groups of `island` hold together. A collective of the mesh."""
        groups = [group, *island]
        ranks = union(groups, dict.fromkeys(dist.get_process_group_ranks(group), ""))
        place = [[each.rank(), each.size()] for each in island]
        return cls(groups=groups, ranks=tuple(sorted(ranks)), shard=place, cuts=Cuts.of(parameters))
