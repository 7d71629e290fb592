"""What a model has to send: its parameters, as both sides name them, and rows of those that are sparse embeddings.

A question for rows is their ids, ascending without repeats, named as payloads name their rows (a `Blocks` without
values); the answer is a payload of these rows.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from thinwire.errors import PayloadError
from thinwire.integrations.replicas.asked import sparse_weights
from thinwire.payloads import Blocks, indices, wire

_HEAD = 256  # bytes: more than the header of any payload and its padding
_CODINGS = (wire.NUMBERS, wire.BITMAP, wire.ELIAS_FANO)
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
    coding = indices.shortest(keys.numel(), space, _CODINGS)
    head = wire.Header(wire.BLOCKS, entry.dtype, keys.numel(), space, coding=coding)
    return wire.pack(head.pack(), indices.section(coding, keys.to(torch.int32), space, least=1))


def read_ids(entry: Entry, section: Tensor) -> Tensor:
    """Return which rows a section asks for, as int32. Raises PayloadError."""
    head, space = wire.parse(section, wire.BLOCKS), entry.shape[0]
    wire.check_coding(head.coding, _CODINGS)
    if head.numel != space or head.count > space:
        raise PayloadError(f"{head.count} of {head.numel} rows; expected some of the {space} that {entry.name} has")
    wire.check_sections(section, wire.HEADER_BYTES, indices.length(head.coding, head.count, space))
    return indices.read(head.coding, section[None, wire.HEADER_BYTES :], head.count, space, least=1)[0]


def most_ids(entry: Entry) -> int:
    """The most bytes of such a section: no coding is longer than a bitmap where it is used."""
    return wire.HEADER_BYTES + indices.nbytes(wire.BITMAP, 0, entry.shape[0])
