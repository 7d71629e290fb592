"""What `attach`, `replicate`, `shard`, `outer` and `pipeline.sparsify` return has these verbs in common."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from thinwire.stats import Stats


class MemoryUse(NamedTuple):
    """Bytes that this rank holds between steps.

    waiting: what waits for a later step, and the second copy of it with which a step can be called off. staging:
    buffers for what is sent and received.
    """

    waiting: int
    staging: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


class Handle(Protocol):
    """thinwire at work on one model. `Attachment`, `Replicas`, `Shards`, `Outer` and `Sparsified` are handles."""

    @property
    def memory_bytes(self) -> int:
        """Bytes this rank holds between steps."""

    def stats(self) -> Stats:
        """Return what the latest step and all steps together sent and took."""

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save to resume, as tensors and plain containers."""

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned."""

    def remove(self) -> None:
        """Give the model back: from now on nothing is compressed."""
