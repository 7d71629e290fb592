"""The 16-byte header before every payload, and the dtype codes in it. docs/wire-format.md describes both."""

import struct

import torch
from torch import Tensor

from thinwire.errors import PayloadError

HEADER_BYTES = 16
VERSION = 1
DENSE, SPARSE, BLOCKS, SPECTRAL = 1, 2, 3, 4
DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
_CODED = 4
_LAYOUT = struct.Struct("<BBBBIQ")


def header(kind: int, dtype: torch.dtype, count: int, numel: int, device: torch.device) -> Tensor:
    """Return the 16 header bytes. Raises PayloadError for a dtype without a code."""
    if dtype not in DTYPE_CODES:
        raise PayloadError(f"values are {dtype}; the wire carries {', '.join(map(str, DTYPE_CODES))}")
    return _bytes(_LAYOUT.pack(VERSION, kind, DTYPE_CODES[dtype], 0, count, numel), device)


def coded_header(kind: int, bits: int, count: int, numel: int, device: torch.device) -> Tensor:
    """Return the 16 header bytes of a payload whose values are codes of `bits` bits."""
    return _bytes(_LAYOUT.pack(VERSION, kind, _CODED, bits, count, numel), device)


def parse(buffer: Tensor, kind: int) -> tuple[torch.dtype | None, int, int]:
    """Return (dtype, count, numel) from a payload's header; the dtype of codes is None.

    Raises PayloadError when it is not one of `kind`.
    """
    if buffer.dtype != torch.uint8 or buffer.dim() != 1:
        raise PayloadError(f"a payload is a flat uint8 tensor; got {buffer.dtype} of shape {tuple(buffer.shape)}")
    if buffer.numel() < HEADER_BYTES:
        raise PayloadError(f"a payload has at least {HEADER_BYTES} bytes; got {buffer.numel()}")
    version, found, code, _, count, numel = _LAYOUT.unpack(bytes(buffer[:HEADER_BYTES].tolist()))
    if version != VERSION or found != kind or code not in (*_DTYPES, _CODED):
        raise PayloadError(
            f"header has version {version}, kind {found}, dtype code {code}; expected version {VERSION}, kind {kind}"
        )
    return _DTYPES.get(code), count, numel


def padded(nbytes: int) -> int:
    """Round up to the 8 bytes that every section is aligned to."""
    return -(-nbytes // 8) * 8


def pack(head: Tensor, *sections: Tensor) -> Tensor:
    """Lay header and sections behind one another, each padded with zeros to 8 bytes."""
    buffer = head.new_zeros(HEADER_BYTES + sum(padded(section.nbytes) for section in sections))
    buffer[:HEADER_BYTES] = head
    start = HEADER_BYTES
    for section in sections:
        buffer[start : start + section.nbytes].view(section.dtype).copy_(section)
        start += padded(section.nbytes)
    return buffer


def check_padding(buffer: Tensor, *sections: int) -> None:
    """Raise PayloadError unless the bytes that pad `sections`, given by their lengths in bytes, are zero."""
    start = HEADER_BYTES
    for nbytes in sections:
        if bool(buffer[start + nbytes : start + padded(nbytes)].any()):
            raise PayloadError(f"bytes {start + nbytes} to {start + padded(nbytes)} pad a section and are not zero")
        start += padded(nbytes)


def check_rows(rows: Tensor, expected: Tensor) -> None:
    """Raise PayloadError unless every row of uint8 `rows` begins with the bytes `expected`."""
    same = (rows[:, : expected.numel()] == expected).all(dim=1)
    if not bool(same.all()):
        rank = int((~same).nonzero()[0])
        got = rows[rank, : expected.numel()].tolist()
        raise PayloadError(f"rank {rank} sent header {got}; expected {expected.tolist()} as on this rank")


def check_range(indices: Tensor, numel: int) -> None:
    """Raise PayloadError unless all indices lie in [0, numel)."""
    if indices.numel():
        low, high = (int(bound) for bound in torch.aminmax(indices))
        if low < 0 or high >= numel:
            raise PayloadError(f"indices reach from {low} to {high}; expected 0 to {numel - 1}")


def _bytes(packed: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(device)
