"""The report of a bench run: one table (two on a narrow terminal), and notes; or a page of these with figures."""

import math
from collections.abc import Sequence

from rich.console import Console

from thinwire_lab.bench.plots import loss_over_bytes, loss_over_seconds
from thinwire_lab.bench.results import Results, Row
from thinwire_lab.bench.words import in_words, left_out
from thinwire_lab.show.page import page
from thinwire_lab.show.table import Column, Table, tabulated
from thinwire_lab.show.terminal import fits, print_table, say
from thinwire_lab.show.units import UNKNOWN, duration, human_bytes, loss_text, milliseconds

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
    whole = _whole(results)
    if fits(console, whole):
        return [whole, *_waits(results)]
    parts = {"time": _time_columns, "bytes and loss": _byte_and_loss_columns, "memory": _memory_columns}
    columns = {title: columns for title, make in parts.items() if (columns := make(results))}
    tables = [tabulated([_NAMES, *each], results.rows, title=title) for title, each in columns.items()]
    return tables + _waits(results)


def _whole(results: Results) -> Table:
    parts = (_time_columns, _byte_and_loss_columns, _memory_columns)
    return tabulated([_NAMES, *(column for make in parts for column in make(results))], results.rows)


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

    def sent(name: str) -> Column[Row]:
        return Column(heading=f"{name}\nbytes", text=lambda row: human_bytes(getattr(row.wire_bytes_per_step, name)))

    return [
        *map(sent, ("measured", "declared", "dense")),
        Column(
            heading=f"loss at\n{after}",
            text=_loss,
            rank=lambda row: row.final_loss,
        ),
        Column(heading="time to\ntarget", text=to_target, rank=lambda row: row.seconds_to_target),
        Column(heading="replicas\nidentical", text=_identical),
    ]


def _memory_columns(results: Results) -> list[Column[Row]]:
    def held(name: str, heading: str) -> Column[Row]:
        return Column(heading=heading, text=lambda row: human_bytes(row.memory and getattr(row.memory, name)))

    def measured(name: str, heading: str) -> Column[Row]:
        return Column(heading=heading, text=lambda row: human_bytes(row.process and getattr(row.process, name)))

    named = {"waiting": "residual\nmemory", "staging": "copies,\nbuffers", "scratch": "within\na step"}
    whole = {"tensors": "all\ntensors", "resident": "process", "peak": "at its\npeak"}
    columns = [held(*each) for each in named.items()] + [measured(*each) for each in whole.items()]
    return columns if results.shards > 1 else []


def _identical(row: Row) -> str:
    if row.served:
        return UNKNOWN
    return "✓" if row.replicas_identical else "✗"


def _loss(row: Row) -> str:
    deviation = row.spread.loss_deviation if row.spread else math.nan
    return loss_text(row.final_loss) + (f" ± {deviation:.3f}" if math.isfinite(deviation) else "")


def _on_servers() -> list[str]:
    return [
        "served: asynchronously on parameter servers, which step at each update, at the learning rate over the number "
        "of workers and over 1 + staleness. Steps, bytes and losses are the first worker's; exchange: until the answer "
        "has come, which has parameters in full, or the largest changes where little is sent."
    ]


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
    lines = [f"free net: {lifted}.{baseline}"]
    lines += [
        f"bytes: sent per step per {results.sender}. measured: on the link, headers included. dense: by float32 "
        "all-reduce."
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
        lines += _on_servers()
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
