"""The exchange contract: every rank's payload in, the sum out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, final

from torch import Tensor
from torch.futures import Future

from thinwire.exchanges.compat import Group
from thinwire.exchanges.lane import lane
from thinwire.payloads import Payload


@final
@dataclass(frozen=True, kw_only=True)
class Link:
    """A network link: `latency` seconds per message and `bandwidth` bytes per second."""

    latency: float
    bandwidth: float


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

    def prepare(self, group: Group) -> None:  # noqa: B027 - most need nothing
        """Set up what `start` needs, a collective; left out, the first `start` does it, and may block."""

    @abstractmethod
    def start(
        self, payload: Payload, group: Group, *, keep: bool = True, seeds: Sequence[int] = ()
    ) -> "Future[Exchanged]":
        """Start the exchange; the future holds the sum, bit-identical on all ranks.

        What comes of a span does not depend on what else is in the payload. Without `keep`, `payload` may be
        overwritten, and `delivered` means nothing. `seeds`, one for each span, are alike on all ranks; 0 if left out.
        """

    @abstractmethod
    def sent_bytes(self, payload: Payload, world_size: int) -> float:
        """Predict the bytes that a rank sends, on average over ranks and without what the transport adds.

        Where they depend on how the ranks' picks overlap, the picks are taken to be independent.
        """

    @abstractmethod
    def seconds(self, nbytes: float, world_size: int, link: Link) -> float:
        """Predict the time for payloads of `nbytes` between `world_size` ranks."""


class Rounds(Exchange):
    """An exchange of several rounds, each of which needs the one before: it runs on a lane of its own."""

    @final
    def prepare(self, group: Group) -> None:
        """Open the lane."""
        lane(group)

    @final
    def start(
        self, payload: Payload, group: Group, *, keep: bool = True, seeds: Sequence[int] = ()
    ) -> "Future[Exchanged]":
        """Queue the exchange."""
        seeds = seeds or [0] * len(payload.spans)
        return lane(group).submit(lambda own: self.run(payload, own, seeds), payload.values.device)

    @abstractmethod
    def run(self, payload: Payload, group: Group, seeds: Sequence[int]) -> Exchanged:
        """Exchange and wait. Raises TypeError for a payload of a kind that this exchange cannot sum."""
