"""Rows of sparse embeddings that a trainer asks for: FETCH and ROWS.

FETCH has a section for each embedding that the server holds: coding of the ids (u32), how many they are (u32), and the
ids, ascending without repeats, as payloads name their rows. ROWS has as many: a payload of these rows each. The server
keeps nothing of either.
"""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.errors import PayloadError
from thinwire.payloads import Blocks, indices, wire
from thinwire.wire.frames import Bytes, FrameError
from thinwire.wire.layout import Entry, Layout, most, pack, read_table, unpack

_HEAD = struct.Struct("<II")
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
    wire.check_padding(section[_HEAD.size :], indices.length(coding, count, space))
    return indices.read(coding, section[None, _HEAD.size :], count, space, least=1)[0]
