"""DRAGONN's claims about the time that one tensor takes, by size, link and number of workers."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from thinwire_lab.papers.dragonn.steps import PLAN, leaving_out
from thinwire_lab.papers.shared.benches import LINKS, MORE, XL_STEPS, Grid, at_every, faster
from thinwire_lab.papers.shared.claims import DRAGONN
from thinwire_lab.papers.shared.judging import any_of, by_setting, every, larger, verdict
from thinwire_lab.papers.shared.ledger import FAILS, HOLDS, UNDECIDED, Outcome
from thinwire_lab.papers.shared.sweep import ROUTES, SYNCHRONISING, Found, kept, parts, routes, seconds, worlds

_P = 4


@DRAGONN.judge("D1", SYNCHRONISING)
def compressing_is_half(found: Found) -> Outcome:
    parts, said = {}, []
    for density in (0.001, 0.01):
        crossings = {link: _crossing(found, link, density) for link in kept(found)}
        places = [each or math.inf for each in crossings.values()]
        falls = places == sorted(places, reverse=True) and places[0] > places[-1]
        parts[f"density {density:g}"] = verdict(falls)
        largest = {link: f"{_share(found, link, density)[-1][1]:.0%}" for link in crossings}
        said.append(
            f"density {density:g}: "
            + ", ".join(
                f"{link} {'from ' + _size(each) if each else 'never'} ({largest[link]} at the largest)"
                for link, each in crossings.items()
            )
        )
    return Outcome(*by_setting(parts), measured="; ".join(said))


def _share(found: Found, link: str, density: float) -> list[tuple[int, float]]:
    rows = ((row, parts(found, row, link)) for row in routes(found, "mask", _P, density))
    return [(row["bytes"], times[0] / sum(times)) for row, times in rows]


def _crossing(found: Found, link: str, density: float) -> int | None:
    """Return the size from which on all shares are above one half."""
    above = None
    for size, share in reversed(_share(found, link, density)):
        if share <= 0.5:
            break
        above = size
    return above


@DRAGONN.judge("D2", SYNCHRONISING)
def dense_wins_below(found: Found) -> Outcome:
    wins = {link: _dense_wins(found, "mask", link) for link in kept(found)}
    return Outcome(*by_setting({link: any_of(each.values()) for link, each in wins.items()}), measured=_where(wins))


@DRAGONN.judge("D3", SYNCHRONISING)
def topk_never_wins(found: Found) -> Outcome:
    wins = {link: _dense_wins(found, "topk", link) for link in kept(found)}
    parts = {link: every({_size(size): word for size, word in each.items()})[0] for link, each in wins.items()}
    return Outcome(*by_setting(parts), measured=_where(wins))


_RESULTS = {HOLDS: "dense wins at", FAILS: "loses at", UNDECIDED: "neither beyond repeats at"}


def _dense_wins(found: Found, route: str, link: str) -> dict[int, str]:
    """Return by size whether dense is faster in any repeat, in none, or in some."""

    def lasts(row: Mapping[str, Any], of: str) -> tuple[float, float]:
        gather = seconds(found, "all-gather", link, _P, row["sent"], of)
        return seconds(found, "all-reduce", link, _P, row["bytes"], of), row["encode"] + gather + row["decode"]

    wins = {}
    for row in routes(found, route, _P, 0.001):
        (soonest, other_soonest), (latest, other_latest) = lasts(row, "least"), lasts(row, "most")
        wins[row["bytes"]] = HOLDS if latest <= other_soonest else FAILS if soonest > other_latest else UNDECIDED
    return wins


def _where(wins: Mapping[str, Mapping[int, str]]) -> str:
    """Return where dense wins and loses, by link and bytes."""
    said = []
    for link, by_size in wins.items():
        sizes = {word: [size for size, each in by_size.items() if each == word] for word in _RESULTS}
        words = (f"{_RESULTS[word]} {_sizes(at, list(by_size))}" for word, at in sizes.items() if at)
        said.append(f"{link}: {', '.join(words)}")
    return "; ".join(said)


def _sizes(some: Sequence[int], known: Sequence[int]) -> str:
    """Return some of the known sizes, shorter where they are all, or all from one on."""
    if some == known:
        return "every size"
    if len(some) > 1 and some == known[-len(some) :]:
        return f"{_exponent(some[0])} and more"
    return " ".join(map(_exponent, some))


def _size(nbytes: int) -> str:
    return f"{_exponent(nbytes)} bytes"


def _exponent(nbytes: int) -> str:
    return f"2^{nbytes.bit_length() - 1}"


@DRAGONN.judge("D9", SYNCHRONISING, XL_STEPS)
def lead_grows(found: Found, xl: Grid) -> Outcome:
    counts = [world for world in worlds(found) if world in (2, 4, 8)]
    leads = {link: [_lead(found, p, link) for p in counts] for link in kept(found)}
    leads["25gbit by arithmetic"] = [_computed_lead(found, p) for p in counts]
    parts = {
        f"one tensor at {link}": verdict(all(b > 1.05 * a for a, b in pairwise(each))) for link, each in leads.items()
    }
    parts |= {f"whole steps of XL at {link}": word for link, word in _leads_of_steps(xl).items()}
    parts["Top-k last"] = every(
        at_every(xl, lambda steps: every({name: steps.ahead(name, "topk 0.001") for name in _LEADERS})[0])
    )[0]
    measured = (
        f"DGC's time over hashed slots' for {', '.join(map(str, counts))} workers: "
        + ", ".join(f"{link} {', '.join(f'{value:.2f}' for value in each)}" for link, each in leads.items())
        + f"; whole steps of XL {faster(xl, *_LEADERS)}"
    )
    return Outcome(*by_setting(parts), measured=measured)


_LEADERS = ("dragonn 0.001", "dgc 0.001")


def _leads_of_steps(xl: Grid) -> dict[str, str]:
    """Judge for each link whether the lead over DGC rises from each number of workers to the next."""
    leads = {link: [steps.gain(*_LEADERS) for place, steps in xl.items() if place.link == link] for link in LINKS}
    return {link: every({f"{b}": larger(b, a) for a, b in pairwise(each)})[0] for link, each in leads.items()}


def _lead(found: Found, world: int, link: str) -> float:
    mask, hashed = (routes(found, route, world, 0.001)[-1] for route in ("mask", "hashed"))
    return sum(parts(found, mask, link, "decode one by one")) / sum(parts(found, hashed, link))


_THEIR_BYTES = 25e9 / 8
"""A second on the authors' links, which are too fast for ours to stand in for."""


