"""The 16-byte header before every payload, and the sections behind it: see docs/explanation/wire-format.md."""

import struct
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from thinwire.collectives import room
from thinwire.errors import PayloadError
from thinwire.kernels.memory import kept, sent
from thinwire.waits import refuse_if

HEADER_BYTES = 16
VERSION = 2
DENSE, SPARSE, BLOCKS, SPECTRAL, CHUNKS, EXPONENTS = 1, 2, 3, 4, 5, 6
NUMBERS, BITMAP, ELIAS_FANO, SLOTS = 0, 1, 2, 3
DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
_CODED = 4
_LAYOUT = struct.Struct("<BBBBIQ")
_NUMEL_BITS = 56
_FIELDS = ("version", "kind", "dtype code", "bits", "count", "elements", "coding")


@dataclass(frozen=True)
class Header:
    """The fields of a header. `dtype` None stands for codes of `bits` bits; `coding` says how indices travel."""

    kind: int
    dtype: torch.dtype | None
    count: int
    numel: int
    bits: int = 0
    coding: int = NUMBERS

    def pack(self, device: torch.device) -> Tensor:
        """Return the 16 bytes. Raises PayloadError for a dtype without a code."""
        if self.dtype is not None and self.dtype not in DTYPE_CODES:
            raise PayloadError(f"values are {self.dtype}; the wire carries {', '.join(map(str, DTYPE_CODES))}")
        code = _CODED if self.dtype is None else DTYPE_CODES[self.dtype]
        last = self.numel | self.coding << _NUMEL_BITS
        packed = _LAYOUT.pack(VERSION, self.kind, code, self.bits, self.count, last)
        return on(packed, device)


@kept
def on(packed: bytes, device: torch.device) -> Tensor:
    """Return bytes as uint8 on a device, kept because headers stay the same."""
    return sent(torch.frombuffer(bytearray(packed), dtype=torch.uint8), device)


def parse(buffer: Tensor, kind: int) -> Header:
    """Return a payload's header. Raises PayloadError if it is not of this `kind`."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1:
        raise PayloadError(f"a payload is a flat uint8 tensor; got {buffer.dtype} of shape {tuple(buffer.shape)}")
    if buffer.numel() < HEADER_BYTES:
        raise PayloadError(f"a payload has at least {HEADER_BYTES} bytes; got {buffer.numel()}")
    version, found, code, bits, count, last = _LAYOUT.unpack(bytes(buffer[:HEADER_BYTES].tolist()))
    if version != VERSION or found != kind or code not in (*_DTYPES, _CODED) or (bits > 0) != (code == _CODED):
        raise PayloadError(
            f"header has version {version}, kind {found}, dtype code {code} of {bits} bits; "
            f"expected version {VERSION}, kind {kind}"
        )
    numel, coding = last & (1 << _NUMEL_BITS) - 1, last >> _NUMEL_BITS
    return Header(kind, _DTYPES.get(code), count, numel, bits, coding)


def padded(nbytes: int) -> int:
    """Round up to the 8 bytes that every section is aligned to."""
    return -(-nbytes // 8) * 8


def pack(head: Tensor, *sections: Tensor) -> Tensor:
    """Join header and sections, each padded with zeros to a multiple of 8 bytes."""
    starts = [HEADER_BYTES]
    for section in sections:
        starts.append(starts[-1] + padded(section.nbytes))
    buffer = room(starts[-1], head.device).zero_()
    buffer[:HEADER_BYTES] = head
    for section, start in zip(sections, starts, strict=False):
        buffer[start : start + section.nbytes].view(section.dtype).copy_(section)
    return buffer


def check_length(buffer: Tensor, expected: int) -> None:
    """Raise PayloadError unless a buffer has the length that its header calls for."""
    if buffer.numel() != expected:
        raise PayloadError(f"a buffer of {buffer.numel()} bytes, whose header calls for {expected} bytes")


def check_coding(coding: int, known: tuple[int, ...]) -> None:
    """Raise PayloadError unless a header's coding of indices is a known one."""
    if coding not in known:
        raise PayloadError(f"header has coding {coding}; expected one of {known}")


def check_padding(buffers: Tensor, *sections: int) -> None:
    """Raise PayloadError unless the padding of each of `sections` (bytes, at the start of buffers) is zero."""
    start = 0
    for nbytes in sections:
        end = start + padded(nbytes)
        if end > start + nbytes:
            refuse_if(buffers[:, start + nbytes : end].any(), partial(_not_padded, nbytes))
        start = end


def check_buffers(buffers: Tensor, expected: Tensor, nbytes: int) -> None:
    """Raise PayloadError unless uint8 `buffers` are of `nbytes` bytes each and begin with the bytes `expected`."""
    check_shape(buffers, nbytes)
    headers = buffers[:, : expected.numel()]
    refuse_if((headers != expected).any(), partial(_other_header, headers, expected))


def _other_header(headers: Tensor, expected: Tensor) -> PayloadError:
    rank = int((headers != expected).any(dim=1).nonzero()[0])
    pairs = zip(_FIELDS, _fields(headers[rank]), _fields(expected), strict=True)
    differing = [f"{name} {theirs}, not {mine}" for name, theirs, mine in pairs if theirs != mine]
    return PayloadError(
        f"rank {rank} sent a header with {'; '.join(differing) or 'another layout'} as on this rank: attach the same "
        "recipe on every rank, to the same parameters; if it is the same, the message was corrupted in transit"
    )


def _fields(header: Tensor) -> tuple[int, ...]:
    *fields, last = _LAYOUT.unpack(bytes(header[:HEADER_BYTES].tolist()))
    return (*fields, last & (1 << _NUMEL_BITS) - 1, last >> _NUMEL_BITS)


def _not_padded(nbytes: int) -> PayloadError:
    return PayloadError(f"a section of {nbytes} bytes is not padded with zeros to {padded(nbytes)}")


def check_shape(buffers: Tensor, nbytes: int) -> None:
    """Raise PayloadError unless `buffers` are uint8, of `nbytes` bytes each."""
    if buffers.dtype != torch.uint8 or buffers.dim() != 2 or buffers.shape[1] != nbytes:
        raise PayloadError(f"got {buffers.dtype} of shape {tuple(buffers.shape)}; expected buffers of {nbytes} uint8")
