"""What exchanges that merge rows over several rounds have in common."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, final

from torch.futures import Future
from typing_extensions import override

from thinwire.collectives import Group, communication_thread, used_here
from thinwire.exchanges.base import Exchange, Exchanged, Transport
from thinwire.payloads import Keyed, Payload, Scratch, Sparse, wire


class Rounds(Exchange):
    """Exchanges in several rounds, each of which needs the one before: it runs on the communication thread."""

    transport: ClassVar[Transport] = "point_to_point"

    # two tables, their union, and what it takes to sort them
    scratch: ClassVar[Scratch] = Scratch(value=44, arriving=48)

    @final
    def prepare(self, group: Group) -> None:
        """Start the communication thread."""
        communication_thread(group)

    @final
    @override
    def check(self, payload: Payload) -> None:
        mergeable(payload, type(self).__name__)

    @final
    @override
    def start(
        self, payload: Payload, group: Group, *, keep: bool = True, seeds: Sequence[int] = ()
    ) -> "Future[Exchanged]":
        seeds = seeds or [0] * len(payload.regions)
        own = mergeable(payload, type(self).__name__)  # here: a thread's errors reach users through torch's futures

        def run(twin: Group) -> Exchanged:
            used_here(*payload.tensors())
            return self.run(table(own), twin, seeds)

        return communication_thread(group).submit(run, payload.values.device)

    @abstractmethod
    def run(self, own: Keyed, group: Group, seeds: Sequence[int]) -> Exchanged:
        """Exchange and wait: what `start` runs on the communication thread.

        Args:
            own: This rank's payload, in the order of received rows.
            group: The ranks.
            seeds: One per region, the same on all ranks.

        Returns:
            The sum over ranks, and what of this rank's payload is part of it.
        """


def mergeable(payload: Payload, exchange: str) -> Keyed:
    """Return the payload if its rows can be merged with other ranks'. Raises TypeError otherwise."""
    if not isinstance(payload, Keyed):
        raise TypeError(f"{exchange} merges sparse and block-sparse payloads; got {type(payload).__name__}")
    if payload.coded is not None:
        raise TypeError(
            f"{exchange} adds values, and codes of a format cannot be added; use AllGather, or a dtype as values="
        )
    return payload


def table(own: Keyed) -> Keyed:
    """Return the payload in the order of received rows, so that messages of equally many rows are equally long."""
    return own.rekeyed(own.keys, own.rows) if isinstance(own, Sparse) else own


def complete_bytes(like: Keyed) -> int:
    """Return the length of a message of all rows of `like`."""
    return wire.HEADER_BYTES + wire.padded(like.most_rows * like.rows.shape[1] * like.rows.element_size())


def together(nbytes: float, ranks: float, whole: float) -> float:
    """Return the bytes that `ranks` ranks cover together, if each picks `nbytes` out of `whole`."""
    return ranks * nbytes if whole in (0, math.inf) else whole * (1 - max(0.0, 1 - nbytes / whole) ** ranks)
