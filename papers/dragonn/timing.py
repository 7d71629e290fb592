"""DRAGONN's claims about the time that one tensor takes, by size, link and number of workers."""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

from papers.dragonn import DRAGONN
from papers.lab.benches import CNN_1G, FC_1G, LM_1G, TEXT_1G, XL_1G, XL_100M, Steps
from papers.lab.judging import Range, by_setting, every, sooner, verdict
from papers.lab.ledger import FAILS, HOLDS, UNDECIDED, Outcome
from papers.lab.links import KEPT_SAID, ROUTES, SYNCHRONISING, Found, kept, links, parts, routes, seconds, worlds
from papers.lab.shelf import Document

PLAN = Document(
    name="plan",
    words="python benchmarks/planner.py grid --models transformer,xml --worlds 4 --links none,1gbit,300mbit,100mbit",
    quick="--links none --models transformer --worlds 2 --seconds 0.2",
)
_P = 4
_ENCODING = (
    "tensors of 2^16 to 2^27 bytes with heavy tails, one thread, medians of 5; DGC's selection as a mask and `nonzero` "
    "in torch"
)
_HOW = f"{_ENCODING}; collectives of workers behind links of their own, Gloo, medians of 3; judged {KEPT_SAID}"
_AT_FOUR = f"4 workers; {_HOW}"


@DRAGONN.judge("D1", SYNCHRONISING)
def compressing_is_half(found: Found) -> Outcome:
    """From some size on DGC's encoding is over half of encoding, exchange and decoding; sooner on faster links."""
    crossings = {link: _crossing(found, link, 0.001) for link in kept(found)}
    places = [each or math.inf for each in crossings.values()]
    falls = places == sorted(places, reverse=True) and places[0] > places[-1]
    largest = {link: f"{_share(found, link, 0.001)[-1][1]:.0%}" for link in crossings}
    measured = "; ".join(
        f"{link}: {'from ' + _size(each) if each else 'never'}, {largest[link]} at the largest"
        for link, each in crossings.items()
    )
    at_ten = ", ".join(f"{link} {_share(found, link, 0.01)[-1][1]:.0%}" for link in crossings)
    how = (
        f"share of encoding, density 0.001; {_AT_FOUR}; holds if it crosses one half, at smaller sizes on faster links"
    )
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


@DRAGONN.judge("D2", SYNCHRONISING)
def dense_wins_below(found: Found) -> Outcome:
    """Small tensors synchronise sooner dense."""
    wins = {link: _dense_wins(found, "mask", link) for link in links(found)}
    word, note = by_setting({link: _any(wins[link].values()) for link in kept(found)})
    how = f"density 0.001; {_AT_FOUR}; {_BEYOND}; holds where dense wins at some size"
    return Outcome(verdict=word, note=note, measured=_where(wins), how=how)


@DRAGONN.judge("D3", SYNCHRONISING)
def topk_never_wins(found: Found) -> Outcome:
    """Exact Top-k loses to dense at every size."""
    wins = {link: _dense_wins(found, "topk", link) for link in links(found)}
    word, note = by_setting({link: every(_named(wins[link]))[0] for link in kept(found)})
    how = f"`torch.topk`, density 0.001; {_AT_FOUR}; {_BEYOND}; holds where dense wins at every size"
    return Outcome(verdict=word, note=note, measured=_where(wins), how=how)


_BEYOND = "a size is won where the longest of three repeats is shorter than the other's shortest"
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


def _any(words: Iterable[str]) -> str:
    there = set(words)
    return HOLDS if HOLDS in there else UNDECIDED if UNDECIDED in there else FAILS


def _named(wins: Mapping[int, str]) -> dict[str, str]:
    return {_size(size): word for size, word in wins.items()}


def _where(wins: Mapping[str, Mapping[int, str]]) -> str:
    """Return where dense wins and loses, by link."""
    said = []
    for link, by_size in wins.items():
        sizes = {word: [_exponent(size) for size, each in by_size.items() if each == word] for word in _RESULTS}
        said.append(f"{link}: " + ", ".join(f"{_RESULTS[word]} {' '.join(at)}" for word, at in sizes.items() if at))
    return "; ".join(said) + " (bytes)"


def _size(nbytes: int) -> str:
    return f"{_exponent(nbytes)} bytes"


def _exponent(nbytes: int) -> str:
    return f"2^{nbytes.bit_length() - 1}"


