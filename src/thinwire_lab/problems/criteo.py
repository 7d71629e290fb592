"""Criteo's display advertising challenge: a text file with one impression a line."""

import gzip
import re
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from thinwire_lab.inputs import BadInput, reading, require
from thinwire_lab.problems.clicks import CATEGORIES, DENSE, Impressions, scaled

EXPECTED = (
    f"a text file, or a .gz of one, with a label 0 or 1, {DENSE} integers and {CATEGORIES} hashes of 8 hexadecimal "
    "digits a line, separated by tabs; integers and hashes may be missing"
)
LINES, DAYS = 500_000, 7
"""How many lines we read at most, from the start, and the days they count as. The last day is held out."""
ROWS = 10_000
"""Ids per categorical feature: 0 if it is missing, otherwise 1 + its hash modulo 9,999."""

_LONGEST = 1024  # a valid line has at most 511 bytes
_KINDS = (
    ("0 or 1", re.compile(rb"[01]")),
    *(("an integer of at most 18 digits, or nothing", re.compile(rb"(?:-?\d{1,18})?")),) * DENSE,
    *(("8 hexadecimal digits, or nothing", re.compile(rb"(?:[\da-fA-F]{8})?")),) * CATEGORIES,
)
_LINE = re.compile(rb"\t".join(kind.pattern for _, kind in _KINDS))


def load(path: Path) -> Impressions:
    """Load the first lines of the file. Raises BadInput if it cannot be read or lines have another layout."""
    labels, counts, hashes, missing = bytearray(), array("q"), bytearray(), bytearray()
    with reading(path, EXPECTED), _open(path) as file:
        for fields in _lines(path, file):
            labels.append(fields[0] == b"1")
            counts.extend([int(field or 0) for field in fields[1 : 1 + DENSE]])
            hashes += bytes.fromhex(b"".join([field or b"00000000" for field in fields[1 + DENSE :]]).decode())
            missing += bytes([not field for field in fields[1 + DENSE :]])
    require(len(labels) >= DAYS, path, f"at least {DAYS} lines, not {len(labels)}: {EXPECTED}")
    rows = np.frombuffer(hashes, ">u4") % (ROWS - 1) + 1
    ids = np.where(np.frombuffer(missing, np.bool_), 0, rows).astype(np.int32)
    dense = scaled(np.frombuffer(counts, np.int64))
    return Impressions(
        dense=dense.reshape(-1, DENSE), ids=ids.reshape(-1, CATEGORIES), labels=np.frombuffer(labels, np.uint8)
    )


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else path.open("rb"))


def _lines(path: Path, file: BinaryIO) -> Iterator[list[bytes]]:
    """Yield the columns of every line."""
    # Another kind of file may have no line ends, and a single line that exceeds memory.
    lines = iter(lambda: file.readline(_LONGEST), b"")
    for number, line in enumerate(islice(lines, LINES), 1):
        text = line.rstrip(b"\r\n")
        fields = text.split(b"\t")
        if not _LINE.fullmatch(text):
            raise BadInput(f"{path} line {number}: {_fault(fields)}; expected {EXPECTED}")
        yield fields


def _fault(fields: list[bytes]) -> str:
    if len(fields) != len(_KINDS):
        return f"{len(fields)} columns, not {len(_KINDS)}"
    column, field, kind = next(
        (column, field, kind)
        for column, (field, (kind, pattern)) in enumerate(zip(fields, _KINDS, strict=True), 1)
        if not pattern.fullmatch(field)
    )
    return f"column {column} is {field[:20].decode('ascii', 'backslashreplace')!r}, not {kind}"
