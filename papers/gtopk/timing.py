"""gTop-k's claims about links and collectives."""

from statistics import median

import numpy as np

from papers.gtopk import GTOPK
from papers.lab.benches import CNN_1G, FC_1G, LM_1G, TEXT_1G, TEXT_100M, TEXT_OF_2, TEXT_OF_8, XL_1G, Steps
from papers.lab.judging import by_setting, every, verdict
from papers.lab.ledger import Outcome
from papers.lab.links import ROUTES, SWEEP, Found, collective, links, routes, straight, worlds
from thinwire.tools.cluster.link import parse_rate

_HOW = "Gloo between network namespaces of one machine, links limited by `tbf`; medians of 3"
_KEPT = ("100mbit", "1gbit")
"""Rates that the machine keeps: at 10 Gbit/s two cores are busy with copying, and times jump by a factor of ten."""


def _line(found: Found, link: str) -> tuple[float, float, float]:
    """Return seconds a byte, latency and R² of ping-pong."""
    sizes = sorted({row["bytes"] for row in found["pings"] if row["link"] == link})
    times = [median(r["seconds"] for r in found["pings"] if (r["link"], r["bytes"]) == (link, size)) for size in sizes]
    slope, _, r2 = straight(sizes, times)
    return slope, max(0.0, times[0] - slope * sizes[0]), r2


@GTOPK.judge("G8", SWEEP)
def linear_in_size(found: Found) -> Outcome:
    """A message's time is a straight line over its size, whose slope is the link's rate."""
    parts, said = dict[str, str](), []
    for link in links(found):
        slope, latency, r2 = _line(found, link)
        rate = parse_rate(link)
        wanted = 8 / rate.bits_per_second if rate else slope
        parts |= {link: verdict(r2 >= 0.99 and abs(slope / wanted - 1) <= 0.1)} if link in _KEPT else {}
        said.append(f"{link}: R² {r2:.4f}, {slope / wanted:.2f} of the rate's, {1e3 * latency:.2f} ms for the smallest")
    word, note = by_setting(parts)
    how = (
        f"ping-pong of 1 kB to 4 MB; {_HOW}; holds if R² is at least 0.99 and the slope within 10 % of the rate, "
        "at 100 Mbit/s and 1 Gbit/s: two cores do not keep 10"
    )
    return Outcome(verdict=word, note=note, measured="; ".join(said), how=how)


@GTOPK.judge("G1", SWEEP)
def ring_costs(found: Found) -> Outcome:
    """A dense all-reduce of 1 to 64 MB takes what the formula says."""
    parts, said = dict[str, str](), []
    for link in links(found):
        off = _off_formula(found, link)
        parts |= {link: verdict(max(map(abs, off)) <= 0.15)} if link in _KEPT else {}
        said.append(f"{link}: {min(off):+.0%} to {max(off):+.0%}, median {median(off):+.0%}")
    word, note = by_setting(parts)
    how = (
        "2(P-1) alpha + 2(P-1)/P m beta with alpha and beta of ping-pong, P = "
        f"{', '.join(map(str, worlds(found)))}; {_HOW}; within 15 %, "
        "at 100 Mbit/s and 1 Gbit/s: two cores do not keep 10"
    )
    return Outcome(verdict=word, note=note, measured="; ".join(said), how=how)


def _off_formula(found: Found, link: str) -> list[float]:
    beta, alpha, _ = _line(found, link)
    return [
        time / (2 * (p - 1) * (alpha + size / p * beta)) - 1
        for p in worlds(found)
        for size, time in zip(*collective(found, "all-reduce", link, p), strict=True)
        if 2**20 <= size <= 2**26
    ]


_STEPS = "`thinwire bench`, workers share 2 cores, median steps of three rounds"
_TREE, _GATHER = "gtopk 0.001", "topk 0.001"


@GTOPK.judge("G11", TEXT_OF_2, TEXT_100M, TEXT_OF_8)
def scales(two: Steps, four: Steps, eight: Steps) -> Outcome:
    """Faster than dense at any number of workers, and as fast as an all-gather at 8, where the model says so."""
    worlds = {2: two, 4: four, 8: eight}
    parts = {f"P = {p} over dense": verdict(steps.faster(_TREE) > 1) for p, steps in worlds.items()}
    parts["P = 8 over Top-k"] = verdict(abs(eight.faster(_TREE, _GATHER) - 1) <= 0.17)
    word, note = every(parts)
    note = note or ": over dense; ahead of Top-k nowhere up to 8 workers, where the model expects little"
    measured = "; ".join(
        f"P = {p}: {steps.faster(_TREE):.2f} dense, {steps.faster(_TREE, _GATHER):.2f} Top-k"
        for p, steps in worlds.items()
    )
    how = (
        f"transformer, 100 Mbit/s, density 0.001; {_STEPS}; the model's limit over Top-k is 1.17 "
        "at P = 8; holds if within that of 1"
    )
    return Outcome(verdict=word, note=note, measured=measured, how=how)


@GTOPK.judge("G22", CNN_1G, FC_1G, TEXT_1G, LM_1G, XL_1G)
def efficiency(*found: Steps) -> Outcome:
    """Faster than dense and than Top-k, on every model."""
    names = ("ResNet-20", "small VGG", "transformer", "LSTM", "XL")
    dense = {name: steps.faster(_TREE) for name, steps in zip(names, found, strict=True)}
    topk = {name: steps.faster(_TREE, _GATHER) for name, steps in zip(names, found, strict=True)}
    by_name = dict(zip(names, found, strict=True))
    parts = {f"{name} over dense": steps.ahead(_TREE) for name, steps in by_name.items()} | {
        f"{name} over Top-k": steps.ahead(_TREE, _GATHER) for name, steps in by_name.items()
    }
    word, note = every(parts)
    measured = "; ".join(f"{name} {dense[name]:.2f} dense, {topk[name]:.2f} Top-k" for name in names)
    how = (
        f"4 workers, 1 Gbit/s, density 0.001; {_STEPS}; direction only, decided where the 20th to 80th percentiles of "
        "steps lie apart"
    )
    return Outcome(verdict=word, note=note, measured=measured, how=how)


@GTOPK.judge("G13", FC_1G, CNN_1G, ROUTES)
def selecting_costs(fc: Steps, cnn: Steps, found: Found) -> Outcome:
    """By `torch.topk`, selecting from dense layers takes as long as computing; ResNets reach 80 % of linear scaling."""
    nbytes = fc.rows["dense"].wire_bytes_per_step.dense / 1.5
    sizes, times = zip(*((row["bytes"], row["encode"]) for row in routes(found, "topk", 4, 0.001)), strict=True)
    torchs = float(np.interp(nbytes, sizes, times))
    computing = fc.free
    ours = fc.rows[_GATHER].split_seconds.encode
    efficient = cnn.free / cnn.seconds(_TREE)
    parts = {"selecting": verdict(torchs >= 0.5 * computing), "efficiency": verdict(efficient >= 0.8)}
    word, note = every(parts)
    measured = (
        f"small VGG: `torch.topk` {1e3 * torchs:.0f} ms and ours {1e3 * ours:.0f} ms in a step of "
        f"{1e3 * computing:.0f} ms without a "
        f"network; ResNet-20 reaches {efficient:.0%} of a free network's steps"
    )
    how = (
        f"4 workers, 1 Gbit/s, density 0.001; {_STEPS}; as much: at least half; on a GPU "
        "computing is faster against selecting"
    )
    return Outcome(verdict=word, note=note, measured=measured, how=how)
