"""What sweep.py and timed.py found, by link, number of workers and size; and exchanges."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from thinwire_lab.papers.shared.shelf import Combined, Document


def _repeats(found: Mapping[str, Any]) -> str:
    apart = median(row["most"] / row["least"] for row in found["collectives"])
    return f"repeats to \N{MULTIPLICATION SIGN} {apart:.2f}"


SWEEP = Document(
    name="sweep",
    words="python -m thinwire_lab.papers.shared.sweep",
    quick="--worlds 2,4 --links 1gbit --largest 1048576 --repeats 1",
    apart=_repeats,
)
ROUTES = Document(
    name="routes",
    words="python -m thinwire_lab.papers.shared.timed routes",
    quick="--worlds 2,4 --largest 1048576 --repeats 1",
)


def _apart(found: Mapping[str, Any]) -> str:
    times = [row["seconds"] for row in found["rows"]]
    most = max(max(each["p80"] / each["p50"] - 1, 1 - each["p20"] / each["p50"]) for each in times)
    return f"\N{PLUS-MINUS SIGN} {most:.0%}"


EXCHANGES = Document(
    name="exchanges",
    words="python -m thinwire_lab.studies.exchanges",
    quick="--worlds 2 --links none --numel 20000 --repeats 1",
    apart=_apart,
)


SYNCHRONISING = Combined(documents=(SWEEP, ROUTES), combine=lambda found: found[0] | found[1])

Found = Mapping[str, Any]


def collective(found: Found, kind: str, link: str, world: int, of: str = "seconds") -> tuple[list[int], list[float]]:
    """Return sizes in bytes, rising, and the seconds of each; without sizes that took too long to be measured.

    of: "seconds" for the median, or the "least" or the "most" of the repeats.
    """
    rows = [r for r in found["collectives"] if (r["kind"], r["link"], r["world"]) == (kind, link, world)]
    rows.sort(key=lambda row: row["bytes"])
    return [row["bytes"] for row in rows], [row[of] for row in rows]


def seconds(found: Found, kind: str, link: str, world: int, nbytes: float, of: str = "seconds") -> float:
    """Return the seconds of a collective over so many bytes a rank: between two sizes, or on from the two largest."""
    sizes, times = collective(found, kind, link, world, of)
    if nbytes > sizes[-1]:
        slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        return times[-1] + slope * (nbytes - sizes[-1])
    return float(np.interp(nbytes, sizes, times))


def routes(found: Found, route: str, world: int, density: float) -> Sequence[Mapping[str, Any]]:
    """Return what a route's encoding and decoding took, by size."""
    rows = [r for r in found["routes"] if (r["route"], r["world"], r["density"]) == (route, world, density)]
    return sorted(rows, key=lambda row: row["bytes"])


def parts(found: Found, row: Mapping[str, Any], link: str, decode: str = "decode") -> tuple[float, float, float]:
    """Return the seconds of a route's encoding, of the all-gather, as the sweep found it, and of decoding."""
    return row["encode"], seconds(found, "all-gather", link, row["world"], row["sent"]), row[decode]


def links(found: Found) -> list[str]:
    """Return the links that were measured, the slowest first."""
    return list(dict.fromkeys(row["link"] for row in found["collectives"]))


KEPT = ("100mbit", "1gbit")
"""Rates that the machine keeps: at 10 Gbit/s two cores are busy with copying, and times jump by a factor of ten."""


def kept(found: Found) -> list[str]:
    """Return the links that judge: those whose rate the machine keeps, or all where only others were measured."""
    return [link for link in links(found) if link in KEPT] or links(found)


def worlds(found: Found) -> list[int]:
    """Return the numbers of workers, rising."""
    return sorted({row["world"] for row in found["collectives"]})
