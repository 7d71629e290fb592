"""The exchange contract: every rank's payload in, the sum out."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, final, runtime_checkable

from torch import Tensor
from torch.futures import Future

from thinwire.checked import Amount, Bandwidth, Count, Seconds, checked
from thinwire.collectives import Group
from thinwire.payloads import Payload, Scratch

Transport = Literal["all_reduce", "all_gather", "point_to_point"]


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Link:
    """A network link.

    Args:
        latency: Seconds per message (α).
        bandwidth: Bytes per second (B).
    """

    latency: Seconds
    bandwidth: Bandwidth

    def seconds(self, nbytes: float) -> float:
        """Return the seconds that one message of `nbytes` takes: α + n/B."""
        return self.latency + nbytes / self.bandwidth if self.bandwidth > 0 else math.inf

    def hop(self, hops: "Hops", world_size: int) -> "Link":
        """Return this link, whatever the `hops` and the `world_size`: all pairs of ranks are alike."""
        return self


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Hops:
    """Messages in a row, from rank i to i + `stride`, for every i that `every` divides.

    Args:
        stride: How many ranks apart sender and receiver are.
        count, nbytes: The number of messages, and the bytes of each.
        every: The ranks that send are its multiples.
        swap: They go to i XOR `stride` instead, and `stride` is a power of two.
    """

    stride: Count
    count: Amount
    nbytes: Amount
    every: Count = 1
    swap: bool = False


@runtime_checkable
class Network(Protocol):
    """What connects the ranks. A `Link` is a network in which all pairs of ranks are alike."""

    def hop(self, hops: Hops, world_size: int) -> Link:
        """Return the link that the slowest of the messages `hops` uses between `world_size` ranks."""


@final
@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """The sum over ranks, the part of this rank's payload that went into it, and the bytes this rank sent.

    If the host must not wait for a GPU, `buffers` may take the place of the sum: all payloads, still packed.
    """

    delivered: Payload
    sent_bytes: Amount
    summed: Payload | None = None
    buffers: Tensor | None = None

    @property
    def total(self) -> Payload:
        """The sum over ranks.

        Raises:
            RuntimeError: If it has not been read.
        """
        if self.summed is None:
            raise RuntimeError("the received buffers have not been decoded: call delivered.from_buffers(buffers)")
        return self.summed

    def tensors(self) -> Sequence[Tensor]:
        """Return the tensors of all of it."""
        arrived = () if self.buffers is None else (self.buffers,)
        summed = () if self.summed is None else self.summed.tensors()
        return *arrived, *summed, *self.delivered.tensors()

    def __reduce__(self) -> tuple[Any, ...]:
        """Name the tensors alone. A future of a GPU pickles what it holds to find them, at every step."""
        return tuple, (self.tensors(),)


@runtime_checkable
class Encoder(Protocol):
    """What an exchange needs from a codec that encodes the values it sums."""

    def encode(self, x: Tensor, *, seed: int = 0) -> Payload:
        """Encode a vector."""


class Exchange(ABC):
    """A collective over payloads of one kind on every rank."""

    uneven: ClassVar[bool] = False
    """Whether ranks may have payloads of different lengths."""
    transport: ClassVar[Transport]
    """How its bytes travel. The planner measures each transport and predicts times from that."""

    @property
    def scratch(self) -> Scratch:
        """Memory that the rounds need, besides the payload's. By default nothing."""
        return Scratch()

    def arriving(self, values: int, world_size: int) -> float:
        """Return how many received numbers a rank holds at once if each of `world_size` ranks sends `values`."""
        return values * world_size

    def prepare(self, group: Group) -> None:  # noqa: B027 - most need nothing
        """Set up what `start` needs on `group`. A collective. If skipped, the first `start` does it, and may block."""

    def check(self, payload: Payload) -> None:  # noqa: B027 - some sum all there are
        """Raise TypeError for a payload that this exchange cannot sum."""

    @abstractmethod
    def start(
        self, payload: Payload, group: Group, *, keep: bool = True, seeds: Sequence[int] = ()
    ) -> "Future[Exchanged]":
        """Start the exchange; the future holds the sum, bit-identical on all ranks.

        A region's result does not depend on what else is in the payload.

        Args:
            payload: This rank's.
            group: The ranks.
            keep: If False, the exchange may overwrite `payload`, and `delivered` is meaningless.
            seeds: One per region, the same on all ranks; 0 by default.

        Returns:
            A future of the sum over ranks, and of what of this rank's payload is part of it.
        """

    @abstractmethod
    def hops(self, nbytes: float, world_size: int, whole: float = math.inf) -> Sequence[Hops]:
        """Return the messages for payloads of `nbytes` between `world_size` ranks; each waits for the one before.

        Ranks are assumed to pick independently among rows of `whole` bytes in all; by default, never the same rows.
        """

    @final
    def seconds(self, nbytes: float, world_size: int, network: Network, whole: float = math.inf) -> float:
        """Predict the time of an exchange.

        Args:
            nbytes: Bytes of a payload.
            world_size: The number of ranks.
            network: What connects them.
            whole: As in `hops`.

        Returns:
            Seconds: the sum of count · (α + n/B) over `hops`.
        """
        rounds = self.hops(nbytes, world_size, whole) if world_size > 1 else ()
        return sum(hops.count * network.hop(hops, world_size).seconds(hops.nbytes) for hops in rounds)
