"""The conclusions of a run, in sentences."""

import math
from collections.abc import Sequence
from dataclasses import asdict

from thinwire_lab.bench.results import HALF, Results, Row
from thinwire_lab.show.units import UNKNOWN, duration, loss_text

CLOSE = 1.05  # times within 5 % of each other are named together: one run cannot tell them apart


def in_words(results: Results) -> list[str]:
    """Return the conclusions, and what the table cannot tell."""
    if not results.rows:
        return ["No recipe finished."]
    words = [_first_at_target(results), _lowest_loss(results), _where_time_goes(results)]
    if apart := [row.label for row in results.rows if not row.replicas_identical]:
        words.append(f"The replicas of {_listed(apart)} came apart: do not trust those rows.")
    if not results.throttled:
        words.append("The link was not throttled: these times say nothing about a slow one.")
    return words


def _first_at_target(results: Results) -> str:
    if results.target_loss is None:
        return "There was no target loss, so no time to it."
    times = {row.label: row.seconds_to_target for row in results.rows if row.seconds_to_target is not None}
    if not times:
        return f"No recipe reached the target loss of {results.target_loss:.3f}."
    best, *others = sorted(times, key=times.__getitem__)
    text = f"First at the target loss of {results.target_loss:.3f}: {best}, in {duration(times[best])}"
    if close := [label for label in others if times[label] <= CLOSE * times[best]]:
        text += f" ({_listed(close)} within 5%)"
    baselines = [label for label in others if label == "dense" or label in HALF]
    if best not in HALF and baselines:  # soonest first
        named = dict.fromkeys((baselines[0], *(label for label in baselines if label == "dense")))
        text += ", " + _listed([f"{times[label] / times[best]:.1f} times as fast as {label}" for label in named])
    missed = [row.label for row in results.rows if row.label not in times]
    return text + (f". Not reached by {_listed(missed)}." if missed else ".")


def _lowest_loss(results: Results) -> str:
    losses = {row.label: row.final_loss for row in results.rows if math.isfinite(row.final_loss)}
    if not losses:
        return "Every recipe diverged."
    low, high = loss_text(min(losses.values())), loss_text(max(losses.values()))
    lowest = [label for label, loss in losses.items() if loss_text(loss) == low]
    when = "after the first worker's equal steps" if any(row.served for row in results.rows) else "at equal steps"
    text = f"Lowest loss {when}: {_listed(lowest)}, {low}"
    if low != high:
        text += f" (highest {high}); {_how_sure(results)}"
    return f"{text}."


def _how_sure(results: Results) -> str:
    spreads = [row.spread.loss_deviation for row in results.rows if row.spread and math.isfinite(row.final_loss)]
    if not spreads:
        return "one seed each, so small gaps may not repeat"
    return f"means of {results.seeds} seeds, with standard deviations up to {max(spreads):.3f}"


def left_out(recipes: Sequence[str], optimizer: str) -> str:
    """Say which recipes of the default list this optimizer cannot train with, and why."""
    verb = "take" if len(recipes) > 1 else "takes"
    return f"Left out: {_listed(recipes)}, which {verb} over SGD's momentum; --optimizer is {optimizer}."


def _where_time_goes(results: Results) -> str:
    quickest = min(results.rows, key=lambda row: row.step_seconds.p50)
    text = f"A step of {quickest.label}, the shortest, is {_share(quickest, 'exchange')} exchange"
    text += f" and {_share(quickest, 'encode', 'decode')} encode and decode"
    if results.free_step_seconds:
        text += f", and {quickest.step_seconds.p50 / results.free_step_seconds:.2f} times the free-network step"
    if results.dense not in (None, quickest):
        text += f"; a step of dense is {_share(results.dense, 'exchange')} exchange"
    return f"{text}."


def _share(row: Row, *parts: str) -> str:
    split = asdict(row.split_seconds)
    whole = sum(split.values())
    return f"{sum(split[part] for part in parts) / whole:.0%}" if whole else UNKNOWN


def _listed(labels: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(labels[:-1]), labels[-1])))
