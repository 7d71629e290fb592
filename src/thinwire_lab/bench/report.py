"""The report of a bench run: one table (two on a narrow terminal), and notes; or a page of these with figures."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain

from rich.console import Console

from thinwire_lab.bench.plots import loss_over_bytes, loss_over_seconds
from thinwire_lab.bench.results import HALF, Results, Row
from thinwire_lab.show.page import page
from thinwire_lab.show.table import UNKNOWN, Column, Table, duration, human_bytes, loss_text, milliseconds, tabulated
from thinwire_lab.show.terminal import fits, print_table, say

_NAMES: Column[Row] = Column(heading="recipe", text=lambda row: row.label, left=True)


def print_report(console: Console, results: Results) -> None:
    """Print the run: title, tables (one where the console is wide enough), notes and conclusions, of each act."""
    for number, act in enumerate(results.acts):
        _print_act(console, act, "\n" if number else "")


def _print_act(console: Console, results: Results, before: str) -> None:
    say(console, before + results.title, "bold" if results.throttled else "bold red")
    if results.incomplete:
        say(console, results.incomplete, "bold yellow")
    if results.rows:
        for table in _tables(console, results):
            say(console, f"\n{table.title}" if table.title else "", "italic")
            print_table(console, table)
        say(console, "\n" + "\n".join(_notes(results)), "dim")
    say(console, "\n" + "\n".join(in_words(results)))


def html(results: Results) -> str:
    """Return the page: the report, with a figure of the loss over time and over bytes for each act, and how it ran."""
    figures = (draw(act) for act in results.acts for draw in (loss_over_seconds, loss_over_bytes))
    title = f"thinwire bench: {results.title}"
    return page(title, lambda console: print_report(console, results), *figures, made=results.environment)


def _tables(console: Console, results: Results) -> list[Table]:
    parts = {"time": _time_columns, "bytes and loss": _byte_and_loss_columns, "memory": _memory_columns}
    columns = {title: columns for title, make in parts.items() if (columns := make(results))}
    whole = tabulated([_NAMES, *chain.from_iterable(columns.values())], results.rows)
    if fits(console, whole):
        return [whole, *_waits(results)]
    tables = [tabulated([_NAMES, *each], results.rows, title=title) for title, each in columns.items()]
    return tables + _waits(results)


def _time_columns(results: Results) -> list[Column[Row]]:
    free, baseline = results.free_step_seconds, results.baseline

    def step(row: Row) -> str:
        low, middle, high = map(milliseconds, (row.step_seconds.p20, row.step_seconds.p50, row.step_seconds.p80))
        return f"{middle} ({low}-{high})"

    def over_free(row: Row) -> str:
        return f"{row.step_seconds.p50 / free:.2f}x" if free else UNKNOWN

    def speedup(row: Row) -> str:
        return UNKNOWN if baseline is None else f"{baseline.step_seconds.p50 / row.step_seconds.p50:.2f}x"

    def part(name: str) -> Column[Row]:
        return Column(heading=f"{name}\nms", text=lambda row: milliseconds(getattr(row.split_seconds, name)))

    return [
        Column(heading="step ms\np50 (p20-p80)", text=step, rank=lambda row: row.step_seconds.p50),
        Column(heading="x free\nnet", text=over_free),
        *map(part, ("compute", "encode", "exchange", "decode")),
        Column(heading="speed\nup", text=speedup),
    ]


def _byte_and_loss_columns(results: Results) -> list[Column[Row]]:
    steps = {row.steps for row in results.rows}
    after = f"{steps.pop()} steps" if len(steps) == 1 else "equal steps"

    def to_target(row: Row) -> str:
        if row.seconds_to_target is not None:
            return duration(row.seconds_to_target)
        return UNKNOWN if results.target_loss is None else "not reached"

    def identical(row: Row) -> str:
        return UNKNOWN if row.served else "✓" if row.replicas_identical else "✗"

    def sent(name: str) -> Column[Row]:
        return Column(heading=f"{name}\nbytes", text=lambda row: human_bytes(getattr(row.wire_bytes_per_step, name)))

    return [
        *map(sent, ("measured", "declared", "dense")),
        Column(heading=f"loss at\n{after}", text=_loss, rank=lambda row: row.final_loss),
        Column(heading="time to\ntarget", text=to_target, rank=lambda row: row.seconds_to_target),
        Column(heading="replicas\nidentical", text=identical),
    ]


def _memory_columns(results: Results) -> list[Column[Row]]:
    def held(part: str, name: str, heading: str) -> Column[Row]:
        return Column(heading=heading, text=lambda row: human_bytes(getattr(getattr(row, part), name, None)))

    handle = {"waiting": "residual\nmemory", "staging": "copies,\nbuffers", "scratch": "within\na step"}
    process = {"tensors": "all\ntensors", "resident": "process", "peak": "at its\npeak"}
    parts = {"memory": handle, "process": process} if results.shards > 1 else {}
    return [held(part, *each) for part, named in parts.items() for each in named.items()]


def _loss(row: Row) -> str:
    deviation = row.spread.loss_deviation if row.spread else math.nan
    return loss_text(row.final_loss) + (f" ± {deviation:.3f}" if math.isfinite(deviation) else "")


def _waits(results: Results) -> list[Table]:
    """Return who waited for whom in outer steps, if they were not all at one pace."""
    things = [(row.label, rank, seconds) for row in results.rows for rank, seconds in enumerate(row.waited_for or ())]

    def whom(peer: int) -> Column[tuple[str, int, Sequence[float]]]:
        return Column(
            heading=f"for\n{peer}", text=lambda thing: UNKNOWN if thing[1] == peer else f"{thing[2][peer]:.1f}"
        )

    columns = [
        Column[tuple[str, int, Sequence[float]]](heading="recipe", text=lambda thing: thing[0], left=True),
        Column[tuple[str, int, Sequence[float]]](heading="worker", text=lambda thing: str(thing[1])),
        *map(whom, range(max((len(seconds) for *_, seconds in things), default=0))),
    ]
    return [tabulated(columns, things, title="who waited for whom, in seconds")] if things else []


def _uneven(results: Results) -> list[str]:
    """Say what becomes of the last worker."""
    lines = []
    if (slow := results.environment.get("slow", 1)) > 1:
        lines.append(f"The last worker computes {slow:g} times as long as the others, in all rows.")
    if results.environment.get("kill"):
        lines.append("The last worker vanishes midway from the rows that are served or in outer steps.")
        if not all(row.served or row.outer for row in results.rows):
            lines.append("DDP would end with it: its rows ran undisturbed.")
    return lines


def _notes(results: Results) -> list[str]:
    """Explain the columns that this run needs explained."""
    free = results.free_step_seconds
    lifted = f"an uncompressed step with the link lifted, {milliseconds(free)} ms" if free else "not taken in this run"
    baseline = "" if results.baseline is None else f" speed up: {results.baseline.recipe}'s median step over this one."
    lines = [
        f"free net: {lifted}.{baseline}",
        f"bytes: sent per step per {results.sender}. measured: on the link, headers included. dense: by float32 "
        "all-reduce.",
    ]
    if results.stages > 1:
        lines.append(
            f"{results.stages} stages: of the first one's worker. exchange: all waiting. | 0.05: share of activations "
            "that crosses, in bf16. dense: activations as they are, and float32 all-reduce between replicas."
        )
    if results.shards > 1 and not results.islands:
        lines.append(
            f"{results.shards} shards, no replicas: measured has FSDP2's all-gathers of parameters, too; declared and "
            "dense are gradients alone, reduce-scattered. dense: FSDP2's own. exchange: all waiting."
        )
    if results.shards > 1:
        lines.append(
            "residual, copies, within a step: memory that thinwire's handle holds on the first worker, parameters as "
            "they were gathered included; FSDP2 alone has none of it. all tensors: what the row keeps between steps, "
            "FSDP2's included. process: of the first worker, which trains all rows: to compare, run one at a time."
        )
    if any(row.gathers for row in results.rows):
        lines.append("gathers: parameters are gathered, and computed with, in bfloat16; fsdp_bf16: all of FSDP2 in it.")
    if results.islands:
        lines.append(
            f"{results.shards} shards: bytes are what crosses between islands. dense: FSDP2's own HSDP. exchange: all "
            "waiting, within the island and for the processor too."
        )
    if any(row.outer for row in results.rows):
        lines.append(
            "H: the inner steps from one outer step to the next. Of such rows, times and bytes are means over H steps, "
            "exchange is all that was waited for, and losses are those of the global parameters."
        )
    if results.servers:
        lines.append(
            "served: asynchronously on parameter servers, which step at each update, at the learning rate over the "
            "number of workers and over 1 + staleness. Steps, bytes and losses are the first worker's; exchange: until "
            "the answer has come, which has parameters in full, or the largest changes where little is sent."
        )
    lines += _uneven(results)
    if results.seeds > 1:
        lines.append(
            f"loss: mean ± standard deviation over {results.seeds} seeds of weights and batches. Times and bytes are "
            "medians over the seeds; a run's target is what dense reached with the same seed, unless --target is given."
        )
    if recipes := results.environment.get("left_out"):
        lines.append(left_out(recipes, str(results.environment.get("optimizer"))))
    if any(row.wire_bytes_per_step.measured is None for row in results.rows):
        lines.append(f"measured {UNKNOWN}: counting on the link needs network namespaces.")
    if any(row.wire_bytes_per_step.declared is None for row in results.rows):
        lines.append(f"declared {UNKNOWN}: the payload is not thinwire's, its size not known.")
    return lines


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
    if not times[best]:
        return f"Before the first step the loss is at the target of {results.target_loss:.3f}: times to it say nothing."
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
