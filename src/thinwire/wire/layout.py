"""What a model has to send, which of it travels together, where in a frame's body, and where either side has it.

Both sides derive the same layout from the model and the recipe. So what may come is known to the byte before it comes,
and a payload is read by one of the same layout, which checks it before it writes.
"""

import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import final

import torch
from torch import Tensor, nn

from thinwire.codecs import Codec, Identity
from thinwire.errors import MomentumError, StateError
from thinwire.exchanges import AllGather
from thinwire.integrations.attachments.assembly import check_names
from thinwire.memories import FadingMomentum, MomentumCorrection, NoMemory, OrthogonalMomentum
from thinwire.payloads import Blocks, Payload
from thinwire.reducer import Bucket, Compressed, Reducer, Segment, Segments
from thinwire.reducer.base import words
from thinwire.reducer.compressed import encoded
from thinwire.signals import Plains
from thinwire.waits import refuse_unfit
from thinwire.wire.frames import LIFE, PIECE, Kind
from thinwire.wire.parameters import Entry, claimed, entries, frozen, named, shards
from thinwire.wire.sections import most, most_ids, read_table, unpack

_LATE = 1 << 40
_MANY = 8  # of what a density has that changes with every step


@final
class Part:
    """Parameters of one dtype that go one way, in one payload: `segments` of a vector of `numel` elements."""

    def __init__(self, way: Compressed, segments: Segments, dtype: torch.dtype, numel: int) -> None:
        together = way.codec.elementwise and not way.memory.stateful
        self.way, self.segments = way, segments.coalesced if together else segments
        self.dtype, self.numel = dtype, numel
        self._likes: dict[Codec, Payload] = {}

    def encode(self, bucket: Bucket, number: int, who: str) -> Payload:
        """Return what is sent in update `number`, and retain the rest; `who` seeds a trainer's own draws."""
        own, shared = self._seeds(number, who), self._seeds(number)
        return self.way.encode(bucket, number - 1, own=own, shared=shared)

    def plain(self, flat: Tensor, number: int) -> Payload:
        """Return what is sent of a vector, where no memory keeps the rest."""
        bucket, codec = self.bucket(flat), self.way.codec.at(number - 1)
        return encoded(codec, Plains(bucket.views()), bucket, seeds=self._seeds(number), share=1.0)

    def like(self, number: int) -> Payload:
        """Return a payload laid out like that of update `number`."""
        codec = self.way.codec.at(number - 1)
        if (found := self._likes.get(codec)) is None or codec.shared_seed:
            if len(self._likes) >= _MANY:
                self._likes.clear()
            found = self._likes[codec] = self.plain(torch.zeros(self.numel, dtype=self.dtype, device="cpu"), number)
        return found

    def write(self, payload: Payload, flat: Tensor, *, whole: bool) -> None:
        """Write what was sent into this part of a vector or, if it is not the `whole`, add it."""
        if whole:
            payload.write(flat)
        else:
            change = torch.zeros_like(flat, device="cpu")
            payload.write(change)
            flat.add_(change.to(flat.device))

    def bucket(self, flat: Tensor) -> Bucket:
        """Return this part of a vector."""
        return Bucket(flat=flat, segments=self.segments)

    def _seeds(self, number: int, who: str = "") -> list[int]:
        return [zlib.crc32(f"{number}/{name}/{who}".encode()) for name in self.segments.names]


