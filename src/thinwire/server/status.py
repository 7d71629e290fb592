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

    updates: how many of its updates have come, over all its connections. behind: the sum of their staleness, in steps.
    loss: the latest it reported, in its own unit; None if it reports none, or one that is not finite. sent_bytes,
    received_bytes: by the server, over this connection, headers included. quiet: seconds since its latest update, or
    since it joined.
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
    """How far a server is.

    version: steps of its optimizer. staleness: the number of updates applied, by their staleness in steps.
    updates: the number of each trainer's latest update, by trainer. trainers: those that are connected. dropped: how
    many updates were not finite. sent_bytes, received_bytes: over all connections, headers included.
    """

    version: Size
    staleness: Mapping[Size, Size]
    updates: Mapping[str, Size]
    trainers: Mapping[str, TrainerStatus]
    dropped: Size
    sent_bytes: Size
    received_bytes: Size
