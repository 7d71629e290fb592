"""Which parameters travel together, and where in a frame's body.

Both sides derive the same layout from the model and the recipe. So what may come is known to the byte before it comes,
and a payload is read by one of the same layout, which checks it before it writes.
"""

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn

from thinwire.codecs import Codec, Identity
from thinwire.errors import PayloadError
from thinwire.integrations.replicas.managed import sparse_weights
from thinwire.memories import Memory, NoMemory
from thinwire.payloads import Blocks, Payload
from thinwire.reducer import Compressed, Reducer, Segment
from thinwire.wire.frames import Bytes, FrameError

_HEAD = 256  # bytes: more than the header of any payload and its padding
_NOTHING = NoMemory()
_LATE = 1 << 40


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
    """Return the model's parameters that are trained. Raises ValueError if there are none, or one is empty."""
    sparse = sparse_weights(model)
    found = [
        Entry(name=name, shape=tuple(p.shape), dtype=p.dtype, rows=p in sparse)
        for name, p in named(model).items()
        if p.requires_grad
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no parameters that require gradients")
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


def shards(parameters: Sequence[Entry], servers: int) -> list[list[Entry]]:
    """Divide parameters, at least one each, among servers: the largest first, to whichever has least so far."""
    if servers > len(parameters):
        raise ValueError(f"{servers} servers for {len(parameters)} parameters; expected at most one server a parameter")
    load, owner = [0] * servers, dict[str, int]()
    for each in sorted(parameters, key=lambda each: (-each.numel, each.name)):
        least = load.index(min(load))
        owner[each.name], load[least] = least, load[least] + max(1, each.numel)
    return [[each for each in parameters if owner[each.name] == i] for i in range(servers)]


@final
@dataclass(frozen=True, kw_only=True)
class Part:
    """Parameters of one dtype whose gradients travel in one payload: `segments` of a vector of `numel` elements."""

    memory: Memory
    codec: Codec
    segments: tuple[Segment, ...]
    numel: int
    dtype: torch.dtype

    def assembled(self, payloads: Sequence[Payload]) -> Payload:
        """Place the payloads of the segments side by side."""
        return type(payloads[0]).assemble(payloads, [segment.offset for segment in self.segments], self.numel)

    def draw(self, segment: Segment, number: int, who: str = "") -> int:
        """Return the seed of an update's segment: the same for all, unless the codec lets each `who` draw alone."""
        return zlib.crc32(f"{number}/{segment.name}/{'' if self.codec.shared_seed else who}".encode())

    def like(self, number: int = 0) -> Payload:
        """Return a payload laid out like that of update `number`."""
        if not self.codec.shared_seed:
            return self._like
        return self._blank(number)

    @cached_property
    def _like(self) -> Payload:
        return self._blank(0)

    def _blank(self, number: int) -> Payload:
        return self.assembled(
            [
                self.codec.encode(torch.zeros(segment.shape, dtype=self.dtype), seed=self.draw(segment, number))
                for segment in self.segments
            ]
        )


@final
class Layout:
    """The layout of one server's parameters.

    All that are not sent as rows lie in one flat vector for each dtype: `sizes` are their lengths. `rows` are the
    others. Of these, `pushed` come down with every answer, and `fetched` when a trainer asks: one of the two is empty.
    """

    def __init__(self, parameters: Sequence[Entry], *, fetch_rows: bool = False) -> None:
        self.parameters = parameters
        self.rows = [each for each in parameters if each.rows]
        self.pushed, self.fetched = ([], self.rows) if fetch_rows else (self.rows, [])
        self.sizes: dict[torch.dtype, int] = {}
        self._placed: list[tuple[Entry, Segment]] = []
        for each in parameters:
            if not each.rows:
                start = self.sizes.get(each.dtype, 0)
                segment = Segment(name=each.name, offset=start, length=each.numel, shape=each.shape)
                self._placed.append((each, segment))
                self.sizes[each.dtype] = start + each.numel
        self.dense = self.parts(lambda segment: (_NOTHING, Identity()))
        self._known: dict[tuple[tuple[int, Codec], ...], tuple[Part, ...]] = {}

    def segments(self) -> Iterable[tuple[torch.dtype, Segment]]:
        """Return each parameter's place: the dtype of its vector, and the segment of it."""
        return [(entry.dtype, segment) for entry, segment in self._placed]

    def parts(self, how: Callable[[Segment], tuple[Memory, Codec]]) -> tuple[Part, ...]:
        """Return the parts if each segment goes through the memory and the codec that `how` returns."""
        groups: dict[tuple[torch.dtype, int, Codec], tuple[Memory, list[Segment]]] = {}
        for entry, segment in self._placed:
            memory, codec = how(segment)
            groups.setdefault((entry.dtype, id(memory), codec), (memory, []))[1].append(segment)
        return tuple(
            Part(memory=memory, codec=codec, segments=tuple(found), numel=self.sizes[dtype], dtype=dtype)
            for (dtype, _, codec), (memory, found) in groups.items()
        )

    def check(self, recipe: Reducer) -> None:
        """Raise TypeError if a recipe, now or after its warm-up, has something without memory and codec."""
        for _, segment in self._placed:
            for step in (0, _LATE):
                line(recipe, segment, step)

    def compile(self, recipe: Reducer, codec: Codec | None) -> None:
        """Compile the kernels that read payloads now, so that no trainer waits for it later."""
        for part in (*self.of_recipe(recipe, 0), *(self.of_codec(codec) if codec else ()), *self.dense):
            blank = part.like()
            blank.from_buffers(blank.to_buffer()[None]).write(torch.empty(part.numel, dtype=part.dtype))

    def of_recipe(self, recipe: Reducer, step: int) -> tuple[Part, ...]:
        """Return the parts of a recipe at a step."""
        lines = {segment.name: line(recipe, segment, step) for _, segment in self._placed}
        chosen = {name: (each.memory, each.codec.at(step)) for name, each in lines.items()}
        key = tuple((id(memory), codec) for memory, codec in chosen.values())
        if (known := self._known.get(key)) is None:
            if len(self._known) >= 8:  # a density that changes with every step
                self._known.clear()
            known = self._known[key] = self.parts(lambda segment: chosen[segment.name])
        return known

    def of_codec(self, codec: Codec) -> tuple[Part, ...]:
        """Return the parts if everything goes through one codec."""
        return self.parts(lambda segment: (_NOTHING, codec))

    def limit(self, parts: Sequence[Part], rows: Sequence[Entry]) -> int:
        """Return the most bytes of such a body: a density may grow to all elements, each with an index of 8 bytes."""
        sections = len(self._placed) + len(rows)
        compressed, whole = (sum(part.like().nbytes for part in each) for each in (parts, self.dense))
        return 8 * sections + max(compressed, 3 * whole) + sum(map(most, rows))


def most(entry: Entry) -> int:
    """The most bytes that a table of rows takes: all rows, each named by 8 bytes."""
    return _HEAD + entry.numel * entry.dtype.itemsize + 8 * entry.shape[0]


def line(recipe: Reducer, segment: Segment, step: int) -> Compressed:
    """Return the memory and codec of a parameter at a step; TypeError for a recipe that computes while it exchanges."""
    found = recipe.route(segment, step)
    if isinstance(found, Compressed):
        return found
    raise TypeError(
        f"{type(found).__name__} computes during its exchange, which a parameter server cannot do; expected a recipe "
        "with a memory and a codec, such as recipes.dct_dp or recipes.topk"
    )


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


def read_parts(parts: Sequence[Part], sections: Sequence[Tensor], number: int = 0) -> list[Payload]:
    """Return the payload of each section. Raises PayloadError for one that is not laid out like its part."""
    return [part.like(number).from_buffers(section[None]) for part, section in zip(parts, sections, strict=True)]


def table(entry: Entry, keys: Tensor, values: Tensor) -> Blocks:
    """Return rows `values` of a parameter, numbered `keys`, as a payload."""
    width = entry.numel // max(1, entry.shape[0])
    return Blocks(keys=keys.to(torch.int32), values=values.reshape(-1), numel=entry.shape[0] * width, width=width)


def read_table(entry: Entry, section: Tensor) -> Blocks:
    """Return the rows that a section holds. Raises PayloadError unless they are rows of this parameter."""
    found = Blocks.from_buffer(section)
    width = entry.numel // max(1, entry.shape[0])
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
