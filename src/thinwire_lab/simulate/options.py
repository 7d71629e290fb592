"""What the user asked to simulate, checked."""

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from thinwire.exchanges import Link, Network
from thinwire.planner import Profile
from thinwire_lab.apart import SCHEMES
from thinwire_lab.inputs import BadInput, counts, names, parse_link, rate_text
from thinwire_lab.simulate.network import MOST, Regions, Tiers, ring
from thinwire_lab.simulate.scaling import Faults, Scale, on, scaled, xml

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
                f"topology {text!r}: {part.strip()!r} is not a group; expected 8x100gbit/10us, of 2 or more"
            )
        size *= int(match[1])
        groups.append((size, parse_link(match[2])))
    if _GROUP.fullmatch(beyond.strip()):
        raise ValueError(f"topology {text!r} does not say which link joins its groups; expected it last, as in ,10gbit")
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
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a mark, and rows of nothing
            rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
            return [row for row in rows if any(row)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not CSV in UTF-8; expected {','.join(_COLUMNS)!r} and a row per pair") from error


def _pair(path: Path, row: list[str]) -> tuple[frozenset[str], Link]:
    try:
        a, b, delay, bandwidth = row[0], row[1], *map(float, row[2:])
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path}: {','.join(row)!r} is not a pair; expected {','.join(_COLUMNS)}") from error
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
    return f"{rate_text(8 * link.bandwidth, '.4g')}, {1e3 * link.latency:g} ms"


