"""gTop-k's claims about links and collectives."""

from statistics import median

from papers.gtopk import GTOPK
from papers.lab.judging import by_setting, verdict
from papers.lab.ledger import Outcome
from papers.lab.links import SWEEP, Found, collective, links, straight, worlds
from thinwire.tools.cluster.link import parse_rate

_HOW = "Gloo between network namespaces of one machine, links limited by `tbf`; medians of 3"


def _line(found: Found, link: str) -> tuple[float, float, float]:
    """Return seconds a byte, latency and R² of ping-pong."""
    sizes = sorted({row["bytes"] for row in found["pings"] if row["link"] == link})
    times = [median(r["seconds"] for r in found["pings"] if (r["link"], r["bytes"]) == (link, size)) for size in sizes]
    slope, _, r2 = straight(sizes, times)
    return slope, max(0.0, times[0] - slope * sizes[0]), r2


@GTOPK.judge("G8", SWEEP)
def linear_in_size(found: Found) -> Outcome:
    """A message's time is a straight line over its size, whose slope is the link's rate."""
    parts, said = {}, []
    for link in links(found):
        slope, latency, r2 = _line(found, link)
        rate = parse_rate(link)
        wanted = 8 / rate.bits_per_second if rate else slope
        parts[link] = verdict(r2 >= 0.99 and abs(slope / wanted - 1) <= 0.1)
        said.append(f"{link}: R² {r2:.4f}, {slope / wanted:.2f} of the rate's, {1e3 * latency:.2f} ms for the smallest")
    word, note = by_setting(parts)
    how = f"ping-pong of 1 kB to 4 MB; {_HOW}; holds if R² is at least 0.99 and the slope within 10 % of the rate"
    return Outcome(verdict=word, note=note, measured="; ".join(said), how=how)


@GTOPK.judge("G1", SWEEP)
def ring_costs(found: Found) -> Outcome:
    """A dense all-reduce of 1 to 64 MB takes what the formula says."""
    parts, said = {}, []
    for link in links(found):
        off = _off_formula(found, link)
        parts[link] = verdict(max(map(abs, off)) <= 0.15)
        said.append(f"{link}: {min(off):+.0%} to {max(off):+.0%}, median {median(off):+.0%}")
    word, note = by_setting(parts)
    how = f"2(P−1)α + 2(P−1)/P·mβ with α and β of ping-pong, P = {', '.join(map(str, worlds(found)))}; {_HOW}; within 15 %"
    return Outcome(verdict=word, note=note, measured="; ".join(said), how=how)


def _off_formula(found: Found, link: str) -> list[float]:
    beta, alpha, _ = _line(found, link)
    return [
        time / (2 * (p - 1) * (alpha + size / p * beta)) - 1
        for p in worlds(found)
        for size, time in zip(*collective(found, "all-reduce", link, p), strict=True)
        if 2**20 <= size <= 2**26
    ]
