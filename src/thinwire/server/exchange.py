"""What a trainer sends up, and what the server sends down: payloads, encoded on one side and read on the other."""

import logging
import random
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from thinwire import trace
from thinwire.codecs import Codec
from thinwire.errors import MomentumError
from thinwire.handle import MemoryUse
from thinwire.memories import FadingMomentum, MomentumCorrection, OrthogonalMomentum
from thinwire.payloads import Blocks, Dense, Payload
from thinwire.reducer import Reducer, Segment
from thinwire.reducer.compressed import encoded
from thinwire.server.central import Central, Update
from thinwire.server.frames import Flag, FrameError
from thinwire.server.layout import Entry, Layout, Part, read_parts, read_table, table, unpack, write_rows
from thinwire.server.places import Places
from thinwire.signals import Plain

logger = logging.getLogger("thinwire")
_CPU = torch.device("cpu")


@final
class Uplink:
    """A recipe's memory and codec between gradients and updates' bodies; not thread-safe; `who` seeds its own draws."""

    def __init__(self, recipe: Reducer, layout: Layout, who: str, device: torch.device = _CPU) -> None:
        check_memories(recipe)
        self._recipe, self._layout, self._who, self._device = recipe, layout, who, device
        self._scratch = 0

    @property
    def memory(self) -> MemoryUse:
        """The residual, and the most that encoding the latest update took."""
        waiting = sum(memory.nbytes for memory in self._recipe.memories())
        return MemoryUse(waiting, staging=0, scratch=self._scratch)

    def encode(self, number: int, gradients: Mapping[str, Tensor], *, drain: bool) -> list[Tensor]:
        """Return the sections of update `number`; what they do not deliver goes into the residual, all out if they
        `drain`.

        Gradients are read, not kept; zeros for those missing. Raises TypeError, with nothing changed, for gradients
        that are sparse where the layout's are not, or the other way round.
        """
        self.check(gradients)
        with trace.span("encode"):
            return self._sections(number, gradients, drain=drain)

    def check(self, gradients: Mapping[str, Tensor]) -> None:
        """Raise TypeError for gradients that are sparse where the layout's are not, or the other way round."""
        rows = {entry.name for entry in self._layout.rows}
        for name in (*rows, *(segment.name for _, segment in self._layout.segments())):
            gradient = gradients.get(name)
            if gradient is not None and gradient.is_sparse != (name in rows):
                raise TypeError(
                    f"{name} got a {'sparse' if gradient.is_sparse else 'dense'} gradient; expected a "
                    f"{'sparse' if name in rows else 'dense'} one: rows are sent for nn.Embedding(sparse=True) whose "
                    "weight is used nowhere else"
                )

    def _sections(self, number: int, gradients: Mapping[str, Tensor], *, drain: bool) -> list[Tensor]:
        parts = self._layout.of_recipe(self._recipe, number - 1)
        if drain:
            released = {s.name: self._released(s, part, gradients) for part in parts for s in part.segments}
            whole = [torch.cat([released[s.name] for s in part.segments]) for part in self._layout.dense]
            sections = [Dense(values=x).to_buffer().cpu() for x in whole]
        else:
            sections = [self._encoded(part, number, gradients) for part in parts]
        for memory in {id(part.memory): part.memory for part in parts}.values():
            memory.commit()
        return [*sections, *(_rows(entry, gradients.get(entry.name)) for entry in self._layout.rows)]

    def _encoded(self, part: Part, number: int, gradients: Mapping[str, Tensor]) -> Tensor:
        payloads = []
        for segment in part.segments:
            gradient = self._flat(gradients.get(segment.name), segment, part.dtype)
            seed = part.draw(segment, number, self._who)
            signal = part.memory.compensate(segment.name, gradient, 1.0, seed=seed)
            signal.share, signal.shape = 1.0 if part.memory.stateful else None, segment.shape
            payloads.append(encoded(part.codec, signal, seed=seed))
        whole = part.assembled(payloads)
        lengths, values = [segment.length for segment in part.segments], whole.values.numel()
        rules = (part.codec.scratch, part.memory.scratch, whole.scratch)
        self._scratch = max(self._scratch, *(rule.nbytes(lengths, values) for rule in rules))
        sent = whole.to_buffer().cpu()  # first: a payload may be a view of what waits
        if part.memory.stateful:
            part.memory.retain([segment.name for segment in part.segments], whole)
        return sent

    def _released(self, segment: Segment, part: Part, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return a gradient and all that waits for it."""
        total = self._flat(gradients.get(segment.name), segment, part.dtype).clone()
        for each in part.memory.parts:
            if each.releases and each.waits(segment.name):
                each.release(segment.name, total, 1.0)
        return total

    def _flat(self, gradient: Tensor | None, segment: Segment, dtype: torch.dtype) -> Tensor:
        if gradient is None:
            return torch.zeros(segment.length, dtype=dtype, device=self._device)
        return gradient.reshape(-1)


def check_memories(recipe: Reducer) -> None:
    """Raise MomentumError for a recipe whose momentum needs the trainer's optimizer, which a server's trainer lacks."""
    for memory in (part for each in recipe.memories() for part in each.parts):
        if isinstance(memory, (FadingMomentum, OrthogonalMomentum)):
            raise MomentumError(
                f"this recipe's momentum fades ({type(memory).__name__}), which needs an optimizer on every worker: "
                "use a recipe with error feedback or with momentum correction"
            )
        if isinstance(memory, MomentumCorrection) and memory.momentum is None:
            raise MomentumError("this recipe corrects momentum: give it momentum=, and the server's optimizer none")


def drainable(recipe: Reducer) -> bool:
    """Whether all that waits in this recipe's memories can go out at once."""
    return all(any(part.releases for part in memory.parts) for memory in recipe.memories() if memory.stateful)


LOSS = struct.Struct("<d")
"""At the start of an update, before its sections: the loss that the trainer tells, NaN if it tells none."""


def read_update(
    layout: Layout, recipe: Reducer, trainer: str, number: int, version: int, flags: Flag, body: memoryview
) -> Update:
    """Return the update in a frame's body. Raises FrameError or PayloadError if there is none in it."""
    if len(body) < LOSS.size:
        raise FrameError(f"an update of {len(body)} bytes; expected a loss of {LOSS.size} at its beginning")
    (loss,) = LOSS.unpack_from(body)
    parts = layout.dense if flags & Flag.DRAINED else layout.of_recipe(recipe, number - 1)
    sections = unpack(body[LOSS.size :], len(parts) + len(layout.rows))
    payloads = read_parts(parts, sections[: len(parts)], number)
    rows = [read_table(entry, x) for entry, x in zip(layout.rows, sections[len(parts) :], strict=True)]
    return Update(trainer=trainer, number=number, version=version, loss=loss, parts=parts, payloads=payloads, rows=rows)


@final
class Draining:
    """Says at which updates to drain: at random, every `every` updates on average, the same for the same seed."""

    def __init__(self, every: int | None, seed: int) -> None:
        self._every, self._random = every, random.Random(seed)

    def due(self) -> bool:
        """Whether the next update drains. Call it once for each."""
        return self._every is not None and self._random.random() * self._every < 1


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
        """Return everything. The caller holds the server's lock."""
        if self._codec is not None:
            self._theirs = {dtype: flat.clone() for dtype, flat in self._central.flats.items()}
        sections = self._flats()
        return [*sections, *self._rows(-1)]

    def news(self, number: int) -> "News":
        """Return what the answer to update `number` says. The caller holds the lock; `News.sections` needs none."""
        rows = self._rows(self._version)
        if self._codec is None:
            return News(ready=[*self._flats(), *rows], number=number)
        return News(
            ready=rows,
            number=number,
            parts=self._parts,
            theirs=self._theirs,
            behind={dtype: flat - self._theirs[dtype] for dtype, flat in self._central.flats.items()},
        )

    def _flats(self) -> list[Tensor]:
        return [Dense(values=self._central.flats[part.dtype]).to_buffer().cpu() for part in self._central.layout.dense]

    def _rows(self, since: int) -> list[Tensor]:
        self._version = self._central.version
        pushed = self._central.layout.pushed
        return [table(each, *self._central.changed_since(each, since)).to_buffer().cpu() for each in pushed]


@final
class News:
    """An answer in the making: what was copied under the lock, to be encoded outside it."""

    def __init__(
        self,
        *,
        ready: Sequence[Tensor],
        number: int,
        parts: Sequence[Part] = (),
        theirs: Mapping[torch.dtype, Tensor] | None = None,
        behind: Mapping[torch.dtype, Tensor] | None = None,
    ) -> None:
        self._ready, self._number, self._parts = ready, number, parts
        self._theirs, self._behind = theirs or {}, behind or {}

    def sections(self) -> list[Tensor]:
        """Encode, and note what the trainer will have. Once only."""
        sections = []
        for part in self._parts:
            behind = self._behind[part.dtype]
            payloads = []
            for segment in part.segments:
                signal = Plain(behind[segment.offset : segment.offset + segment.length])
                signal.share, signal.shape = 1.0, segment.shape
                payloads.append(encoded(part.codec, signal, seed=part.draw(segment, self._number)))
            whole = part.assembled(payloads)
            sections.append(whole.to_buffer().cpu())
            whole.write(behind)
            self._theirs[part.dtype].add_(behind)
        return [*sections, *self._ready]


class Base(NamedTuple):
    """What gradients are computed on: the server's version, as it was known when the trainer had joined so often."""

    version: int
    joins: int


@final
class Copy:
    """A trainer's copy of one server's parameters, overwritten only while `open`: not from forward to backward."""

    def __init__(self, layout: Layout, model: nn.Module, codec: Codec | None) -> None:
        self._layout, self.places = layout, Places(layout, model)
        self._parts = None if codec is None else layout.of_codec(codec)
        self._lock, self._opened, self._kept = threading.Lock(), 0, list[Callable[[], None]]()
        self.base = Base(0, 0)
        self._changes: list[int] | None = self._counted()

    def check(self, module: nn.Module) -> None:
        """Raise StateError if parameters of this model or replica have moved. Warn once if others write them."""
        self.places.check(module)
        if self._changes is not None and self._changes != self._counted():
            self._changes = None
            logger.warning(
                "something other than thinwire, such as an optimizer or load_state_dict, has changed parameters that a "
                "server keeps. The server's next answer overwrites the change or, with down=, leaves a difference. "
                "Swapping an average in for evaluation and out again is harmless"
            )

    def _counted(self) -> list[int]:
        """Return how often somebody else has changed each parameter in place: answers do not count."""
        return [p._version for p in self.places.parameters.values()]

    @contextmanager
    def open(self) -> Iterator[None]:
        """Write what has come, and let what comes be written at once."""
        with self._lock:
            self._opened += 1
            for write in self._kept:
                write()
            self._kept.clear()
        try:
            yield
        finally:
            with self._lock:
                self._opened -= 1

    def take(self, body: memoryview, number: int, base: Base, *, whole: bool) -> None:
        """Take in an answer to update `number`, or all; on FrameError or PayloadError nothing has been written."""
        with self._lock:
            if not self._opened:
                body = memoryview(bytearray(body))  # the next frame overwrites it
            write = partial(self._write, *self._read(body, number, whole=whole), base)
            if whole:
                self._kept.clear()
            if self._opened:
                write()
            else:
                self._kept.append(write)

    def _read(
        self, body: memoryview, number: int, *, whole: bool
    ) -> tuple[Sequence[Part], Sequence[Payload], Sequence[Blocks]]:
        parts = self._layout.dense if whole or self._parts is None else self._parts
        sections = unpack(body, len(parts) + len(self._layout.pushed))
        payloads = read_parts(parts, sections[: len(parts)], number)
        rows = [read_table(each, x) for each, x in zip(self._layout.pushed, sections[len(parts) :], strict=True)]
        return parts, payloads, rows

    @torch.no_grad()
    def _write(self, parts: Sequence[Part], payloads: Sequence[Payload], rows: Sequence[Blocks], base: Base) -> None:
        flats = self.places.flats
        for part, payload in zip(parts, payloads, strict=True):
            if parts is self._layout.dense:
                payload.write(flats[part.dtype])
            else:
                change = torch.zeros_like(flats[part.dtype], device="cpu")
                payload.write(change)
                flats[part.dtype].add_(change.to(flats[part.dtype].device))
        for entry, found in zip(self._layout.pushed, rows, strict=True):
            write_rows(self.places.parameters[entry.name], entry, found)
        self.base = base


def _rows(entry: Entry, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        none = torch.zeros((0, *entry.shape[1:]), dtype=entry.dtype)
        keys = torch.zeros((1, 0), dtype=torch.int64)
        gradient = torch.sparse_coo_tensor(keys, none, entry.shape, check_invariants=False)
    gradient = gradient.coalesce()
    return table(entry, gradient.indices()[0], gradient.values()).to_buffer().cpu()
