"""What a server says about itself and its trainers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from thinwire.checked import Number, Seconds, Size, checked


@final
@checked
@dataclass(frozen=True, kw_only=True)
class TrainerStatus:
    """What a server knows of a trainer that is connected.

    Args:
        updates: How many of its updates have arrived, over all its connections.
        behind: The sum of their staleness, in steps.
        loss: The latest it reported, in its own unit; None if it reports none, or one that is not finite.
        sent_bytes, received_bytes: By the server, over this connection, headers included.
        quiet: Seconds since its latest update, or since it joined.
    """

    updates: Size
    behind: Size
    loss: Number | None
    sent_bytes: Size
    received_bytes: Size
    quiet: Seconds


@final
@checked
@dataclass(frozen=True, kw_only=True)
class ServerStatus:
    """A server's progress.

    Args:
        version: Steps of its optimizer.
        staleness: The number of updates applied, by their staleness in steps.
        updates: The number of each trainer's latest update, by trainer.
        trainers: Those that are connected.
        dropped: How many updates were not finite.
        sent_bytes, received_bytes: Over all connections, headers included.
    """

    version: Size
    staleness: Mapping[Size, Size]
    updates: Mapping[str, Size]
    trainers: Mapping[str, TrainerStatus]
    dropped: Size
    sent_bytes: Size
    received_bytes: Size
