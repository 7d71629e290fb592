"""The 16-byte header before every payload, and the sections behind it: see docs/explanation/wire-format.md."""

import struct
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.collectives import room
from thinwire.errors import PayloadError
from thinwire.kernels import Section
from thinwire.kernels.memory import constant, kept, sent
from thinwire.waits import Error, on_host, refuse_if

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

    def pack(self) -> bytes:
        """Return the 16 bytes. Raises PayloadError for a dtype without a code."""
        if self.dtype is not None and self.dtype not in DTYPE_CODES:
            raise PayloadError(f"values are {self.dtype}; the wire carries {', '.join(map(str, DTYPE_CODES))}")
        code = _CODED if self.dtype is None else DTYPE_CODES[self.dtype]
        last = self.numel | self.coding << _NUMEL_BITS
        return _LAYOUT.pack(VERSION, self.kind, code, self.bits, self.count, last)


@kept
def on(packed: bytes, device: torch.device) -> Tensor:
    """Return bytes, one or more, as uint8 on a device, kept because headers stay the same."""
    return sent(torch.frombuffer(bytearray(packed), dtype=torch.uint8), device)


def parse(buffer: Tensor, kind: int, codings: tuple[int, ...] = (NUMBERS,)) -> Header:
    """Return a payload's header. Raises PayloadError if it is not of this `kind`, or has none of these `codings`."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1:
        raise PayloadError(f"a payload is a flat uint8 tensor; got {buffer.dtype} of shape {tuple(buffer.shape)}")
    if buffer.numel() < HEADER_BYTES:
        raise PayloadError(f"a payload has at least {HEADER_BYTES} bytes; got {buffer.numel()}")
    version, found, code, bits, count, numel, coding = _fields(buffer)
    if version != VERSION or found != kind or code not in (*_DTYPES, _CODED) or (bits > 0) != (code == _CODED):
        raise PayloadError(
            f"header has version {version}, kind {found}, dtype code {code} of {bits} bits; "
            f"expected version {VERSION}, kind {kind}"
        )
    check_coding(coding, codings)
    return Header(kind, _DTYPES.get(code), count, numel, bits, coding)


def padded(nbytes: int) -> int:
    """Round up to the 8 bytes that every section is aligned to."""
    return -(-nbytes // 8) * 8


def pack(head: bytes, *sections: Tensor | Section) -> Tensor:
    """Join header and flat sections, at least one, each padded with zeros to a multiple of 8 bytes."""
    given = [section if isinstance(section, Section) else Section(section) for section in sections]
    device, end = given[0].x.device, len(head)
    parts = [on(head, device)]
    if not on_host(parts[0]):
        given.insert(0, Section(parts[0]))
        *starts, end = accumulate((padded(section.nbytes) for section in given), initial=0)
        out = room(end, device)
        kernels.sections_write(out, given, starts)
        return out
    for section in map(written, given):
        if section.numel():  # an empty one may have any stride, and no bytes
            parts.append(section.contiguous().view(torch.uint8))
        if gap := -section.nbytes % 8:
            parts.append(on(bytes(gap), device))
        end += section.nbytes + gap
    return torch.cat(parts, out=room(end, device))


def written(section: Tensor | Section) -> Tensor:
    """Return the numbers that travel, or their bytes."""
    if not isinstance(section, Section):
        return section
    if section.space:
        return kernels.elias_fano_encode(section.x, section.space)
    return kernels.pack_bits(section.x, section.bits) if section.bits else section.x


def check_sections(buffer: Tensor, start: int, *sections: int) -> None:
    """Raise PayloadError unless a buffer is as long as its header says, and its sections are padded with zeros."""
    expected = start + sum(map(padded, sections))
    if buffer.numel() != expected:
        raise PayloadError(f"the buffer has {buffer.numel()} bytes, but its header says {expected}")
    check_padding(buffer[start:], *sections)


def check_coding(coding: int, known: tuple[int, ...]) -> None:
    """Raise PayloadError unless a header's coding of indices is a known one."""
    if coding not in known:
        raise PayloadError(f"header has coding {coding}; expected one of {known}")


