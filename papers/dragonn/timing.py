"""DRAGONN's claims about the time that one tensor takes, by size, link and number of workers."""

from collections.abc import Iterator

from papers.dragonn import DRAGONN
from papers.lab.judging import by_setting, every, verdict
from papers.lab.ledger import FAILS, HOLDS, Outcome
from papers.lab.links import SWEEP, Found, links, parts, routes, seconds, worlds

_P = 4
_HOW = (
    "tensors of 2^16 to 2^27 bytes with heavy tails; 4 workers behind links of their own, Gloo; DGC's selection as a mask and "
    "`nonzero` in torch, one thread, medians of 3"
)


@DRAGONN.judge("D1", SWEEP)
def compressing_is_half(found: Found) -> Outcome:
    """A size exists from which DGC's encoding is over half of encoding, exchange and decoding; faster links lower it."""
    crossings = {link: _crossing(found, link, 0.001) for link in links(found)}
    known = [each for each in crossings.values() if each]
    falls = len(known) > 1 and known == sorted(known, reverse=True) and known[0] > known[-1]
    largest = {link: f"{_share(found, link, 0.001)[-1][1]:.0%}" for link in crossings}
    measured = "; ".join(
        f"{link}: {'from ' + _size(each) if each else 'never'}, {largest[link]} at the largest" for link, each in crossings.items()
    )
    at_ten = ", ".join(f"{link} {_share(found, link, 0.01)[-1][1]:.0%}" for link in crossings)
    how = f"share of encoding, density 0.001; {_HOW}; holds if it crosses one half, at smaller sizes on faster links"
    return Outcome(verdict=verdict(falls), measured=f"{measured}; at density 0.01 and the largest {at_ten}", how=how)


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


@DRAGONN.judge("D2", SWEEP)
def dense_wins_below(found: Found) -> Outcome:
    """Small tensors synchronise sooner dense."""
    ends = {link: _break_even(found, "mask", link) for link in links(found)}
    measured = ", ".join(f"{link}: {_below(each)}" for link, each in ends.items())
    word, note = by_setting({link: verdict(each != 0) for link, each in ends.items()})
    return Outcome(verdict=word, note=note, measured=measured, how=f"density 0.001; {_HOW}; holds where dense wins at some size")


@DRAGONN.judge("D3", SWEEP)
def topk_never_wins(found: Found) -> Outcome:
    """Exact Top-k loses to dense at every size."""
    ends = {link: _break_even(found, "topk", link) for link in links(found)}
    measured = ", ".join(f"{link}: {_below(each)}" for link, each in ends.items())
    word, note = by_setting({link: verdict(each is None) for link, each in ends.items()})
    return Outcome(verdict=word, note=note, measured=measured, how=f"`torch.topk`, density 0.001; {_HOW}; holds where no size wins")


def _break_even(found: Found, route: str, link: str) -> int | None:
    """Return the largest size at which dense is no slower: 0 if there is none, None if it never loses."""
    wins = [
        (row["bytes"], seconds(found, "all-reduce", link, _P, row["bytes"]) <= sum(parts(found, row, link)))
        for row in routes(found, route, _P, 0.001)
    ]
    if all(dense for _, dense in wins):
        return None
    return max((size for size, dense in wins if dense), default=0)


def _below(size: int | None) -> str:
    if size is None:
        return "dense wins at every size"
    return f"dense wins up to {_size(size)}" if size else "dense wins at no size"


def _size(nbytes: int) -> str:
    return f"2^{nbytes.bit_length() - 1} bytes"


@DRAGONN.judge("D9", SWEEP)
def lead_grows(found: Found) -> Outcome:
    """The lead over DGC grows with the number of workers."""
    counts = [world for world in worlds(found) if world in (2, 4, 8)]
    link = links(found)[-1]
    as_published = [_lead(found, world, link, "decode one by one") for world in counts]
    both = [_lead(found, world, link, "decode") for world in counts]
    rises = all(b > 1.05 * a for a, b in zip(as_published, as_published[1:], strict=False))
    measured = (
        f"DGC's time over hashed slots' for {', '.join(map(str, counts))} workers: {_numbers(as_published)}; with payloads decoded "
        f"together for both {_numbers(both)}"
    )
    how = f"a tensor of the largest size, density 0.001, {link}; DGC decodes payloads one by one, as there; {_HOW}; holds if it rises by over 5 %"
    return Outcome(verdict=verdict(rises), measured=measured, how=how)


def _lead(found: Found, world: int, link: str, decode: str) -> float:
    mask, hashed = (routes(found, route, world, 0.001)[-1] for route in ("mask", "hashed"))
    return sum(parts(found, mask, link, decode)) / sum(parts(found, hashed, link))


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


@DRAGONN.judge("D12", SWEEP)
def encodes_sooner(found: Found) -> Outcome:
    """Hashing encodes in at most half of the time of a mask and `nonzero`, from 64 MB on."""
    rows = list(_pairs(found))
    holds = all(ratio <= 0.5 for size, ratio, _ in rows if size >= min(2**26, rows[-1][0]))
    measured = ", ".join(f"{_size(size)}: {ratio:.2f}" for size, ratio, _ in rows[-3:])
    ours = ", ".join(f"{sampled:.2f}" for _, _, sampled in rows[-3:])
    how = f"time of `HashedSlots` over that of a mask and `nonzero`, density 0.001; {_HOW}"
    return Outcome(verdict=verdict(holds), measured=f"{measured}; our own sampled threshold without slots {ours}", how=how)


def _pairs(found: Found) -> Iterator[tuple[int, float, float]]:
    for mask, hashed, sampled in zip(
        *(routes(found, route, _P, 0.001) for route in ("mask", "hashed", "sampled")), strict=True
    ):
        yield mask["bytes"], hashed["encode"] / mask["encode"], sampled["encode"] / mask["encode"]


@DRAGONN.judge("D15", SWEEP)
def every_part_helps(found: Found) -> Outcome:
    """Hashing alone, and decoding payloads together alone, each make synchronising faster than DGC."""
    parts_help, said = {}, []
    for link in links(found):
        mask, hashed = (routes(found, route, _P, 0.001)[-1] for route in ("mask", "hashed"))
        base = sum(parts(found, mask, link, "decode one by one"))
        alone = base - mask["encode"] + hashed["encode"]
        together = sum(parts(found, mask, link))
        gains = [base / alone, base / together, base / sum(parts(found, hashed, link))]
        parts_help |= {f"hashing at {link}": verdict(gains[0] > 1.05), f"decoding at {link}": verdict(gains[1] > 1.05)}
        said.append(f"{link}: hashing alone {gains[0]:.2f}, decoding together alone {gains[1]:.2f}, both {gains[2]:.2f}")
    word, note = every(parts_help)
    how = f"gain over DGC whose payloads are decoded one by one; a tensor of the largest size, density 0.001; {_HOW}; leaving tensors out is D16"
    return Outcome(verdict=HOLDS if word == HOLDS else FAILS, note=note, measured="; ".join(said), how=how)
