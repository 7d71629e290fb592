"""FSDP's all-gathers without loss, in fewer bytes."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from thinwire import trace
from thinwire.collectives import Group, all_gather
from thinwire.gathers import Lossless
from thinwire.payloads import exponents


@final
class Coded:
    """Has the all-gathers of `modules`, on which `fully_shard` was called, send parameters coded; see `Lossless`.

    FSDP calls it in place of its all-gather. Ranks first tell each other how many bytes they have.
    """

    nbytes = 0

    def __init__(self, modules: Sequence[Any], how: Lossless, group: Group, names: Mapping[nn.Parameter, str]) -> None:
        self.sent_bytes, self._retired = 0, False
        for module in modules:
            module.set_custom_all_gather(self)

    def refresh(self) -> None:
        """Return at once: every gather sends parameters exactly, so no rank has an outdated copy."""

    def differing(self) -> list[str]:
        """Return nothing: no two ranks hold the same."""
        return []

    def remove(self) -> None:
        """Have gathers send parameters as they are."""
        self._retired = True

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Group, async_op: bool = False) -> None:
        """Gather as FSDP does."""
        if self._retired:
            all_gather(output_tensor, input_tensor, group).wait()
            return
        with trace.span("encode"):
            mine = exponents.pack(input_tensor)
        arrived = self._arrived(mine, group)
        with trace.span("decode"):
            for rank, (out, buffer) in enumerate(zip(output_tensor.view(group.size(), -1), arrived, strict=True)):
                if rank != group.rank():
                    exponents.unpack(out, buffer)

    def _arrived(self, mine: Tensor, group: Group) -> Tensor:
        """Return what each rank sends, as rows: all of the longest one's length."""
        sizes = torch.empty(group.size(), dtype=torch.int64, device=mine.device)
        all_gather(sizes, sizes.new_tensor([mine.numel()]), group).wait()
        longest = int(sizes.max())
        padded = torch.nn.functional.pad(mine, (0, longest - mine.numel()))
        rows = mine.new_empty(group.size(), longest)
        all_gather(rows.view(-1), padded, group).wait()
        nbytes = (group.size() - 1) * (longest + sizes.element_size())
        trace.count("gathered_bytes", nbytes)
        self.sent_bytes += nbytes
        return rows
