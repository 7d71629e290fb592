"""What a server tells: how far it is, parameters that have changed, and rows that were asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from thinwire.server.central import Central
from thinwire.wire.frames import Bytes
from thinwire.wire.sections import pack, read_ids, table, unpack


@final
@dataclass(frozen=True, kw_only=True)
class TrainerStatus:
    """What a server knows of a trainer that is connected.

    Args:
        updates: How many of its updates are done with, over all its connections: applied, or not finite.
        behind: The sum of their staleness, in steps.
        loss: The latest it reported, in its own unit; None if it reports none, or one that is not finite.
        sent_bytes, received_bytes: By the server, over this connection, headers included.
        quiet: Seconds since its latest update, or since it joined.
    """

    updates: int
    behind: int
    loss: float | None
    sent_bytes: int
    received_bytes: int
    quiet: float


@final
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

    version: int
    staleness: Mapping[int, int]
    updates: Mapping[str, int]
    trainers: Mapping[str, TrainerStatus]
    dropped: int
    sent_bytes: int
    received_bytes: int


@final
class Downlink:
    """The answers to one trainer: all parameters, or what changed since the last answer, by the layout's codec.

    The server then keeps a copy of what the trainer has, so what a message leaves out is in the next difference: error
    feedback. Of sparse embeddings, the rows that changed are sent, exactly; none if trainers fetch them.
    """

    def __init__(self, central: Central) -> None:
        self._central, self._version = central, -1
        self._theirs: dict[torch.dtype, Tensor] = {}

    def sections(self, number: int | None = None) -> list[Tensor]:
        """Return what the answer to update `number` says, or everything; and note what the trainer will have."""
        central, layout, found = self._central, self._central.layout, list[Tensor]()
        whole = number is None or layout.down is layout.dense
        if number is None and layout.down is not layout.dense:
            self._theirs = {dtype: flat.clone() for dtype, flat in central.flats.items()}
        for part in layout.dense if whole else layout.down:
            flat = central.flats[part.dtype]
            lacking = flat if whole else flat - self._theirs[part.dtype]
            payload = part.plain(lacking, number or 1)
            found.append(payload.packed)
            if not whole:
                part.write(payload, self._theirs[part.dtype], whole=False)
        rows = [table(each, *central.changed_since(each, self._version)) for each in layout.pushed]
        self._version = central.version
        return [*found, *rows]


def rows_for(central: Central, body: memoryview) -> list[Bytes]:
    """Return the body that answers FETCH. Raises FrameError or PayloadError."""
    fetched = central.layout.fetched
    asked = [(each, read_ids(each, x)) for each, x in zip(fetched, unpack(body, len(fetched)), strict=True)]
    return pack([table(entry, keys, central.picked(entry, keys)) for entry, keys in asked])
