"""Rows of sparse embeddings that a trainer asks for: FETCH and ROWS, how a server answers, and what a trainer has.

FETCH has a section for each embedding that the server holds: coding of the ids (u32), how many they are (u32), and the
ids, ascending without repeats, as payloads name their rows. ROWS has as many: a payload of these rows each. The server
keeps nothing of either.
"""

import struct
import threading
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from thinwire.errors import PayloadError
from thinwire.payloads import Blocks, indices, wire
from thinwire.server.central import Central
from thinwire.server.frames import FrameError
from thinwire.server.layout import Bytes, Entry, Layout, most, pack, read_table, table, unpack, write_rows

_HEAD = struct.Struct("<II")
_NEVER = -1
_CODINGS = (wire.NUMBERS, wire.BITMAP, wire.ELIAS_FANO)


def question(layout: Layout, keys: Sequence[Tensor]) -> list[Bytes]:
    """Return the body of FETCH for these rows of each embedding: ids that ascend without repeats."""
    return pack([_named(entry, x) for entry, x in zip(layout.fetched, keys, strict=True)])


def read_question(layout: Layout, body: memoryview) -> list[Tensor]:
    """Return which rows of each embedding FETCH asks for, as int32. Raises FrameError or PayloadError."""
    return [_read_named(entry, x) for entry, x in zip(layout.fetched, unpack(body, len(layout.fetched)), strict=True)]


def longest_question(layout: Layout) -> int:
    """Return the most bytes that the body of FETCH can have: no coding is longer than a bitmap where it is used."""
    bitmaps = sum(indices.nbytes(wire.BITMAP, 0, entry.shape[0]) for entry in layout.fetched)
    return (8 + _HEAD.size) * len(layout.fetched) + bitmaps


def rows_for(central: Central, lock: threading.Condition, body: memoryview) -> tuple[int, list[Bytes]]:
    """Return the parameters' version, and the body of ROWS that answers FETCH, encoded outside the lock."""
    fetched = central.layout.fetched
    keys = read_question(central.layout, body)
    with lock:
        version = central.version
        values = [central.picked(entry, x) for entry, x in zip(fetched, keys, strict=True)]
    return version, pack([table(*each).to_buffer() for each in zip(fetched, keys, values, strict=True)])


def read_answer(layout: Layout, keys: Sequence[Tensor], body: memoryview) -> list[Blocks]:
    """Return the rows in the body of ROWS. Raises FrameError or PayloadError unless they are those of `keys`."""
    sections = unpack(body, len(layout.fetched))
    found = [read_table(entry, x) for entry, x in zip(layout.fetched, sections, strict=True)]
    for entry, asked, rows in zip(layout.fetched, keys, found, strict=True):
        if not torch.equal(rows.keys.long(), asked.long()):
            raise PayloadError(f"{rows.keys.numel()} rows of {entry.name}; expected the {asked.numel()} asked for")
    return found


def longest_answer(layout: Layout) -> int:
    """Return the most bytes that the body of ROWS can have."""
    return 8 * len(layout.fetched) + sum(map(most, layout.fetched))


def _named(entry: Entry, keys: Tensor) -> Tensor:
    count, space = keys.numel(), entry.shape[0]
    coding = indices.shortest(count, space, _CODINGS)
    section = indices.section(coding, keys.to(torch.int32), space)
    found = torch.zeros(_HEAD.size + indices.nbytes(coding, count, space), dtype=torch.uint8)
    found[: _HEAD.size] = wire.on(_HEAD.pack(coding, count), found.device)
    found[_HEAD.size : _HEAD.size + section.nbytes].view(section.dtype).copy_(section)
    return found


def _read_named(entry: Entry, section: Tensor) -> Tensor:
    coding, count = _HEAD.unpack(bytes(section[: _HEAD.size].tolist()).ljust(_HEAD.size, b"\xff"))
    space = entry.shape[0]
    if coding not in _CODINGS or count > space:
        raise FrameError(f"{count} ids of {entry.name} in coding {coding}; expected at most {space} in {_CODINGS}")
    length = _HEAD.size + indices.nbytes(coding, count, space)
    if section.numel() != length:
        raise FrameError(f"{section.numel()} bytes for {count} ids of {entry.name}; expected {length}")
    keys = indices.read(coding, section[None, _HEAD.size :], count, space)[0]
    indices.check_ascending(keys, strictly=True)
    return keys