INSIDE = "10gbit/0.1ms"
"""A rank's own link, unless given, where the topology names regions."""
_MOST_WORKERS = 16384
_BUILT_IN = (0.0001, 0.001, 0.01)
_USUAL = ("dense", "sampled_topk:0.001", "sampled_doubling:0.001", "sampled_gtopk:0.001")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to simulate, and its name. network: None for the links of the profile.

    outer: after how many inner steps workers meet, where they train on their own. tokens: how many to train on in all,
    if asked, where a worker takes `batch` in a step. faults: how often a worker fails, if asked.
    """

    worlds: Sequence[int]
    profile: Profile
    names: Sequence[str]
    network: Network | None
    model: str
    where: str
    outer: Sequence[int] = ()
    tokens: float | None = None
    batch: int = 1
    faults: Faults | None = None

    @property
    def title(self) -> str:
        """What the figures show."""
        return f"{self.model}; {self.where}"

    def scales(self) -> list[Scale]:
        """Predict all of it. Raises BadInput for a recipe that the profile does not know."""
        try:
            found = scaled(self.profile, self.names, self.worlds, self.network)
        except ValueError as error:
            raise BadInput(f"--recipes, --profile: {error}") from error
        return [replace(scale, seconds={**scale.seconds, **self._apart(scale.world_size)}) for scale in found]

    def goodput(self, scale: Scale) -> dict[str, float]:
        """Return the share of the work that is done with faults, by method; none if no faults were asked for."""
        if (faults := self.faults) is None:
            return {}
        apart = {f"{name}:H {every}": every for name in SCHEMES for every in self.outer}
        return {
            name: scale.efficiency(name)
            * (
                faults.apart(scale.world_size, apart[name] * seconds / 2)  # half an outer step's are lost on average
                if name in apart
                else faults.together(scale.world_size)
            )
            for name, seconds in scale.seconds.items()
        }

    def _apart(self, world: int) -> dict[str, float]:
        """Return the seconds of a step by method of outer steps."""
        there = on(self.profile, self.network, world)
        return {
            f"{name}:H {every}": scheme.seconds(there, every)
            for name, scheme in SCHEMES.items()
            for every in self.outer
        }


def read(
    *,
    workers: str,
    link: str | None,
    topology: str | None,
    profile: Path | None,
    recipes: str | None,
    outer: str | None = None,
    tokens: float | None = None,
    batch: int | None = None,
    faults: str | None = None,
) -> Options:
    """Read options from text. Raises BadInput."""
    if (tokens is not None and not 0 < tokens < math.inf) or (batch is not None and not 0 < batch < 2**63):
        raise BadInput(f"--tokens is {tokens} and --batch {batch}; expected numbers above 0, the latter below 2^63")
    if tokens is None and batch is not None:
        raise BadInput("--batch says how many of the --tokens a worker takes in a step: give --tokens as well")
    known, model = _profile(profile)
    network, where = _network(link, topology, known)
    usual = ("dense", *known.costs) if profile is not None else _USUAL
    return Options(
        worlds=worlds(workers),
        profile=known,
        names=usual if recipes is None else tuple(dict.fromkeys(names(recipes, "--recipes", "dense,topk:0.01"))),
        network=network,
        model=model,
        where=where,
        outer=() if outer is None else counts(outer, "--outer"),
        tokens=tokens,
        batch=batch or 1,
        faults=None if faults is None else Faults.parse(faults),
    )


def worlds(text: str) -> tuple[int, ...]:
    """Read ``8..4096`` (doubling) or ``4,6,8``. Raises BadInput for anything else."""
    try:
        first, dots, last = text.partition("..")
        found = _doubling(int(first), int(last)) if dots else tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise BadInput(f"--workers {text!r}: expected numbers, such as 8..4096, which doubles, or 4,6,8") from error
    if not found or not all(1 <= world <= _MOST_WORKERS for world in found):
        raise BadInput(f"--workers {text!r}: expected 1 to {_MOST_WORKERS:,} workers, the least first")
    return tuple(sorted(set(found)))


def _doubling(first: int, last: int) -> tuple[int, ...]:
    if not 1 <= first <= last <= _MOST_WORKERS:
        return ()
    return (*(first << bit for bit in range((last // first).bit_length()) if first << bit < last), last)


def _profile(path: Path | None) -> tuple[Profile, str]:
    if path is None:
        model = "the paper of DRAGONN: XML, 126.7 M parameters in one layer, 25 ms a step on a V100, 12.5 ms to encode"
        return xml(densities=_BUILT_IN), f"{model}; decoding and merging, not published, count as free"
    try:
        found = Profile.load(path)
    except OSError as error:
        raise BadInput(f"--profile: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise BadInput(f"--profile {error}; expected what a Profile's save() wrote") from error
    gradients, made = found.timeline.gradients, found.made.get("world_size", found.world_size)
    millions = sum(g.numel for g in gradients) / 1e6
    return found, f"{path.name}: {millions:.3g} M parameters in {len(gradients)} tensors, measured with {made} workers"


def _network(link: str | None, topology: str | None, profile: Profile) -> tuple[Network | None, str]:
    try:
        if topology is not None and (topology.endswith(".csv") or Path(topology).is_file()):
            return _regions(Path(topology), parse_link(link or INSIDE))
        if topology is not None and link is not None:
            raise BadInput("--link and tiers in --topology exclude each other: the last tier is the link beyond")
        if topology is not None:
            tiers = parse_tiers(topology)
            near = [f"{described(link)} within {size}" for size, link in tiers.groups]
            return tiers, ", ".join([*near, f"{described(tiers.beyond)} beyond"])
        if link is not None:
            found = parse_link(link)
            return found, f"{described(found)} between all"
    except ValueError as error:
        raise BadInput(str(error)) from error
    return None, f"links as in the profile, {described(profile.links['all_reduce'])} a message of an all-reduce"


def _regions(path: Path, inside: Link) -> tuple[Regions, str]:
    try:
        found = read_regions(path, inside)
    except OSError as error:
        raise BadInput(f"--topology: cannot read {path}: {error.strerror}") from error
    ordered = ring(found) if len(found.names) <= MOST else found
    how = "the ring with the fastest slowest edge" if len(found.names) <= MOST else "as in the file"
    return ordered, f"regions in this order ({how}): {', '.join(ordered.names)}; {described(inside)} inside"
