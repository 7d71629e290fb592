"""FSDP's all-gathers without loss, in fewer bytes."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire import trace
from thinwire.collectives import Group
from thinwire.integrations.sharding.lane import Gather, Lane
from thinwire.payloads import exponents


@final
class Coded(Gather):
    """Has the all-gathers of `modules`, on which `fully_shard` was called, send parameters coded; see `Lossless`.

    Ranks first tell each other how many bytes they have.
    """

    nbytes = 0

    def __init__(self, modules: Sequence[Any], groups: Sequence[Group]) -> None:
        super().__init__(modules, Lane(groups[0]))

    def refresh(self) -> None:
        """Return at once: every gather sends parameters exactly, so no rank has an outdated copy."""

    def compare(self) -> None:
        """Return at once, for the same reason."""

    def differing(self) -> list[str]:
        """Return nothing: no two ranks hold the same."""
        return []

    def remove(self) -> None:
        """Have gathers send parameters as they are."""
        self.retire()

    @override
    def _bring(self, rows: Tensor, x: Tensor, group: Group) -> None:
        with trace.span("encode"):
            mine = exponents.pack(x)
        longest = int(self._arrived(mine.new_tensor([mine.numel()], dtype=torch.int64), group).max())
        arrived = self._arrived(torch.nn.functional.pad(mine, (0, longest - mine.numel())), group)
        with trace.span("decode"):
            for rank, (out, buffer) in enumerate(zip(rows, arrived, strict=True)):
                if rank != group.rank():
                    exponents.unpack(out, buffer)