@DRAGONN.judge("D9", SYNCHRONISING)
def lead_grows(found: Found) -> Outcome:
    """The lead over DGC grows with the number of workers."""
    counts = [world for world in worlds(found) if world in (2, 4, 8)]
    as_published = {link: [_lead(found, p, link, "decode one by one") for p in counts] for link in links(found)}
    both = [_lead(found, world, kept(found)[-1], "decode") for world in counts]
    word, note = by_setting(
        {link: verdict(all(b > 1.05 * a for a, b in pairwise(as_published[link]))) for link in kept(found)}
    )
    measured = (
        f"DGC's time over hashed slots' for {', '.join(map(str, counts))} workers: "
        + ", ".join(f"{link} {_numbers(each)}" for link, each in as_published.items())
        + f"; with payloads decoded together for both, at {kept(found)[-1]} {_numbers(both)}"
    )
    how = (
        "a tensor of the largest size, density 0.001; DGC decodes payloads one by one, "
        f"as there; {_HOW}; holds if it rises by over 5 %"
    )
    return Outcome(verdict=word, note=note, measured=measured, how=how)


def _lead(found: Found, world: int, link: str, decode: str) -> float:
    mask, hashed = (routes(found, route, world, 0.001)[-1] for route in ("mask", "hashed"))
    return sum(parts(found, mask, link, decode)) / sum(parts(found, hashed, link))


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


@DRAGONN.judge("D12", ROUTES)
def encodes_sooner(found: Found) -> Outcome:
    """Hashing encodes in at most half of the time of a mask and `nonzero`, from 64 MB on."""
    rows = list(_pairs(found))
    holds = all(ratio <= 0.5 for size, ratio, _ in rows if size >= min(2**26, rows[-1][0]))
    measured = ", ".join(f"{_size(size)}: {ratio:.2f}" for size, ratio, _ in rows[-3:])
    ours = ", ".join(f"{sampled:.2f}" for _, _, sampled in rows[-3:])
    how = f"time of `HashedSlots` over that of a mask and `nonzero`, density 0.001; no network; {_ENCODING}"
    return Outcome(
        verdict=verdict(holds), measured=f"{measured}; our own sampled threshold without slots {ours}", how=how
    )


def _pairs(found: Found) -> Iterator[tuple[int, float, float]]:
    for mask, hashed, sampled in zip(
        *(routes(found, route, _P, 0.001) for route in ("mask", "hashed", "sampled")), strict=True
    ):
        yield mask["bytes"], hashed["encode"] / mask["encode"], sampled["encode"] / mask["encode"]


def gains_of_parts(found: Found, link: str) -> tuple[float, float, float]:
    """Return the gain over DGC of hashing alone, of decoding together alone, and of both, at the largest size."""
    mask, hashed = (routes(found, route, _P, 0.001)[-1] for route in ("mask", "hashed"))
    base = sum(parts(found, mask, link, "decode one by one"))
    alone = base - mask["encode"] + hashed["encode"]
    return base / alone, base / sum(parts(found, mask, link)), base / sum(parts(found, hashed, link))


@DRAGONN.judge("D15", SYNCHRONISING)
def every_part_helps(found: Found) -> Outcome:
    """Hashing alone, and decoding payloads together alone, each make synchronising faster than DGC."""
    gains = {link: gains_of_parts(found, link) for link in links(found)}
    helping = {f"hashing at {link}": verdict(gains[link][0] > 1.05) for link in kept(found)}
    helping |= {f"decoding together at {link}": verdict(gains[link][1] > 1.05) for link in kept(found)}
    word, note = every(helping | {"leaving tensors out": UNDECIDED})
    measured = "; ".join(
        f"{link}: hashing alone {each[0]:.2f}, decoding together alone {each[1]:.2f}, both {each[2]:.2f}"
        for link, each in gains.items()
    )
    how = (
        "gain over DGC whose payloads are decoded one by one; a tensor of the largest size, density 0.001; "
        f"{_AT_FOUR}; leaving tensors out was not switched alone: D16 judges whether it hurts"
    )
    return Outcome(verdict=word, note=note, measured=measured, how=how)


_NOISE = 0.97
"""A gain that is this share of another's is not behind it."""
_STEPS = "`thinwire bench`, 4 workers on 2 cores, median steps of three rounds; 20th to 80th percentile in brackets"


_APART = "brackets apart"


def _gain(steps: Steps, label: str) -> str:
    return f"{steps.faster(label):.2f} ({steps.spread(label)})"


