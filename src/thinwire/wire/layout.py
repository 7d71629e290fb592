"""What a model has to send, which of it travels together, where in a frame's body, and where either side has it.

Both sides derive the same layout from the model and the recipe. So what may come is known to the byte before it comes,
and a payload is read by one of the same layout, which checks it before it writes. A question for rows of a sparse
embedding is their ids, ascending without repeats, named as payloads name their rows (a `Blocks` without values); the
answer is a payload of these rows.
"""

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from thinwire.codecs import Codec, Identity
from thinwire.errors import MomentumError, PayloadError, StateError
from thinwire.exchanges import AllGather
from thinwire.integrations.replicas.asked import sparse_weights
from thinwire.memories import FadingMomentum, MomentumCorrection, NoMemory, OrthogonalMomentum
from thinwire.payloads import Blocks, Payload, indices, wire
from thinwire.reducer import Bucket, Compressed, Reducer, Segment, Segments
from thinwire.reducer.base import words
from thinwire.reducer.compressed import encoded
from thinwire.signals import Plains
from thinwire.wire.frames import LIFE, PIECE, Bytes, FrameError, Kind

_HEAD = 256  # bytes: more than the header of any payload and its padding
_claimed = WeakValueDictionary[int, object]()
"""What of this process is served or trained, by id."""


@final
@dataclass(frozen=True, kw_only=True)
class Entry:
    """A parameter: its name, shape and dtype, and whether its gradient comes as rows of a sparse embedding."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: bool

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return torch.Size(self.shape).numel()

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}{', in rows' if self.rows else ''}"


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name, without the prefix that torch.compile puts before names."""
    return {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters()}


