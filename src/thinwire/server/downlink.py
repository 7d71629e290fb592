"""What the server sends down, and how it reads what comes up."""

from typing import final

import torch
from torch import Tensor

from thinwire.server.central import Central, Update
from thinwire.wire.entries import read_ids, table
from thinwire.wire.frames import LOSS, Bytes, Flag, Frame, FrameError
from thinwire.wire.layout import Layout, pack, unpack


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
                payload.write(lacking)
                self._theirs[part.dtype].add_(lacking)
        rows = [table(each, *central.changed_since(each, self._version)) for each in layout.pushed]
        self._version = central.version
        return [*found, *rows]


def read_update(layout: Layout, trainer: str, frame: Frame) -> Update:
    """Return the update in a frame. Raises FrameError or PayloadError if there is none in it."""
    if len(frame.body) < LOSS.size:
        raise FrameError(f"an update of {len(frame.body)} bytes; expected a loss of {LOSS.size} at its beginning")
    (loss,) = LOSS.unpack_from(frame.body)
    parts = layout.dense if frame.flags & Flag.DRAINED else layout.up(frame.number)
    payloads, rows = layout.read(frame.body[LOSS.size :], parts, layout.rows, frame.number)
    return Update(
        trainer=trainer,
        number=frame.number,
        version=frame.version,
        loss=loss,
        parts=parts,
        payloads=payloads,
        rows=rows,
    )


def rows_for(central: Central, body: memoryview) -> list[Bytes]:
    """Return the body of ROWS that answers FETCH. Raises FrameError or PayloadError."""
    fetched = central.layout.fetched
    asked = [(each, read_ids(each, x)) for each, x in zip(fetched, unpack(body, len(fetched)), strict=True)]
    return pack([table(entry, keys, central.picked(entry, keys)) for entry, keys in asked])