def _computed_lead(found: Found, world: int) -> float:
    """Return the lead on the authors' links: coding as measured on one thread, and what arrives, at their rate."""

    def lasts(route: str, decode: str) -> float:
        row = routes(found, route, world, 0.001)[-1]
        return row["encode"] + row[decode] + (world - 1) * row["sent"] / _THEIR_BYTES

    return lasts("mask", "decode one by one") / lasts("hashed", "decode")


@DRAGONN.judge("D12", ROUTES)
def encodes_sooner(found: Found) -> Outcome:
    pairs = list(zip(*(routes(found, route, _P, 0.001) for route in ("mask", "hashed")), strict=True))
    rows = [(mask["bytes"], hashed["encode"] / mask["encode"]) for mask, hashed in pairs]
    holds = all(ratio <= 0.5 for size, ratio in rows if size >= min(2**26, rows[-1][0]))
    measured = ", ".join(f"{_size(size)}: {ratio:.2f}" for size, ratio in rows[-3:])
    return Outcome(verdict=verdict(holds), measured=measured)


def gains_of_parts(found: Found, link: str) -> tuple[float, float, float]:
    """Return the gain over DGC of hashing alone, of decoding together alone, and of both, at the largest size."""
    mask, hashed = (routes(found, route, _P, 0.001)[-1] for route in ("mask", "hashed"))
    base = sum(parts(found, mask, link, "decode one by one"))
    alone = base - mask["encode"] + hashed["encode"]
    return base / alone, base / sum(parts(found, mask, link)), base / sum(parts(found, hashed, link))


@DRAGONN.judge("D15", SYNCHRONISING, PLAN)
def every_part_helps(found: Found, plan: Mapping[str, Any]) -> Outcome:
    gains = {link: gains_of_parts(found, link) for link in kept(found)}
    helping = {
        f"{part} at {link}": verdict(each[place] > 1.05)
        for place, part in enumerate(("hashing", "decoding together"))
        for link, each in gains.items()
    }
    left_out = list(leaving_out(plan))
    helping |= {f"leaving tensors out at {each.link}": each.verdict for each in left_out}
    measured = "; ".join(
        f"{link}: hashing {each[0]:.2f}, decoding together {each[1]:.2f}, both {each[2]:.2f}"
        for link, each in gains.items()
    )
    leaving = ", ".join(f"{each.link} {each.gain:.2f} ({each.compressed} compressed)" for each in left_out)
    return Outcome(*every(helping), more=MORE, measured=f"{measured}; leaving tensors out: {leaving}")