def entries(model: nn.Module) -> list[Entry]:
    """Return the model's parameters that are trained. Raises ValueError if there are none it can send."""
    sparse, own = sparse_weights(model), named(model)
    found = [
        Entry(name=name, shape=tuple(p.shape), dtype=p.dtype, rows=p in sparse)
        for name, p in own.items()
        if p.requires_grad
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no parameters that require gradients")
    at = {name: p.data_ptr() for name, p in own.items()}  # 0 without elements
    last = {place: name for name, place in at.items()}
    if tied := next((name for name, place in at.items() if place and last[place] != name), None):
        raise ValueError(
            f"{tied} and {last[at[tied]]} lie in one memory, and would be trained apart: make them one Parameter, as "
            "in head.weight = embedding.weight"
        )
    places = {str(own[each.name].device): each.name for each in found if not each.rows}
    if len(places) > 1:
        words = " and ".join(f"{name} on {place}" for place, name in places.items())
        raise ValueError(f"{words}: expected one device for all parameters but sparse embeddings; move the model to it")
    if unreal := next((each for each in found if each.dtype.is_complex), None):
        raise ValueError(f"{unreal.name} is complex; keep it as torch.view_as_real")
    if empty := next((each for each in found if not each.numel), None):
        raise ValueError(f"{empty.name} is {empty.shape} and has no elements to send: freeze it")
    return found


def frozen(model: nn.Module) -> str:
    """Return a hash of the parameters that are not trained: nobody sends them, so all must have the same."""
    digest, found = hashlib.sha256(), [(name, p) for name, p in named(model).items() if not p.requires_grad]
    for name, p in found:
        digest.update(f"{name} {tuple(p.shape)} {p.dtype}".encode())
        digest.update(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16] if found else "none"


@contextmanager
def claimed(some: Sequence[tuple[str, object]], by: str) -> Iterator[None]:
    """Within, no other `claimed` of this process may have any of these, which are named. Raises ValueError."""
    if taken := next((name for name, each in some if id(each) in _claimed), None):
        raise ValueError(f"{taken} is in use by another {by}")
    mine = {id(each): each for _, each in some}
    _claimed.update(mine)
    try:
        yield
    finally:
        for each in mine:
            _claimed.pop(each, None)


def shards(parameters: Sequence[Entry], servers: int) -> list[list[Entry]]:
    """Divide parameters, at least one each, among servers: the largest first, to whichever has least so far."""
    if servers > len(parameters):
        raise ValueError(f"{servers} servers for {len(parameters)} parameters; expected at most one server a parameter")
    load, owner = [0] * servers, dict[str, int]()
    for each in sorted(parameters, key=lambda each: (-each.numel, each.name)):
        least = load.index(min(load))
        owner[each.name], load[least] = least, load[least] + max(1, each.numel)
    return [[each for each in parameters if owner[each.name] == i] for i in range(servers)]


def most(entry: Entry) -> int:
    """The most bytes that a table of rows takes: all rows, each named by 8 bytes."""
    return _HEAD + entry.numel * entry.dtype.itemsize + 8 * entry.shape[0]


def table(entry: Entry, keys: Tensor, values: Tensor) -> Tensor:
    """Return rows `values` of a parameter, numbered `keys`, as a section."""
    width = entry.numel // entry.shape[0]
    rows = Blocks(keys=keys.to(torch.int32), values=values.reshape(-1), numel=entry.numel, width=width)
    return rows.to_buffer().cpu()


def read_table(entry: Entry, section: Tensor) -> Blocks:
    """Return the rows that a section holds. Raises PayloadError unless they are rows of this parameter."""
    found, width = Blocks.from_buffer(section), entry.numel // entry.shape[0]
    if (found.numel, found.width, found.values.dtype) != (entry.numel, width, entry.dtype):
        raise PayloadError(
            f"rows of {found.width} {found.values.dtype} for {found.numel} elements; "
            f"expected {width} {entry.dtype} for {entry.numel}, as {entry.name} has"
        )
    return found


def write_rows(parameter: nn.Parameter, entry: Entry, rows: Blocks) -> None:
    """Overwrite these rows of a parameter, wherever it is."""
    weight = parameter.data
    weight.index_copy_(0, rows.keys.long().to(weight.device), rows.values.view(-1, *entry.shape[1:]).to(weight))


def asking(entry: Entry, keys: Tensor) -> Tensor:
    """Return the section that asks for these rows: ids that ascend without repeats."""
    space = entry.shape[0]
    layout = indices.Layout.of_rows(keys.numel(), space)
    head = wire.Header(wire.BLOCKS, entry.dtype, keys.numel(), space, coding=layout.coding)
    return wire.pack(head.pack(), *layout.sections(keys.to(torch.int32)))


def read_ids(entry: Entry, section: Tensor) -> Tensor:
    """Return which rows a section asks for, as int32. Raises PayloadError."""
    head, space = wire.parse(section, wire.BLOCKS, indices.CODINGS), entry.shape[0]
    if head.numel != space or head.count > space:
        raise PayloadError(f"{head.count} of {head.numel} rows; expected some of the {space} that {entry.name} has")
    layout = indices.Layout.of_rows(head.count, space, head.coding)
    wire.check_sections(section, wire.HEADER_BYTES, layout.length)
    return layout.read(section[None, wire.HEADER_BYTES :])[0]


def most_ids(entry: Entry) -> int:
    """The most bytes of such a section: no coding is longer than a bitmap where it is used."""
    return wire.HEADER_BYTES + indices.nbytes(wire.BITMAP, 0, entry.shape[0])


_LATE = 1 << 40
_SHOWN = 400  # characters of a difference, at most
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
            found = self._likes[codec] = self.plain(torch.zeros(self.numel, dtype=self.dtype), number)
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
        self.dense = self._parts(_whole(Identity()))
        self.down = self.dense if down is None else self._parts(_whole(down))
        for step in (0, _LATE):  # now, and after the warm-up
            self._ways(step)

    def up(self, number: int) -> Sequence[Part]:
        """Return the parts of update `number`."""
        ways = self._ways(number - 1)
        key = tuple(map(id, ways.values()))
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._parts(lambda segment: ways[segment.name])
        return known

    def _ways(self, step: int) -> dict[str, Compressed]:
        """Return the memory and codec of each parameter at a step."""
        found = dict[str, Compressed]()
        for _, segment in self.segments:
            way = self.recipe.route(segment, step)
            if not isinstance(way, Compressed):
                raise TypeError(
                    f"{type(way).__name__} computes during its exchange, which a parameter server cannot do; expected "
                    "a recipe with a memory and a codec, such as recipes.dct_dp or recipes.topk"
                )
            found[segment.name] = way
        return found

    def _parts(self, way: Callable[[Segment], Compressed]) -> Sequence[Part]:
        groups: dict[tuple[torch.dtype, int], tuple[Compressed, list[Segment]]] = {}
        for dtype, segment in self.segments:
            groups.setdefault((dtype, id(way(segment))), (way(segment), []))[1].append(segment)
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
            blank.from_buffers(blank.packed[None]).write(torch.empty(part.numel, dtype=part.dtype))

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


def _whole(codec: Codec) -> Callable[[Segment], Compressed]:
    way = Compressed(memory=NoMemory(), codec=codec, exchange=AllGather())
    return lambda _: way


def pack(sections: Sequence[Tensor]) -> list[Bytes]:
    """Return the body of a frame: the length of each section (u64), and the sections (uint8 tensors on the CPU)."""
    lengths = struct.pack(f"<{len(sections)}Q", *(section.numel() for section in sections))
    return [lengths, *(memoryview(section.contiguous().numpy().data) for section in sections)]


def unpack(body: memoryview, count: int) -> list[Tensor]:
    """Return the sections of a body, as views of it. Raises FrameError unless they fill it."""
    if len(body) < 8 * count:
        raise FrameError(f"a body of {len(body)} bytes; expected {count} lengths at its beginning")
    lengths = struct.unpack_from(f"<{count}Q", body)
    if 8 * count + sum(lengths) != len(body):
        raise FrameError(f"sections of {sum(lengths)} bytes in a body of {len(body)}")
    rest = torch.frombuffer(body, dtype=torch.uint8, offset=8 * count) if sum(lengths) else torch.empty(0).byte()
    return list(rest.split(lengths))


def difference(server: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return in what the two differ first, with the server's words for it and the others; None if they agree."""
    for key in {**server, **other}:
        mine, theirs = server.get(key, "absent"), other.get(key, "absent")
        if mine != theirs:
            same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), 0)
            start = max(0, same - _SHOWN // 2)
            return key, _cut(mine, start), _cut(theirs, start)
    return None


def _cut(text: str, start: int = 0) -> str:
    return f"{'… ' * bool(start)}{text[start : start + _SHOWN]}{' …' * (len(text) > start + _SHOWN)}"


def layouts(model: nn.Module, recipe: Reducer, down: Codec | None, *, servers: int, fetch_rows: bool) -> list[Layout]:
    """Return the layout of each server's parameters.

    Raises ValueError without rows to fetch and for too many servers, TypeError for a recipe without a codec, and
    MomentumError for one that needs the trainer's optimizer.
    """
    check_memories(recipe)
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
