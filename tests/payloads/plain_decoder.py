"""A decoder in plain Python, written from docs/explanation/wire-format.md alone: slow, and free of torch."""

import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise
from math import comb
from typing import NamedTuple

WIDTHS = {0: 4, 1: 8, 2: 2, 3: 2}
CODINGS = {1: (0,), 2: (0, 2, 3), 3: (0, 1, 2), 4: (0,), 5: (0,)}


class RefusedError(ValueError):
    """The page says that a reader refuses this."""


class Head(NamedTuple):
    """The 16 bytes."""

    version: int
    kind: int
    dtype: int
    bits: int
    items: int
    numel: int
    coding: int


class Plain(NamedTuple):
    """Values as raw bytes, or as codes behind their scales, and the indices of kinds 2, 3 and 5."""

    kind: int
    numel: int
    width: int
    space: int
    values: list[bytes]
    scales: list[bytes]
    codes: list[int]
    indices: list[int]


class Cut(NamedTuple):
    """How a tensor is cut into chunks."""

    numel: int
    columns: int
    height: int
    width: int
    kept: int
    transform: int


Tensors = Sequence[tuple[int, int, int]]


def decode(buffer: bytes, *, scales: int = 0, tensors: Tensors = (), cuts: Sequence[Cut] = ()) -> Plain:
    """Decode a buffer. Of codes, both sides know how many scales there are; of slots, the tensors (offset, n, m).

    Of chunks, they know how each tensor is cut.
    """
    head = _head(buffer)
    if head.kind == 4:
        return _spectrum(head, decode(buffer[16:], scales=scales), tensors)
    width, space = _shape(buffer, head, cuts)
    place, sections = 24 if head.kind in (3, 5) else 16, []
    for size in _sizes(head, width, scales):
        sections.append(_section(buffer, place, size))
        place += _pad(size)
    if head.kind == 5:
        indices = _positions(buffer[place:], cuts)
    else:
        indices = _named(buffer[place:], head, space, tensors or [(0, head.numel, head.items)])
    found = Plain(head.kind, head.numel, width, space, [], [], [], indices)
    if head.dtype != 4:
        return found._replace(values=_cut(sections[0], WIDTHS[head.dtype]))
    codes = _numbers(sections[1], head.items * width, head.bits)
    return found._replace(scales=_cut(sections[0], 4), codes=codes)


def _head(buffer: bytes) -> Head:
    _check(len(buffer) >= 16)
    version, kind, dtype, bits, items = struct.unpack_from("<BBBBI", buffer)
    head = Head(version, kind, dtype, bits, items, int.from_bytes(buffer[8:15], "little"), buffer[15])
    _check(head.version == 2 and head.kind in CODINGS and head.dtype <= 4 and (head.bits > 0) == (head.dtype == 4))
    _check(head.coding in CODINGS[head.kind])
    return head


def _shape(buffer: bytes, head: Head, cuts: Sequence[Cut]) -> tuple[int, int]:
    """Return elements to a block and blocks in all; of other kinds, an element is a block."""
    if head.kind == 5:
        known = struct.pack(f"<{6 * len(cuts)}Q", *(number for cut in cuts for number in cut))
        _check(len(buffer) >= 24 and struct.unpack_from("<II", buffer, 16) == (len(cuts), zlib.crc32(known)))
        _check(head.items == sum(_chunks(cut) * cut.kept for cut in cuts))
        return 1, head.numel
    if head.kind != 3:
        _check(head.items == head.numel if head.kind == 1 else head.items <= head.numel < 2**31)
        return 1, head.numel
    _check(len(buffer) >= 24)
    width, space = struct.unpack_from("<II", buffer, 16)
    _check(width >= 1 and head.items <= space < 2**31)
    return width, space


