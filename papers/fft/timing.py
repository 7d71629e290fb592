"""The FFT paper's claims about collectives."""

from papers.fft import FFT_PAPER
from papers.lab.judging import by_setting, verdict
from papers.lab.ledger import Outcome
from papers.lab.links import SWEEP, Found, links, seconds, straight, worlds


@FFT_PAPER.judge("F13", SWEEP)
def gathers_linearly(found: Found) -> Outcome:
    """The time of an all-gather of a fixed payload is a straight line over the number of workers."""
    parts, said, counts = {}, [], worlds(found)
    for link in links(found):
        times = [seconds(found, "all-gather", link, p, 2**20) for p in counts]
        slope, _, r2 = straight([p - 1 for p in counts], times)
        parts[link] = verdict(r2 >= 0.98)
        said.append(f"{link}: R² {r2:.3f}, {1e3 * slope:.1f} ms a worker more")
    word, note = by_setting(parts)
    how = f"1 MiB a worker, P = {', '.join(map(str, counts))}; Gloo, workers in namespaces of one machine; holds if R² is at least 0.98"
    return Outcome(verdict=word, note=note, measured="; ".join(said), how=how)
