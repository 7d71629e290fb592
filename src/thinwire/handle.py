"""The methods common to all that `attach`, `replicate`, `shard`, `scatter`, `outer` and `pipeline.sparsify` return."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from thinwire.trace import Stats


class MemoryUse(NamedTuple):
    """Bytes that this rank holds for one model beside its parameters and gradients.

    Args:
        waiting: Residuals, including the second copy that allows a step to be rolled back. For outer steps also the
            global parameters and the outer optimizers' state.
        staging: Buffers for what is sent and received, those of a GPU's captured kernels too, and second copies of
            gradients.
        scratch: The most that reducing one bucket takes on top, as the recipe declares it for the latest step (see
            `thinwire.payloads.Scratch`); 0 before the first. Buckets that are exchanged at the same time take it each.
            Once a GPU's kernels are captured, it is kept between steps, one for all buckets of a device.
    """

    waiting: int
    staging: int
    scratch: int = 0

    @property
    def total(self) -> int:
        """What stays between steps: all but the scratch."""
        return self.waiting + self.staging


class Handle(ABC):
    """What `attach`, `replicate`, `shard`, `scatter`, `outer` and `sparsify` return has this interface."""

    @property
    @abstractmethod
    def memory(self) -> MemoryUse:
        """Bytes that this rank holds between steps and needs during one, by purpose."""

    @property
    def memory_bytes(self) -> int:
        """Bytes this rank holds between steps: `memory.total`."""
        return self.memory.total

    @abstractmethod
    def stats(self) -> Stats:
        """Return the figures of the latest step and of all steps so far. Call it after the optimizer's step."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save to resume, as tensors and plain containers. Save it on every rank."""

    @abstractmethod
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Resume from `saved`, which `state_dict` returned."""

    def verify_replicas(self) -> bool:
        """Return whether every parameter, frozen ones too, is bit-identical on all ranks. A collective."""
        return not self.differing_parameters()

    def differing_parameters(self) -> list[str]:
        """Return the names of what differs between ranks. A collective.

        Empty if no two ranks are meant to hold the same parameters.
        """
        return []

    @abstractmethod
    def remove(self) -> None:
        """Detach: from now on nothing is compressed."""
