"""Payloads as float32 words, for channels that carry nothing else: a pipeline sends floats and gets gradients back.

The bits are the payload's; as numbers they mean nothing. Both ends know the layout beforehand, so there is no header.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.formats import Format
from thinwire.payloads import numbers, wire
from thinwire.payloads.dense import Dense
from thinwire.payloads.indices import Layout
from thinwire.payloads.numbers import Float, Narrow
from thinwire.payloads.sparse import Sparse

_WORD = 4
LEAST_BITS = 12
"""Sign, 8 bits of exponent and 3 of mantissa."""
_QUIET_NAN = 0x7FC00000


@final
@dataclass(frozen=True, kw_only=True)
class Words:
    """How the values of a payload travel as float32 words.

    Forward: the values in order of their indices, then the indices, unless all elements travel. Backward: the gradient
    at the same elements. Each gets as many bits as there is room for: unchanged, or float32 rounded to that many bits.

    Args:
        named: How many elements travel; None is all.
        numel: The number of elements.
        dtype: Their dtype.
        values: What they are narrowed to.
    """

    named: int | None
    numel: int
    dtype: Float
    values: Narrow

    @property
    def count(self) -> int:
        """How many elements travel."""
        return self.numel if self.named is None else self.named

    @property
    def length(self) -> int:
        """How many words there are."""
        gradient = -(-self.count * LEAST_BITS // 8)
        return -(-max(self._values_nbytes + self._indices_nbytes, gradient) // _WORD)

    @property
    def gradient_bits(self) -> int:
        """How many bits an element of the gradient takes: its dtype's; if these do not fit, a shortened float32's."""
        room, own = 8 * _WORD * self.length // max(1, self.count), 8 * self.dtype.itemsize
        return own if room >= own or not self.count else min(32, room)

    def write(self, payload: Sparse | Dense) -> Tensor:
        """Return the words (length) of a payload in this layout."""
        sections = numbers.sections(payload.values, payload.coded)
        named = self._layout.sections(payload.indices, ()) if isinstance(payload, Sparse) else []
        return self._laid(*map(wire.written, (*sections, *named)))

    def read(self, words: Tensor) -> Sparse | Dense:
        """Return the payload that was written.

        Any words of the right number are safe: no index is out of range.

        Raises:
            PayloadError: If their number is wrong: then the two ends disagree on density or values.
        """
        data = self._bytes(words)
        values = self._numbers(data)
        if self.named is None:
            return Dense(values=values)
        return Sparse(indices=self._indices(data[self._values_nbytes :]), values=values, numel=self.numel)

    def write_gradient(self, values: Tensor) -> Tensor:
        """Return the words (length) for the values (count) of the gradient at the same elements."""
        bits = self.gradient_bits
        return self._laid(values if bits == 8 * self.dtype.itemsize else shortened(values, bits))

    def read_gradient(self, words: Tensor) -> Tensor:
        """Return the gradient's elements (count) from its words.

        Raises:
            PayloadError: As `read` does.
        """
        data, bits = self._bytes(words), self.gradient_bits
        if bits == 8 * self.dtype.itemsize:
            return data[: self.count * self.dtype.itemsize].view(self.dtype)
        return widened(data, self.count, bits).to(self.dtype)

    def _laid(self, *sections: Tensor) -> Tensor:
        out = torch.zeros(_WORD * self.length, dtype=torch.uint8, device=sections[0].device)
        start = 0
        for section in sections:
            out[start : start + section.nbytes].view(section.dtype).copy_(section)
            start += wire.padded(section.nbytes)
        return out.view(torch.float32)

    def _bytes(self, words: Tensor) -> Tensor:
        if words.dtype != torch.float32 or words.numel() != self.length:
            raise PayloadError(
                f"got {words.numel()} words of {words.dtype}; expected {self.length} of torch.float32 for {self.count} "
                f"of {self.numel} elements: both sides of a boundary need the same density and values"
            )
        return words.detach().contiguous().view(-1).view(torch.uint8)

    def _numbers(self, data: Tensor) -> Tensor:
        if not isinstance(self.values, Format):
            dtype = self.values or self.dtype
            return data[: self.count * dtype.itemsize].view(dtype).to(self.dtype)
        form, scales = self.values, 4 * self.values.scale_count(self.count)
        packed = data[wire.padded(scales) :]
        codes = kernels.unpack_bits(packed, self.count, form.bits, form.code_dtype)
        return form.decode(codes, data[:scales].view(torch.float32)).to(self.dtype)

    def _indices(self, data: Tensor) -> Tensor:
        rows = data[None, : self._indices_nbytes].contiguous()
        return self._layout.decoded(rows)[0].clamp(0, self.numel - 1)

    @property
    def _layout(self) -> Layout:
        return Layout.of(((0, self.numel),), (self.count,), self.numel, ascending=True)

    @property
    def _indices_nbytes(self) -> int:
        return 0 if self.named is None else self._layout.nbytes

    @property
    def _values_nbytes(self) -> int:
        if not isinstance(self.values, Format):
            return wire.padded(self.count * (self.values or self.dtype).itemsize)
        scales, codes = 4 * self.values.scale_count(self.count), -(-self.count * self.values.bits // 8)
        return wire.padded(scales) + wire.padded(codes)


def shortened(x: Tensor, bits: int) -> Tensor:
    """Return the first `bits` (12 to 32) of each float32, rounded to nearest even, packed; overflow is infinite."""
    patterns = x.to(torch.float32).contiguous().view(torch.int32)
    if bits == 32:
        return patterns.view(torch.uint8)
    rest = 32 - bits
    half = (1 << (rest - 1)) - 1 + ((patterns >> rest) & 1)
    codes = torch.where(x.isnan(), _QUIET_NAN, patterns + half) >> rest
    return kernels.pack_bits(codes, bits)


def widened(data: Tensor, count: int, bits: int) -> Tensor:
    """Return the float32 numbers (count) that `shortened` packed into uint8 `data`, which may be longer."""
    if bits == 32:
        return data[: 4 * count].view(torch.float32)
    codes = kernels.unpack_bits(data, count, bits, torch.int32)
    return (codes << (32 - bits)).view(torch.float32)