def _sizes(head: Head, width: int, scales: int) -> list[int]:
    if head.dtype == 4:
        return [4 * scales, (head.items * width * head.bits + 7) // 8]
    return [head.items * width * WIDTHS[head.dtype]]


def _spectrum(head: Head, inner: Plain, tensors: Tensors) -> Plain:
    _check(inner.kind == 3 and inner.width == 2 and head.dtype == 0 and head.items >= 1)
    widths = [(n, max(1, min(head.items, n))) for _, n, _ in tensors or [(0, head.numel, 0)]]
    _check(inner.space == sum(-(-n // width) * (width // 2 + 1) for n, width in widths))
    return inner._replace(kind=4, numel=head.numel)


def _named(section: bytes, head: Head, space: int, tensors: Tensors) -> list[int]:
    if head.kind == 1:
        _check(not section)
        return []
    found = _indices(section, head.coding, head.items, space, tensors)
    _check(all(0 <= index < space for index in found))
    _check(head.kind == 2 or all(a < b for a, b in pairwise(found)))
    return found


def _chunks(cut: Cut) -> int:
    rows = -(-cut.numel // cut.columns)
    return -(-rows // cut.height) * (cut.columns // cut.width)


def _positions(section: bytes, cuts: Sequence[Cut]) -> list[int]:
    found: list[list[int]] = []
    place = 0
    for cut in cuts:
        n, k, chunks = cut.height * cut.width, cut.kept, _chunks(cut)
        size, coding = min((_length(coding, chunks * k, chunks * n), coding) for coding in (0, 1, 2))
        low, bits = _low_and_bits(n, k)
        first, second = (chunks * bits + 7) // 8, (chunks * k * low + 7) // 8
        if low >= 0 and first + second <= size:
            size = first + second
            _check(len(section) >= place + size)
            numbers = _numbers(section[place : place + first], chunks, bits)
            lows = _numbers(section[place + first : place + size], chunks * k, low)
            highs = [
                high - i * (low > 0)
                for number in numbers
                for i, high in enumerate(_subset(number, _space(n, k, low), k))
            ]
            found.append([high << low | rest for high, rest in zip(highs, lows, strict=True)])
        else:
            _check(len(section) >= place + size)
            keys = _indices(section[place : place + size], coding, chunks * k, chunks * n, ())
            _check([key // n for key in keys] == [i // k for i in range(chunks * k)])
            found.append([key % n for key in keys])
        _check(all(p < n for p in found[-1]))
        _check(all(a < b for i, (a, b) in enumerate(pairwise(found[-1]), 1) if i % k))
        place += size
    _check(len(section) == _pad(place) and not any(section[place:]))
    return [p for each in found for p in each]


def _low_and_bits(n: int, k: int) -> tuple[int, int]:
    one, two = (
        next(((low, _bits(n, k, low)) for low in range(n.bit_length()) if _most(_space(n, k, low), k) < limit), (-1, 0))
        for limit in (2**63, 2**126)
    )
    if one[0] < 0 or two[0] < 0:
        return max(one, two)
    return two if 4 * (one[1] + one[0] * k - two[1] - two[0] * k) > k else one


def _bits(n: int, k: int, low: int) -> int:
    return (comb(_space(n, k, low), k) - 1).bit_length()


def _space(n: int, k: int, low: int) -> int:
    return ((n - 1) >> low) + k if low else n


def _most(n: int, k: int) -> int:
    return comb(n, min(k, n // 2))


def _length(coding: int, count: int, space: int) -> int:
    low = (space // count).bit_length() - 1 if count else 0
    unary = count + ((space - 1) >> low) if count else 0
    return (_pad(4 * count), _pad(-(-space // 8)), _pad(-(-count * low // 8)) + _pad(-(-unary // 8)))[coding]


def _subset(number: int, n: int, k: int) -> list[int]:
    _check(number < comb(n, k))
    found: list[int] = []
    for i in range(k, 0, -1):
        found.insert(0, max(p for p in range(n) if comb(p, i) <= number))
        number -= comb(found[0], i)
    return found


def _indices(section: bytes, coding: int, count: int, space: int, tensors: Tensors) -> list[int]:
    if coding == 0:
        _check(len(section) == _pad(4 * count))
        return list(struct.unpack(f"<{count}i", _section(section, 0, 4 * count)))
    if coding == 1:
        _check(len(section) == _pad((space + 7) // 8) and len(_ones(section)) == count)
        return _ones(section)
    return _elias_fano(section, count, space) if coding == 2 else _slots(section, tensors)


def _elias_fano(section: bytes, count: int, space: int) -> list[int]:
    if not count:
        _check(not section)
        return []
    low = (space // count).bit_length() - 1
    lows, highs = (count * low + 7) // 8, (count + ((space - 1) >> low) + 7) // 8
    _check(len(section) == _pad(lows) + _pad(highs))
    ones = _ones(section[_pad(lows) :])
    _check(len(ones) == count)
    rests = _numbers(_section(section, 0, lows), count, low)
    found = [(one - i) << low | rest for i, (one, rest) in enumerate(zip(ones, rests, strict=True))]
    _check(found == sorted(found))
    return found


def _slots(section: bytes, tensors: Tensors) -> list[int]:
    sizes = [(m * (-(-n // m)).bit_length() + 7) // 8 if m else 0 for _, n, m in tensors]
    place = 8 + 8 * len(tensors)
    _check(len(section) == _pad(place + sum(sizes)) and int.from_bytes(section[:8], "little") == len(tensors))
    _check(not any(section[place + sum(sizes) :]))
    found = []
    for i, ((offset, n, m), size) in enumerate(zip(tensors, sizes, strict=True)):
        seed = int.from_bytes(section[8 + 8 * i : 16 + 8 * i], "little")
        quotients = -(-n // m) if m else 0
        for s, q in enumerate(_numbers(section[place : place + size], m, quotients.bit_length())):
            index = n - 1 if q == quotients else _index(s, q, m, quotients, seed)
            _check(q <= quotients and index < n)
            found.append(offset + index)
        place += size
    return found


def _index(s: int, q: int, m: int, quotients: int, seed: int) -> int:
    def h(j: int, x: int, b: int) -> int:
        key = (3 * seed + j + 1) * 0x9E3779B97F4A7C15 % 2**64
        x = (x + (key >> 32)) % 2**32
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x ^= key % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return (x ^ x >> 16) * b >> 32

    s = (s - h(2, q, m)) % m
    q = (q - h(1, s, quotients)) % quotients
    return q * m + (s - h(0, q, m)) % m


def _numbers(packed: bytes, count: int, bits: int) -> list[int]:
    whole = int.from_bytes(packed, "little")
    _check(not whole >> count * bits)
    return [whole >> i * bits & ((1 << bits) - 1) for i in range(count)]


def _ones(bits: bytes) -> list[int]:
    return [8 * j + i for j, byte in enumerate(bits) for i in range(8) if byte >> i & 1]


def _section(buffer: bytes, place: int, size: int) -> bytes:
    _check(len(buffer) >= place + _pad(size) and not any(buffer[place + size : place + _pad(size)]))
    return buffer[place : place + size]


def _cut(section: bytes, width: int) -> list[bytes]:
    return [section[i : i + width] for i in range(0, len(section), width)]


def _pad(size: int) -> int:
    return -(-size // 8) * 8


def _check(holds: bool) -> None:
    if not holds:
        raise RefusedError
