"""The S2 Reducer's claims about collectives."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import methodcaller
from typing import Any

from thinwire_lab.papers.s2.learning import CNN, CNN_WHOLE, LM, TEXT
from thinwire_lab.papers.shared import benches
from thinwire_lab.papers.shared.benches import Grid, Steps, at_every, faster, gains, span
from thinwire_lab.papers.shared.claims import S2
from thinwire_lab.papers.shared.judging import HALF_A_POINT, by_setting, every, no_worse, sooner, verdict
from thinwire_lab.papers.shared.ledger import Outcome
from thinwire_lab.papers.shared.sweep import EXCHANGES, SWEEP, Found, collective, exchanges, kept, worlds
from thinwire_lab.papers.shared.trials import Ways, perplexity_over, points_lost


@S2.judge("S15", SWEEP)
def reducing_beats_gathering(found: Found) -> Outcome:
    parts, said, counts = {}, [], worlds(found)
    for link in kept(found):
        ratios = [gather_over_reduce(found, link, p) for p in counts]
        parts[link] = verdict(all(ratio >= p / 2 for p, ratio in zip(counts, ratios, strict=True)))
        said.append(f"{link} (P = {', '.join(map(str, counts))}) {', '.join(f'{each:.2f}' for each in ratios)}")
    return Outcome(*by_setting(parts), measured="; ".join(said))


def gather_over_reduce(found: Found, link: str, world: int) -> float:
    """Return the ratio at the largest size measured for both."""
    gather, reduce = (
        dict(zip(*collective(found, kind, link, world), strict=True)) for kind in ("all-gather", "all-reduce")
    )
    size = max(set(gather) & set(reduce))
    return gather[size] / reduce[size]


SKETCH, UNION, GATHER = "s2_reducer 0.0312", "s2_union 0.0312", "topk 0.0312"
_before_gather, _before_union = (methodcaller("ahead", SKETCH, other) for other in (GATHER, UNION))


@S2.judge("S9", benches.LM_STEPS, LM.on(5))
def faster_than_gathering(lm: Grid, trained: Ways) -> Outcome:
    apart = perplexity_over(trained["sketch"], trained["dense"])
    parts = {"time": every(at_every(lm, _before_gather))[0], "perplexity": no_worse(apart, 1.0)}
    return Outcome(*every(parts), measured=f"{gains(lm, SKETCH, GATHER)}; perplexity {apart} over dense's")


@S2.judge("S13", benches.LM_STEPS, benches.TEXT_STEPS, LM.on(5), TEXT)
def blocks_save(lm: Grid, text: Grid, lm_trained: Ways, text_trained: Ways) -> Outcome:
    models = {"LSTM": lm, "transformer": {place: steps for place, steps in text.items() if SKETCH in steps.rows}}
    trained = {"LSTM": lm_trained, "transformer": text_trained}
    lost = {name: perplexity_over(ways["sketch"], ways["dense"]) for name, ways in trained.items()}
    parts = {
        name: every(at_every(found, _saves) | {"perplexity": no_worse(lost[name], 1.0)})[0]
        for name, found in models.items()
    }
    said = (
        f"{name}: bytes {span([steps.bytes(SKETCH) / steps.bytes(UNION) - 1 for steps in found.values()], '+.0%')}, "
        f"{faster(found, SKETCH, UNION)} times as fast, perplexity {lost[name]}"
        for name, found in models.items()
    )
    return Outcome(*by_setting(parts), measured="; ".join(said))


def _saves(steps: Steps) -> str:
    return every({"bytes": _smaller(steps, UNION), "time": _before_union(steps)})[0]


def _smaller(steps: Steps, *others: str) -> str:
    return verdict(steps.bytes(SKETCH) < min(map(steps.bytes, others)))


@S2.judge("S11", benches.CNN_STEPS, CNN, CNN_WHOLE)
def residual_network(found: Grid, cnn: Ways, whole: Ways) -> Outcome:
    parts = {
        "bytes": every(at_every(found, lambda steps: _smaller(steps, UNION, GATHER)))[0],
        "time against the union": every(at_every(found, _before_union, (4, 8), ("1gbit",)))[0],
        "time against all-gather": every(at_every(found, _before_gather, (4, 8), ("1gbit",)))[0],
        "accuracy": no_worse(points_lost(cnn["sketch"], cnn["dense"]), HALF_A_POINT),
    }
    measured = (
        f"over the union {faster(found, SKETCH, UNION)}, over all-gather {faster(found, SKETCH, GATHER)}, accuracy "
        f"{points_lost(cnn['sketch'], cnn['dense'])}; the model as one vector, as in the paper, "
        f"{points_lost(whole['whole'], cnn['dense'])}"
    )
    return Outcome(*every(parts), measured=measured)


def _worlds(found: Mapping[str, Any], *wanted: int) -> Sequence[int]:
    """Return those of these numbers of workers that were measured, or all that were, in a short run."""
    there = sorted({row["world_size"] for row in found["rows"]})
    return [world for world in wanted if world in there] or there


@S2.judge("S14", EXCHANGES)
def order_of_exchanges(found: Mapping[str, Any]) -> Outcome:
    parts, times = {}, []
    for link in dict.fromkeys(row["link"] for row in found["rows"]):
        for world in _worlds(found, 4, 8):
            each = exchanges(found, link, world)
            names = ("sketch, blocks", "all-gather", "doubling")
            order = {f"{a} before {b}": sooner(each[a].around, each[b].around) for a, b in pairwise(names)}
            parts[f"P = {world} at {link}"] = every(order)[0]
            times.append(f"{link}, P = {world}: {' / '.join(f'{each[name].ms:.0f}' for name in names)}")
    return Outcome(*every(parts), measured=f"ms of sketch / all-gather / doubling, {', '.join(times)}")


@S2.judge("S8", EXCHANGES, LM.on(5))
def faster_than_doubling(found: Mapping[str, Any], lm: Ways) -> Outcome:
    apart = perplexity_over(lm["sketch"], lm["dense"])
    gains, parts = {}, {"perplexity": no_worse(apart, 1.0)}
    for link in dict.fromkeys(row["link"] for row in found["rows"]):
        each = exchanges(found, link, _worlds(found, 4)[0])
        gains[link] = each["doubling"].ms / each["sketch, blocks"].ms
        parts[f"time at {link}"] = sooner(each["sketch, blocks"].around, each["doubling"].around)
    faster = ", ".join(f"{link} {gain:.2f} times faster" for link, gain in gains.items())
    measured = f"{faster}; perplexity {apart} over dense's"
    return Outcome(*every(parts), more=benches.MORE, measured=measured)  # repeats lie apart however many there are