def check_padding(body: Tensor, *sections: int) -> None:
    """Raise PayloadError unless each of `sections` (bytes) at the start of flat `body` is padded with zeros."""
    start = 0
    for nbytes in sections:
        end = start + padded(nbytes)
        if end > start + nbytes:
            refuse_if(body[start + nbytes : end].any(), partial(_not_padded, nbytes))
        start = end


def check_buffers(buffers: Tensor, head: bytes, *sections: int) -> None:
    """Raise PayloadError unless each row of `buffers` is `head` and then `sections` (bytes), each padded with zeros."""
    fixed, error = unread(buffers, head, *sections)
    refuse_if(kernels.differ(buffers, fixed), error)


def unread(buffers: Tensor, head: bytes, *sections: int, bits: int = 0) -> tuple[Tensor, Error]:
    """Check only what the host can see, and return what `kernels.differ` compares, and the error if it does differ.

    Of the last byte of the second section, which holds codes, only so many bits are used; 0: all of them are.
    """
    fixed = _fixed(head, sections, bits)
    nbytes = len(head) + sum(map(padded, sections))
    if buffers.dtype != torch.uint8 or buffers.dim() != 2 or buffers.shape[1] != nbytes:
        raise PayloadError(f"got {buffers.dtype} of shape {tuple(buffers.shape)}; expected buffers of {nbytes} uint8")
    error = partial(_unlike, buffers, head, sections, bits)
    return constant(fixed, torch.int32, buffers.device).view(3, -1), error


@lru_cache(maxsize=1024)  # layouts stay the same from step to step
def _fixed(head: bytes, sections: tuple[int, ...], bits: int) -> tuple[int, ...]:
    """Return what `kernels.differ` compares: the header's bytes, and the zeros behind each section and behind codes."""
    places, end = list(range(len(head))), len(head)
    for nbytes in sections:
        places += range(end + nbytes, end := end + padded(nbytes))
    masks = [255] * len(places)
    if bits:
        places.append(len(head) + padded(sections[0]) + sections[1] - 1)
        masks.append(256 - (1 << bits))
    return (*places, *head, *[0] * (len(places) - len(head)), *masks)


def _unlike(buffers: Tensor, head: bytes, sections: tuple[int, ...], bits: int) -> PayloadError:
    heads, expected = buffers[:, : len(head)].cpu(), torch.frombuffer(bytearray(head), dtype=torch.uint8)
    unlike = (heads != expected).any(dim=1).nonzero().flatten().tolist()
    if not unlike:
        ends = accumulate(map(padded, sections), initial=len(head))
        spare = zip(sections, ends, strict=False)
        found = (nbytes for nbytes, end in spare if buffers[:, end + nbytes : end + padded(nbytes)].any())
        nbytes = next(found, None if bits else 0)
        if nbytes is not None:
            return _not_padded(nbytes)
        return PayloadError(f"the last byte of codes has a bit set; expected zeros after its first {bits} bits")
    pairs = zip(_FIELDS, _fields(heads[unlike[0]]), _fields(expected), strict=True)
    differing = [f"{name} {theirs}, not {mine}" for name, theirs, mine in pairs if theirs != mine]
    return PayloadError(
        f"rank {unlike[0]} sent a header with {'; '.join(differing) or 'another layout'} as on this rank: attach the "
        "same recipe on every rank, to the same parameters; if it is the same, the message was corrupted in transit"
    )


def _fields(header: Tensor) -> tuple[int, ...]:
    *fields, last = _LAYOUT.unpack(bytes(header[:HEADER_BYTES].tolist()))
    return (*fields, last & (1 << _NUMEL_BITS) - 1, last >> _NUMEL_BITS)


def _not_padded(nbytes: int) -> PayloadError:
    return PayloadError(f"a section of {nbytes} bytes is not padded with zeros to {padded(nbytes)}")