@DRAGONN.judge("D4", FC_1G)
def encoding_eats_gain(fc: Steps) -> Outcome:
    """DGC gains less than its bytes promise, and encoding is at least four fifths of what is missing."""
    promised = fc.free + 8 * fc.bytes("dgc 0.001") / 1e9
    missing = fc.seconds("dgc 0.001") - promised
    split = fc.rows["dgc 0.001"].split_seconds
    explained = (split.encode + split.decode) / missing if missing > 0 else 0.0
    measured = (
        f"{fc.seconds('dense') / promised:.2f} expected, {_gain(fc, 'dgc 0.001')} seen; encoding "
        f"and decoding are {explained:.0%} of "
        f"the {1e3 * missing:.0f} ms that are missing"
    )
    how = f"small VGG, 1 Gbit/s; expected: a step with the link lifted and DGC's bytes at that rate; {_STEPS}"
    return Outcome(verdict=verdict(missing > 0 and explained >= 0.8), measured=measured, how=how)


@DRAGONN.judge("D8", CNN_1G, TEXT_1G, XL_1G)
def hashed_first(cnn: Steps, text: Steps, xl: Steps) -> Outcome:
    """Hashed slots are faster than DGC and that than dense, most so on the largest layer."""
    models = {"ResNet-20": cnn, "transformer": text, "XL": xl}
    parts = {
        f"{name}, {label}": steps.ahead(*pair)
        for name, steps in models.items()
        for label, pair in (("over DGC", ("dragonn 0.001", "dgc 0.001")), ("DGC over dense", ("dgc 0.001",)))
    }
    word, note = every(parts)
    measured = "; ".join(
        f"{name}: {_gain(steps, 'dragonn 0.001')} and {_gain(steps, 'dgc 0.001')}" for name, steps in models.items()
    )
    how = (
        "gain over dense of `dragonn` and `dgc`, density 0.001, 1 Gbit/s; XL: 12.7 M weights; "
        f"{_STEPS}; holds if in that order on all, {_APART}"
    )
    return Outcome(verdict=word, note=note, measured=measured, how=how)


@DRAGONN.judge("D18", XL_1G)
def order_of_throughput(xl: Steps) -> Outcome:
    """Random-k is faster than DRAGONN, and that than DGC and SignSGD."""
    labels = ("randomk 0.001", "dragonn 0.001", "dgc 0.001", "signsgd")
    first, hashed, *others = labels
    word, note = every(
        {f"{a} over {b}": xl.ahead(a, b) for a, b in ((first, hashed), *((hashed, each) for each in others))}
    )
    measured = ", ".join(f"{label} {_gain(xl, label)}" for label in labels)
    how = f"gain over dense, XL of 12.7 M weights, 1 Gbit/s; {_STEPS}; holds if in that order, {_APART}"
    return Outcome(verdict=word, note=note, measured=measured, how=how)


@DRAGONN.judge("D19", TEXT_1G)
def leads_at_each_ratio(text: Steps) -> Outcome:
    """Hashed slots lead DGC at each density, and QSGD."""
    densities = ("0.001", "0.01", "0.1")
    parts = {
        density: verdict(text.faster(f"dragonn {density}") >= _NOISE * text.faster(f"dgc {density}"))
        for density in densities
    } | {"QSGD": verdict(text.faster("dragonn 0.01") >= _NOISE * text.faster("qsgd"))}
    word, note = every(parts)
    said = "; ".join(f"{d}: {_gain(text, f'dragonn {d}')} and {_gain(text, f'dgc {d}')}" for d in densities)
    measured = f"{said}; QSGD of 4 bits {_gain(text, 'qsgd')}"
    how = (
        f"gain over dense of `dragonn` and `dgc`, transformer, 1 Gbit/s; {_STEPS}; holds if "
        "nowhere more than 3 % behind"
    )
    return Outcome(verdict=word, note=note, measured=measured, how=how)


@DRAGONN.judge("D20", LM_1G)
def language_model(lm: Steps) -> Outcome:
    """Faster than DGC, and both than dense, on a model with a large embedding."""
    hashed, dgc = "dragonn 0.001", "dgc 0.001"
    word, note = every({"over DGC": lm.ahead(hashed, dgc), "DGC over dense": lm.ahead(dgc)})
    measured = f"{lm.faster(hashed, dgc):.2f} over DGC, {_gain(lm, hashed)} over dense"
    how = f"LSTM of 4.4 M weights on WikiText-2 instead of BERT, 1 Gbit/s; {_STEPS}; direction only, {_APART}"
    return Outcome(verdict=word, note=note, measured=measured, how=how)


