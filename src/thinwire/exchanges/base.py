"""The exchange contract: every rank's payload in, the sum out."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from torch.futures import Future

from thinwire.exchanges.compat import Group
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
    """The sum over ranks, and what of this rank's payload went into it."""

    total: Payload
    delivered: Payload


class Exchange(ABC):
    """A collective over payloads of the same layout on every rank. One call starts exactly one collective."""

    @abstractmethod
    def start(self, payload: Payload, group: Group, *, keep: bool = True) -> "Future[Exchanged]":
        """Start the exchange; the future holds the sum, bit-identical on all ranks.

        Without `keep`, `payload` may be overwritten, and `delivered` means nothing.
        """

    @abstractmethod
    def sent_bytes(self, payload: Payload, world_size: int) -> float:
        """Return the bytes that one rank sends, without what the transport adds."""

    @abstractmethod
    def seconds(self, nbytes: float, world_size: int, link: Link) -> float:
        """Predict the time for payloads of `nbytes` between `world_size` ranks."""
