"""Methods against each other, each at its own best rate: a search on one seed, then the best over several.

A rate is best once half and twice of it end higher. Searches are shorter than the finals, so that a rate that only a
long training wants is missed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from thinwire_lab.studies.convergence.training import Run, Settings


class Entry(NamedTuple):
    """A recipe under an optimizer, and the rate at which its search begins."""

    recipe: str
    optimizer: str
    rate: float


ENTRIES = (
    Entry("dense()", "adamw(betas=(0.8, 0.95))", 1e-3),
    Entry("dense()", "adamw(betas=(0.9, 0.95))", 1e-3),
    Entry("dense()", "muon()", 3e-3),
    Entry("orthogonal()", "adamw(betas=(0.9, 0.9), small=(0.9, 0.95))", 2e-3),
    Entry("fading(density=0.025, decay=None)", "adamw(betas=(0.95, 0.9))", 2e-3),
    Entry("sparseloco(every=30)", "muon()", 3e-3),
    Entry("topk(density=0.01)", "adamw(betas=(0.9, 0.95))", 1e-3),
    Entry("powersgd(rank=4)", "adamw(betas=(0.9, 0.95))", 1e-3),
)


def contest(
    run: Callable[[Settings], Run],
    common: Settings,
    entries: Sequence[Entry] = ENTRIES,
    *,
    search: int,
    finals: int,
    seeds: Sequence[int],
) -> None:
    """Search each entry's rate with `search` steps, then run the best `finals` of them whole, with every seed.

    Args:
        run: Trains, or returns the run that is there.
        common: What entries have alike, and the steps of the finals.
        entries: Who takes part. The best of `dense()` under AdamW is in the finals, wherever it ends.
        search: Steps of the search.
        finals: How many entries get there.
        seeds: Of the finals; the search takes the first.
    """
    short = replace(common, steps=search, seed=seeds[0])
    found = sorted((_searched(run, short, entry) for entry in entries), key=_loss)
    baseline = [best for best in found if best.settings.recipe == "dense()" and "adamw" in best.settings.optimizer][:1]
    chosen = found[:finals]
    for best in [*chosen, *(each for each in baseline if each not in chosen)]:
        for seed in seeds:
            run(replace(best.settings, steps=common.steps, seed=seed))


def _searched(run: Callable[[Settings], Run], common: Settings, entry: Entry) -> Run:
    """Return the entry's run at a rate that neither half nor twice of it betters."""

    def at(rate: float) -> Run:
        return run(replace(common, recipe=entry.recipe, optimizer=entry.optimizer, rate=rate))

    best = at(entry.rate)
    while (better := min(best, at(best.settings.rate / 2), at(best.settings.rate * 2), key=_loss)) is not best:
        best = better
    return best


def _loss(run: Run) -> float:
    return run.loss if math.isfinite(run.loss) else math.inf