@DRAGONN.judge("D26", XL_100M, XL_1G)
def more_on_faster_links(slow: Steps, fast: Steps) -> Outcome:
    """The lead over DGC is larger on the faster link."""
    (least, low, most), (least_fast, high, most_fast) = map(_leads, (slow, fast))
    word = HOLDS if least_fast > most else FAILS if most_fast < least else UNDECIDED
    measured = f"DGC's step over DRAGONN's: {low:.3f} at 100 Mbit/s, {high:.3f} at 1 Gbit/s"
    how = f"XL of 12.7 M weights, density 0.001; {_STEPS}; holds if it rises, {_APART}"
    return Outcome(verdict=word, measured=measured, how=how)


def _leads(steps: Steps) -> tuple[float, float, float]:
    """Return DGC's step over DRAGONN's: at least, by medians, and at most."""
    dgc, hashed = (steps.rows[f"{name} 0.001"].step_seconds for name in ("dgc", "dragonn"))
    return dgc.p20 / hashed.p80, dgc.p50 / hashed.p50, dgc.p80 / hashed.p20


@DRAGONN.judge("D16", PLAN)
def choosing_never_hurts(found: Mapping[str, Any]) -> Outcome:
    """What Eq. 1 chooses is no slower than all dense, nor than all by the same method, at each rate."""
    parts, said, all_of = {}, [], _most_chosen(found)
    for cell in found["cells"]:
        where = f"{cell['model']} at {cell['link']}"
        leaves_some = len(cell["choice"]) < all_of[cell["model"]]
        others = ["dense", *(sorted(set(cell["choice"].values())) if leaves_some else ())]
        parts[where] = every({name: _not_behind(cell, name) for name in others})[0]
        said.append(f"{where} " + ", ".join(f"{_times(cell, name):.2f} of {name}" for name in others))
    word, note = every(parts)
    behind = {f"{cell['model']} at {cell['link']}": _behind(cell) for cell in found["cells"]}
    worst = max(behind, key=lambda where: behind[where][1])
    next_worst = sorted(times for _, times in behind.values())[-2]
    measured = (
        f"{'; '.join(said)}. Which method, the paper does not ask: the planner's is {behind[worst][1] - 1:.0%} behind "
        f"{behind[worst][0]} on {worst}, and at most {next_worst - 1:.0%} "
        "elsewhere"
    )
    how = (
        "real steps of 4 workers, in turns: the plan, dense, and, where the plan leaves tensors out, its method for "
        "all; the planner counts "
        "2/K, as a ring all-reduce sends, and for 4 workers the printed 1/K would see half of dense's time; holds if "
        "nowhere over 5 % behind by medians, and fails where the 20th to 80th percentiles say so, too"
    )
    return Outcome(verdict=word, note=note, measured=measured, how=how)


def _most_chosen(found: Mapping[str, Any]) -> dict[str, int]:
    """Return by model how many tensors a plan compresses at most: where it takes all, it chooses as all-compressed."""
    most: dict[str, int] = {}
    for cell in found["cells"]:
        most[cell["model"]] = max(most.get(cell["model"], 0), len(cell["choice"]))
    return most


def _not_behind(cell: Mapping[str, Any], name: str) -> str:
    """Whether the plan's steps are within 5 % of another row's, by medians; it fails where the percentiles say so."""
    if _times(cell, name) <= 1.05:
        return HOLDS
    return FAILS if sooner(_middle(cell, "the plan"), _middle(cell, name), 1.05) == FAILS else UNDECIDED


def _middle(cell: Mapping[str, Any], name: str) -> Range:
    """Return the 20th and 80th percentile of the steps."""
    low, *_, high = quantiles(cell["measured"][name], n=5)
    return low, high


def _times(cell: Mapping[str, Any], name: str) -> float:
    return median(cell["measured"]["the plan"]) / median(cell["measured"][name])


def _behind(cell: Mapping[str, Any]) -> tuple[str, float]:
    """Return the fastest of all methods, and how many times as long the plan's median step is."""
    others = [name for name in cell["measured"] if name not in ("the plan", "dense again", "auto")]
    best = max(others, key=lambda name: _times(cell, name))
    return best, _times(cell, best)
