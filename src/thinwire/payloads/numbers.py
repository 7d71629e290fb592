"""The numbers of a payload on the wire: plain values, or the scales and packed codes of a format."""

import torch
from torch import Tensor

from thinwire.errors import PayloadError
from thinwire.formats import Coded, Format
from thinwire.payloads import wire

Narrow = torch.dtype | Format | None
"""How values travel: None in the gradient's dtype, or in another dtype, or in a format of a few bits."""


def narrowed(x: Tensor, how: Narrow, dtype: torch.dtype, seed: int) -> tuple[Tensor, Coded | None]:
    """Return the values as the receiver will see them, and their codes if they travel as such."""
    if not isinstance(how, Format):
        return x.to(how or dtype), None
    coded = Coded.of(x, how, seed=seed)
    return coded.values(torch.promote_types(dtype, torch.float32)), coded


def joined(parts: list[Coded | None]) -> Coded | None:
    """Return the codes of several payloads as one, or None if there are none."""
    coded = [part for part in parts if part is not None]
    return Coded.cat(coded) if coded else None


def sections(values: Tensor, coded: Coded | None) -> tuple[Tensor, ...]:
    """Return what travels."""
    return (values,) if coded is None else (coded.scales, coded.packed())


def lengths(values: Tensor, coded: Coded | None) -> tuple[int, ...]:
    """Return the length of each section in bytes, without padding."""
    if coded is None:
        return (values.nbytes,)
    return (coded.scales.nbytes, -(-coded.codes.numel() * coded.format.bits // 8))


def nbytes(values: Tensor, coded: Coded | None) -> int:
    """Return the length of all sections in bytes, padding included."""
    return sum(map(wire.padded, lengths(values, coded)))


def header(
    kind: int, values: Tensor, coded: Coded | None, count: int, numel: int, coding: int = wire.NUMBERS
) -> Tensor:
    """Return the header for these numbers; `count` is of what the kind counts."""
    dtype, bits = (values.dtype, 0) if coded is None else (None, coded.format.bits)
    return wire.Header(kind, dtype, count, numel, bits, coding).pack(values.device)


def read(rows: Tensor, values: Tensor, coded: Coded | None) -> Tensor:
    """Return the numbers of every rank, (ranks, count), from sections like those of `values` at the start of `rows`.

    Raises PayloadError when malformed.
    """
    if coded is None:
        return plain(rows, values.numel(), values.dtype)
    own, packed = lengths(values, coded)
    wire.check_padding(rows, own, packed)
    start = wire.padded(own)
    parts = [_unpack(row[:own], row[start : start + packed], coded) for row in rows]
    return torch.stack([part.values(values.dtype) for part in parts])


def plain(rows: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return `count` numbers of every rank, (ranks, count), from sections at the start of `rows`."""
    nbytes = count * dtype.itemsize
    wire.check_padding(rows, nbytes)
    # Cloned, as a single row would else remain a view of the buffer.
    return rows[:, :nbytes].clone(memory_format=torch.contiguous_format).view(-1).view(dtype).view(rows.shape[0], count)


def _unpack(scales: Tensor, packed: Tensor, like: Coded) -> Coded:
    return Coded.unpack(packed.contiguous(), scales.clone().view(torch.float32), like.runs, like.format)


def check_plain(head: wire.Header) -> torch.dtype:
    """Return the dtype of values. Raises PayloadError where they are codes, whose format a buffer does not tell."""
    if head.dtype is None:
        raise PayloadError("the values are codes of a format, which only a payload of the same recipe can read")
    return head.dtype
