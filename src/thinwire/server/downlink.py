"""What the server sends down, and how it reads what comes up."""

from typing import final

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.payloads import Dense
from thinwire.reducer import Reducer
from thinwire.reducer.compressed import encoded
from thinwire.server.central import Central, Update
from thinwire.signals import Plain
from thinwire.wire.frames import LOSS, Bytes, Flag, Frame, FrameError
from thinwire.wire.layout import Layout, pack, read_parts, read_table, table, unpack
from thinwire.wire.rows import read_question


@final
class Downlink:
    """The answers to one trainer: all parameters, or what changed since the last answer, by a `codec`.

    The server then keeps a copy of what the trainer has, so what a message leaves out is in the next difference: error
    feedback. Of sparse embeddings, the rows that changed are sent, exactly; none if trainers fetch them.
    """

    def __init__(self, central: Central, codec: Codec | None) -> None:
        self._central, self._codec = central, codec
        self._parts = () if codec is None else central.layout.of_codec(codec)
        self._theirs: dict[torch.dtype, Tensor] = {}
        self._version = -1

    def whole(self) -> list[Tensor]:
        """Return everything."""
        if self._codec is not None:
            self._theirs = {dtype: flat.clone() for dtype, flat in self._central.flats.items()}
        return [*self._flats(), *self._rows(-1)]

    def news(self, number: int) -> list[Tensor]:
        """Return what the answer to update `number` says, and note what the trainer will have."""
        rows = self._rows(self._version)
        return [*(self._flats() if self._codec is None else self._changes(number)), *rows]

    def _changes(self, number: int) -> list[Tensor]:
        sections = []
        for part in self._parts:
            behind = self._central.flats[part.dtype] - self._theirs[part.dtype]
            payloads = []
            for segment in part.segments:
                signal = Plain(behind[segment.offset : segment.offset + segment.length])
                signal.share, signal.shape = 1.0, segment.shape
                payloads.append(encoded(part.codec, signal, seed=part.draw(segment, number)))
            whole = part.assembled(payloads)
            sections.append(whole.to_buffer().cpu())
            whole.write(behind)
            self._theirs[part.dtype].add_(behind)
        return sections

    def _flats(self) -> list[Tensor]:
        return [Dense(values=self._central.flats[part.dtype]).to_buffer().cpu() for part in self._central.layout.dense]

    def _rows(self, since: int) -> list[Tensor]:
        self._version = self._central.version
        pushed = self._central.layout.pushed
        return [table(each, *self._central.changed_since(each, since)).to_buffer().cpu() for each in pushed]


def read_update(layout: Layout, recipe: Reducer, trainer: str, frame: Frame) -> Update:
    """Return the update in a frame. Raises FrameError or PayloadError if there is none in it."""
    body, number = frame.body, frame.number
    if len(body) < LOSS.size:
        raise FrameError(f"an update of {len(body)} bytes; expected a loss of {LOSS.size} at its beginning")
    (loss,) = LOSS.unpack_from(body)
    parts = layout.dense if frame.flags & Flag.DRAINED else layout.of_recipe(recipe, number - 1)
    sections = unpack(body[LOSS.size :], len(parts) + len(layout.rows))
    payloads = read_parts(parts, sections[: len(parts)], number)
    rows = [read_table(entry, x) for entry, x in zip(layout.rows, sections[len(parts) :], strict=True)]
    return Update(
        trainer=trainer, number=number, version=frame.version, loss=loss, parts=parts, payloads=payloads, rows=rows
    )


def rows_for(central: Central, body: memoryview) -> list[Bytes]:
    """Return the body of ROWS that answers FETCH. Raises FrameError or PayloadError."""
    asked = zip(central.layout.fetched, read_question(central.layout, body), strict=True)
    return pack([table(entry, keys, central.picked(entry, keys)).to_buffer() for entry, keys in asked])