@final
class Layout:
    """The layout of one server's parameters, and how they travel: up by `recipe`, down by a codec or whole.

    All that are not sent as rows lie in one flat vector for each dtype: `sizes` are their lengths. `rows` are the
    others. Of these, `pushed` come down with every answer, and `fetched` when a trainer asks: one of the two is empty.
    `agreed` says in words what both sides must have in common. Raises TypeError for a recipe without memory and codec.
    """

    def __init__(
        self,
        parameters: Sequence[Entry],
        recipe: Reducer,
        down: Codec | None = None,
        *,
        fetch_rows: bool = False,
        agreed: Mapping[str, str] | None = None,
    ) -> None:
        self.parameters, self.recipe, self.agreed = parameters, recipe, agreed or {}
        self.rows = [each for each in parameters if each.rows]
        self.pushed, self.fetched = ([], self.rows) if fetch_rows else (self.rows, [])
        self.sizes: dict[torch.dtype, int] = {}
        self.segments: list[tuple[torch.dtype, Segment]] = []
        for each in parameters:
            if not each.rows:
                start = self.sizes.get(each.dtype, 0)
                segment = Segment(name=each.name, offset=start, length=each.numel, shape=each.shape)
                self.segments.append((each.dtype, segment))
                self.sizes[each.dtype] = start + each.numel
        self._known: dict[tuple[int, ...], Sequence[Part]] = {}
        self.dense = self._whole(Identity())
        self.down = self.dense if down is None else self._whole(down)
        for step in (0, _LATE):  # now, and after the warm-up
            self._ways(step)

    def up(self, number: int) -> Sequence[Part]:
        """Return the parts of update `number`."""
        ways = self._ways(number - 1)
        key = tuple(map(id, ways))
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._parts(ways)
        return known

    def _ways(self, step: int) -> list[Compressed]:
        """Return the memory and codec of each segment at a step."""
        found = list[Compressed]()
        for _, segment in self.segments:
            way = self.recipe.route(segment, step)
            if not isinstance(way, Compressed):
                raise TypeError(
                    f"{type(way).__name__} computes during its exchange, which a parameter server cannot do; expected "
                    "a recipe with a memory and a codec, such as recipes.dct_dp or recipes.topk"
                )
            found.append(way)
        return found

    def _whole(self, codec: Codec) -> Sequence[Part]:
        """Return the parts that have no memory, and one codec for all."""
        return self._parts([Compressed(memory=NoMemory(), codec=codec, exchange=AllGather())] * len(self.segments))

    def _parts(self, ways: Sequence[Compressed]) -> Sequence[Part]:
        groups: dict[tuple[torch.dtype, int], tuple[Compressed, list[Segment]]] = {}
        for (dtype, segment), way in zip(self.segments, ways, strict=True):
            groups.setdefault((dtype, id(way)), (way, []))[1].append(segment)
        return [Part(its, Segments(some), dtype, self.sizes[dtype]) for (dtype, _), (its, some) in groups.items()]

    def of(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return these parameters of a model, by name."""
        own = named(model)
        return {each.name: own[each.name] for each in self.parameters}

    def claimed(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within, no other serve or connect of this process may use these parameters. Raises ValueError."""
        return claimed([*self.of(model).items()], "serve or connect of this process: give each a model of its own")

    def flats(self, device: torch.device | None = None) -> tuple[dict[torch.dtype, Tensor], dict[str, Tensor]]:
        """Return new vectors of zeros, and each parameter's place in them."""
        flats = {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in self.sizes.items()}
        views = ((s, flats[dtype][s.offset : s.offset + s.length]) for dtype, s in self.segments)
        return flats, {segment.name: view.view(segment.shape) for segment, view in views}

    def compile(self) -> None:
        """Compile the kernels that read payloads now, so that no trainer waits for it later."""
        for part in {*self.up(1), *self.down, *self.dense}:
            blank = part.like(1)
            blank.from_buffers(blank.packed[None]).write(torch.empty(part.numel, dtype=part.dtype, device="cpu"))

    def read(
        self, body: memoryview, parts: Sequence[Part], rows: Sequence[Entry], number: int = 1
    ) -> tuple[list[Payload], list[Blocks]]:
        """Return the payloads and the rows in a body. Raises FrameError or PayloadError."""
        sections = unpack(body, len(parts) + len(rows))
        payloads = [part.like(number).from_buffers(x[None]) for part, x in zip(parts, sections, strict=False)]
        return payloads, [read_table(each, x) for each, x in zip(rows, sections[len(parts) :], strict=True)]

    @property
    def asked(self) -> dict[Kind, int]:
        """What a trainer that has joined may say, and the most bytes of it."""
        rows = {Kind.FETCH: sum(8 + most_ids(each) for each in self.fetched)} if self.fetched else {}
        return {Kind.PING: 0, Kind.BYE: 0, Kind.UPDATE: self._most(self.up(1), self.rows), **rows}

    @property
    def told(self) -> dict[Kind, int]:
        """What its server may say, and the most bytes of it."""
        parameters = LIFE.size + self._most(self.down, self.pushed)
        rows, end = sum(8 + most(each) for each in self.fetched), 1 << 16
        some = {Kind.JOIN: parameters, Kind.UPDATE: parameters, Kind.FETCH: rows, Kind.END: end}
        return {Kind.PING: 0, Kind.BYE: 0, **some}

    @property
    def messages(self) -> int:
        """The most messages of an update: its head, and the pieces of each section."""
        return 4 + len(self.parameters) + self.asked[Kind.UPDATE] // PIECE

    def _most(self, parts: Sequence[Part], rows: Sequence[Entry]) -> int:
        """Return the most bytes of a body: a density may grow to all elements, each with an index of 8 bytes."""
        compressed, whole = (sum(part.like(1).nbytes for part in each) for each in (parts, self.dense))
        return 8 * (len(self.segments) + len(rows)) + max(compressed, 3 * whole) + sum(map(most, rows))


@final
class Places:
    """The places of the parameters in the user's model: all but rows become views of `flats`, one for each dtype.

    `device`: where these are; None if all parameters are rows.
    """

    def __init__(self, layout: Layout, model: nn.Module) -> None:
        self.parameters = layout.of(model)
        self.device = next((self.parameters[each.name].device for _, each in layout.segments), None)
        self.flats, views = layout.flats(self.device)
        for name, view in views.items():
            view.copy_(self.parameters[name].detach())
            self.parameters[name].data = view
        self._storage = {name: p.detach() for name, p in self.parameters.items()}  # kept, or its address may come again

    def check(self, module: nn.Module) -> None:
        """Raise StateError unless the model, or this replica of it, still has its parameters where they were."""
        found = named(module)
        for name, at in self._storage.items():
            p = found.get(name)
            wrong = "removed" if p is None else "frozen" if not p.requires_grad else ""
            if wrong or p is None or p.data_ptr() != at.data_ptr() or p.dtype is not at.dtype:
                raise StateError(
                    f"{name} was {wrong or 'moved'} after serve or connect, so it would not be trained correctly. "
                    "Change dtype and device, freeze, and load with assign=True before serve or connect; or load in "
                    "place"
                )


def layouts(model: nn.Module, recipe: Reducer, down: Codec | None, *, servers: int, fetch_rows: bool) -> list[Layout]:
    """Return the layout of each server's parameters.

    Raises ValueError without rows to fetch, for too many servers, an unknown name, and a `down` whose errors add up;
    TypeError for a recipe without a codec, and MomentumError for one that needs the trainer's optimizer.
    """
    refuse_unfit("parameters are laid out", "serve and connect before")
    check_memories(recipe)
    check_names(recipe, named(model))
    _check_down(down)
    parameters = entries(model)
    if fetch_rows and not any(each.rows for each in parameters):
        raise ValueError(
            "fetch_rows=True, and the model has no rows to fetch: make its embeddings with sparse=True, or drop it"
        )
    same = {"recipe": words(recipe), "down": words(down), "fetch_rows": str(fetch_rows)}
    same["what is frozen (its hash)"] = frozen(model)
    found = []
    for i, mine in enumerate(shards(parameters, servers)):
        place = {"the place among the servers": f"{i} of {servers}"}
        agreed = same | place | {f"parameter {each.name}": str(each) for each in mine}
        found.append(Layout(mine, recipe, down, fetch_rows=fetch_rows, agreed=agreed))
    return found


def _check_down(down: Codec | None) -> None:
    """Raise ValueError for a codec whose error is larger than what it encodes: what answers leave out would grow."""
    x = torch.randn(1 << 12, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    sent = x.clone()
    if down is not None:
        down.at(0).encode(x).write(sent)
    if not (x - sent).norm() <= x.norm():
        raise ValueError(
            f"down is {down}, whose error is larger than the change that it sends, and errors add up: trainers would "
            "drift away from the server; expected a codec for error feedback, such as codecs.TopK(density=0.02)"
        )


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
