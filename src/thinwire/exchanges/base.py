"""The exchange contract: every rank's payload in, the sum out."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, final

from torch import Tensor
from torch.futures import Future

from thinwire.collectives import Group
from thinwire.payloads import Payload

Transport = Literal["all_reduce", "all_gather", "point_to_point"]


@final
@dataclass(frozen=True, kw_only=True)
class Link:
    """A network link: `latency` seconds per message and `bandwidth` bytes per second.

    Raises ValueError unless both are numbers from 0 on, the latency finite.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency is {self.latency}; expected seconds, from 0 on and finite")
        if not self.bandwidth >= 0:
            raise ValueError(f"bandwidth is {self.bandwidth}; expected bytes per second, from 0 on")

    def seconds(self, nbytes: float) -> float:
        """Return the time of one message: α + n/B."""
        return self.latency + nbytes / self.bandwidth if self.bandwidth > 0 else math.inf

    def hop(self, hops: "Hops", world_size: int) -> "Link":
        """Return itself: all pairs of ranks are alike."""
        return self


@final
@dataclass(frozen=True, kw_only=True)
class Hops:
    """`count` messages one after the other, each of `nbytes`, from rank i to i + `stride`, where `every` divides i.

    With `swap`, to i XOR `stride` instead, a power of two.
    """

    stride: int
    count: float
    nbytes: float
    every: int = 1
    swap: bool = False


class Network(Protocol):
    """What joins the ranks; a `Link` is one where all pairs are alike."""

    def hop(self, hops: Hops, world_size: int) -> Link:
        """Return what the slowest of these messages sees."""


@final
@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """The sum over ranks, what of this rank's payload went into it, and the bytes this rank sent for it."""

    total: Payload
    delivered: Payload
    sent_bytes: float


class Encoder(Protocol):
    """What an exchange asks of a codec, for what it sums on the way."""

    def encode(self, x: Tensor, *, seed: int = 0) -> Payload:
        """Encode a vector."""


class Exchange(ABC):
    """A collective over payloads of one kind on every rank."""

    uneven: ClassVar[bool] = False
    """Whether ranks may have payloads of different lengths."""
    transport: ClassVar[Transport]
    """What carries it; a planner measures each and predicts times from that."""

    def prepare(self, group: Group) -> None:  # noqa: B027 - most need nothing
        """Set up what `start` needs. A collective. If you leave it out, the first `start` does it, and may block."""

    @abstractmethod
    def start(
        self, payload: Payload, group: Group, *, keep: bool = True, seeds: Sequence[int] = ()
    ) -> "Future[Exchanged]":
        """Start the exchange; the future holds the sum, bit-identical on all ranks.

        A region's result does not depend on what else is in the payload. Without `keep`, the exchange may overwrite
        `payload`, and `delivered` means nothing. `seeds` has one for each region, the same on all ranks; 0 by default.
        """

    @abstractmethod
    def sent_bytes(self, payload: Payload, world_size: int) -> float:
        """Predict the bytes that a rank sends, on average over ranks and without what the transport adds.

        Where they depend on how the ranks' picks overlap, the picks are taken to be independent.
        """

    @abstractmethod
    def hops(self, nbytes: float, world_size: int, whole: float = math.inf) -> Sequence[Hops]:
        """Return the messages, each waiting for the one before, for payloads of `nbytes` between `world_size` ranks.

        Ranks pick independently among rows of `whole` bytes in all; by default, no two pick alike.
        """

    @final
    def seconds(self, nbytes: float, world_size: int, network: Network, whole: float = math.inf) -> float:
        """Predict the time for payloads of `nbytes` between `world_size` ranks: the sum of count · (α + n/B)."""
        rounds = self.hops(nbytes, world_size, whole) if world_size > 1 else ()
        return sum(hops.count * network.hop(hops, world_size).seconds(hops.nbytes) for hops in rounds)
