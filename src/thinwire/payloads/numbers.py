"""The numbers of a payload on the wire: plain values, or the scales and packed codes of a format."""

import torch
from torch import Tensor

from thinwire.errors import PayloadError
from thinwire.formats import Coded, Format
from thinwire.payloads import wire

Narrow = torch.dtype | Format | None
"""How values travel: None in the gradient's dtype, or in another dtype, or in a format of a few bits."""


def narrowed(
    x: Tensor, how: Narrow, dtype: torch.dtype, seed: int, share: float | None = None
) -> tuple[Tensor, Coded | None]:
    """Return the values as the receiver will see them, and their codes if they travel as such.

    Values of a narrower dtype are cut to a `share` of its range (see `fitted`); without one they overflow, and that is
    seen.
    """
    if not isinstance(how, Format):
        return x.to(how or dtype) if share is None else fitted(x, how or dtype, share), None
    coded = Coded.of(x, how, seed=seed)
    return coded.values(torch.promote_types(dtype, torch.float32)), coded


def fitted(x: Tensor, dtype: torch.dtype, share: float = 1.0) -> Tensor:
    """Return `x` in `dtype`, what is finite and beyond a share 1/K of its range cut to that: to b = max / (K·(1 + u)ᴷ).

    So no sum of K such values overflows, in whatever order it is rounded by up to u of itself. A dtype of the same
    range, but for half, cuts nothing. NaN and infinities stay.
    """
    range_ = torch.finfo(dtype)
    if range_.max > torch.finfo(x.dtype).max / 2:
        return x.to(dtype)
    bound = range_.max * share / (1 + range_.eps / 2) ** (1 / share)
    return torch.where(x.isinf(), x, x.clamp(-bound, bound)).to(dtype)


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


def read(buffers: Tensor, values: Tensor, coded: Coded | None) -> Tensor:
    """Return the numbers of every rank, (ranks, count), from sections like those of `values` at the start of `buffers`.

    Raises PayloadError when malformed.
    """
    if coded is None:
        return plain(buffers, values.numel(), values.dtype)
    own, packed = lengths(values, coded)
    wire.check_padding(buffers, own, packed)
    start = wire.padded(own)
    parts = [_unpack(buffer[:own], buffer[start : start + packed], coded) for buffer in buffers]
    return torch.stack([part.values(values.dtype) for part in parts])


def plain(buffers: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return `count` numbers of every rank, (ranks, count), from sections at the start of `buffers`."""
    nbytes = count * dtype.itemsize
    wire.check_padding(buffers, nbytes)
    # Cloned, as a single buffer would else remain a view of the buffer.
    return (
        buffers[:, :nbytes]
        .clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(dtype)
        .view(buffers.shape[0], count)
    )


def _unpack(scales: Tensor, packed: Tensor, like: Coded) -> Coded:
    return Coded.unpack(packed.contiguous(), scales.clone().view(torch.float32), like.runs, like.format)


def check_plain(head: wire.Header) -> torch.dtype:
    """Return the dtype of values. Raises PayloadError where they are codes, whose format a buffer does not tell."""
    if head.dtype is None:
        raise PayloadError("the values are codes of a format, which only a payload of the same recipe can read")
    return head.dtype
