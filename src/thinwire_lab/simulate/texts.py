"""Reading networks as users write them, and links in words."""

import csv
import re
from pathlib import Path

from thinwire.exchanges import Link
from thinwire_lab.inputs import parse_link
from thinwire_lab.simulate.network import Regions, Tiers

_COLUMNS = ["region_a", "region_b", "delay_ms", "bandwidth_gbps"]
_GROUP = re.compile(r"(\d+) *x *(.+)", re.ASCII)


def parse_tiers(text: str) -> Tiers:
    """Read ``8x100gbit/10us,4x25gbit/50us,10gbit``: 8 ranks a host, 4 hosts a rack, and the link between racks.

    Raises ValueError for anything else.
    """
    *near, beyond = text.split(",")
    groups: list[tuple[int, Link]] = []
    size = 1
    for part in near:
        match = _GROUP.fullmatch(part.strip())
        if not match or int(match[1]) < 2:
            raise ValueError(
                f"topology {text!r}: {part.strip()!r} is no group; expected e.g. 8x100gbit/10us, of 2 or more"
            )
        size *= int(match[1])
        groups.append((size, parse_link(match[2])))
    if _GROUP.fullmatch(beyond.strip()):
        raise ValueError(
            f"topology {text!r} says nothing of what joins its groups; expected a link last, as in ,10gbit"
        )
    return Tiers(tuple(groups), parse_link(beyond))


def read_regions(path: Path, inside: Link) -> Regions:
    """Read a CSV of region_a, region_b, delay_ms and bandwidth_gbps, each pair once, in the order of the file.

    inside: each rank's own link. Raises ValueError for another kind of file, for a missing or double pair, and for
    numbers not above 0; OSError where there is no file.
    """
    header, *rows = _cells(path) or [[]]
    if header != _COLUMNS or not rows:
        raise ValueError(f"{path} starts with {','.join(header)!r}; expected {','.join(_COLUMNS)!r} and a row per pair")
    found: dict[frozenset[str], Link] = {}
    for row in rows:
        pair, link = _pair(path, row)
        if pair in found:
            raise ValueError(f"{path} has {' and '.join(sorted(pair))} twice; expected each pair once")
        found[pair] = link
    names = tuple(dict.fromkeys(name for row in rows for name in row[:2]))
    return Regions(names, tuple(tuple(_between(path, found, a, b, inside) for b in names) for a in names))


def _cells(path: Path) -> list[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [[cell.strip() for cell in row] for row in csv.reader(file) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV in UTF-8; expected {','.join(_COLUMNS)!r} and a row per pair") from error


def _pair(path: Path, row: list[str]) -> tuple[frozenset[str], Link]:
    try:
        a, b, delay, bandwidth = row[0], row[1], *map(float, row[2:])
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path}: {','.join(row)!r} is no pair; expected {','.join(_COLUMNS)}") from error
    if a == b or not all(0 < number < float("inf") for number in (delay, bandwidth)):
        raise ValueError(f"{path}: {','.join(row)!r}; expected two regions, and a delay and a bandwidth above 0")
    return frozenset((a, b)), Link(latency=delay / 1e3, bandwidth=bandwidth * 1e9 / 8)


def _between(path: Path, found: dict[frozenset[str], Link], a: str, b: str, inside: Link) -> Link:
    if a == b:
        return inside
    try:
        return found[frozenset((a, b))]
    except KeyError as error:
        raise ValueError(f"{path} lacks {a} and {b}; expected a row for every pair of its regions") from error


def described(link: Link) -> str:
    """Return the link in words, such as ``25 Gbit/s, 0.05 ms``."""
    bits = 8 * link.bandwidth
    thousands = 3 if bits >= 1e9 else 2 if bits >= 1e6 else 1
    return f"{bits / 1000**thousands:.4g} {'kMG'[thousands - 1]}bit/s, {1e3 * link.latency:g} ms"