def wanted(parameters: Sequence[Entry], given: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return the ids given, as ascending int64 on the CPU, or all; TypeError or ValueError for those that cannot be."""
    known = {each.name: each for each in parameters}
    if not known:
        raise ValueError("rows come with every answer here: pass fetch_rows=True to serve and connect, or fetch none")
    if given is None:
        return {name: torch.arange(each.shape[0]) for name, each in known.items()}
    if strange := given.keys() - known.keys():
        raise ValueError(f"{min(strange)!r} has no rows to fetch; expected some of {', '.join(map(repr, known))}")
    return {name: _ids(known[name], ids) for name, ids in given.items()}


def _ids(entry: Entry, ids: Tensor) -> Tensor:
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids of {entry.name} are {ids.dtype}; expected int64 or int32: call .long() on them")
    found = ids.detach().reshape(-1).cpu().long().unique()
    if found.numel() and not 0 <= int(found[0]) <= int(found[-1]) < entry.shape[0]:
        raise ValueError(
            f"ids of {entry.name} reach from {int(found[0])} to {int(found[-1])}; expected 0 to {entry.shape[0] - 1}: "
            "pass the ids that its embedding looks up, offsets included"
        )
    return found


@final
class Rows:
    """A trainer's copy of the rows that it fetches from one server, and the version of each: 8 bytes a row."""

    def __init__(self, layout: Layout, model: nn.Module) -> None:
        self.layout, self.count = layout, 0
        self._parameters = [model.get_parameter(each.name) for each in layout.fetched]
        self._versions = [torch.full(each.shape[:1], _NEVER, dtype=torch.int64) for each in layout.fetched]

    def among(self, ids: Mapping[str, Tensor]) -> list[Tensor]:
        """Return those of `ids` that this server has, in its order; nothing if there are none."""
        none = torch.empty(0, dtype=torch.int64)
        found = [ids.get(each.name, none) for each in self.layout.fetched]
        return found if any(each.numel() for each in found) else []

    @torch.no_grad()
    def take(self, keys: Sequence[Tensor], body: memoryview, version: int) -> None:
        """Write an answer. Raises FrameError or PayloadError, and then nothing has been written."""
        found = read_answer(self.layout, keys, body)
        for i, (entry, rows) in enumerate(zip(self.layout.fetched, found, strict=True)):
            write_rows(self._parameters[i], entry, rows)
            self._versions[i][keys[i]] = version
            self.count += keys[i].numel()

    def rejoined(self, version: int) -> None:
        """Note that a server has gone back to this version: nothing that is here is newer."""
        for each in self._versions:
            each.clamp_(max=version)

    def oldest(self, version: int, gradients: Mapping[str, Tensor]) -> int:
        """Return the version of the oldest values under these gradients; ValueError for rows never fetched."""
        found = [version] if self.layout.sizes else []
        for entry, versions in zip(self.layout.fetched, self._versions, strict=True):
            if (gradient := gradients.get(entry.name)) is not None and (keys := gradient._indices()[0].cpu()).numel():
                found.append(int(versions[keys].min()))
                if found[-1] == _NEVER:
                    never = keys[versions[keys] == _NEVER].unique()
                    raise ValueError(
                        f"{entry.name} has gradients for {never.numel()} rows that were never fetched, such as row "
                        f"{int(never[0])}: call trainer.fetch({{{entry.name!r}: ids}}) with the batch's ids before the "
                        "forward pass"
                    )
        return min(found, default=version)


@final
class Fetches:
    """What was asked of one server and has not come. The caller holds the channel's lock."""

    def __init__(self) -> None:
        self._latest, self._open = 0, dict[int, Sequence[Tensor]]()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, number: int) -> bool:
        return number in self._open

    def add(self, keys: Sequence[Tensor]) -> int:
        """Note a question, and return its number."""
        self._latest += 1
        self._open[self._latest] = keys
        return self._latest

    @property
    def oldest(self) -> int:
        """The number of the question that has waited longest; there must be one."""
        return next(iter(self._open))

    def keys(self, number: int) -> Sequence[Tensor]:
        """Return what was asked. Raises FrameError if that question is not open. Needs no lock."""
        if (found := self._open.get(number)) is None:
            raise FrameError(f"rows for question {number}, which is not open")
        return found

    def done(self, number: int) -> None:
        """Note that the answer has come."""
        del self._open[number]
