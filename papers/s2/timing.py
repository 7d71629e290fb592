"""The S2 Reducer's claims about collectives."""

from papers.lab.judging import by_setting, verdict
from papers.lab.ledger import Outcome
from papers.lab.links import SWEEP, Found, collective, links, worlds
from papers.s2 import S2


@S2.judge("S15", SWEEP)
def reducing_beats_gathering(found: Found) -> Outcome:
    """A dense all-reduce takes P/2 times less than an all-gather of equal messages, beyond 8 MB."""
    parts, said = {}, []
    for link in links(found):
        ratios = {p: _ratio(found, link, p) for p in worlds(found)}
        known = {p: ratio for p, ratio in ratios.items() if ratio}
        parts[link] = verdict(all(ratio >= p / 2 for p, ratio in known.items()))
        said.append(f"{link}: " + ", ".join(f"P = {p} {ratio:.2f} (P/2 = {p / 2:g})" for p, ratio in known.items()))
    word, note = by_setting(parts)
    how = "all-gather over all-reduce, the largest message that both took; Gloo, workers in namespaces of one machine; holds if at least P/2"
    return Outcome(verdict=word, note=note, measured="; ".join(said), how=how)


def _ratio(found: Found, link: str, world: int) -> float:
    """Return the ratio at the largest size measured for both."""
    gather, reduce = (dict(zip(*collective(found, kind, link, world), strict=True)) for kind in ("all-gather", "all-reduce"))
    size = max(set(gather) & set(reduce))
    return gather[size] / reduce[size]
