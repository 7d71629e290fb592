"""Sections of a frame's body: payloads and rows, one after the other.

A question for rows of a sparse embedding is their ids, ascending without repeats, named as payloads name their rows (a
`Blocks` without values); the answer is a payload of these rows.
"""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thinwire.errors import PayloadError
from thinwire.payloads import Blocks, indices, wire
from thinwire.wire.frames import Bytes, FrameError
from thinwire.wire.parameters import Entry

_HEAD = 256  # bytes: more than the header of any payload and its padding


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
    none = torch.empty(0, dtype=torch.uint8, device="cpu")
    rest = torch.frombuffer(body, dtype=torch.uint8, offset=8 * count) if sum(lengths) else none
    return list(rest.split(lengths))


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


def most_ids(entry: Entry) -> int:
    """The most bytes of such a section: no coding is longer than a bitmap where it is used."""
    return wire.HEADER_BYTES + indices.nbytes(wire.BITMAP, 0, entry.shape[0])


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
