"""A plan, printed and as a page: the network, tensors and conclusions."""

import math
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Self

from rich.console import Console

from thinwire.exchanges import Transport
from thinwire.planner import Plan, Profile, Row, step_seconds
from thinwire_lab.inputs import rate_text
from thinwire_lab.show.page import page
from thinwire_lab.show.table import UNKNOWN, Column, Table, human_bytes, tabulated
from thinwire_lab.show.terminal import print_chapter, print_table, say

_TINY = 1e-3  # of all bytes
_MANY = 24  # tensors, above which those alike are folded


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """One tensor, or several treated alike: their sums, and the seconds that compressing them saves in a step.

    like: whether all have one size. If so, `reason` holds for each; otherwise it is that of the largest.
    """

    label: str
    count: int
    numel: int
    dense_bytes: int
    choice: str
    nbytes: float
    saves: float
    reason: str
    like: bool = True

    @classmethod
    def of(cls, label: str, rows: Sequence[Row], saves: float) -> Self:
        """Sum rows of one choice."""
        return cls(
            label=label,
            count=len(rows),
            numel=sum(row.numel for row in rows),
            dense_bytes=sum(row.dense_bytes for row in rows),
            choice=rows[0].choice,
            nbytes=sum(row.nbytes for row in rows),
            saves=saves,
            reason=max(rows, key=lambda row: row.numel).reason,
            like=len({row.numel for row in rows}) == 1,
        )


def every(plan: Plan) -> list[Tensors]:
    """Each tensor by itself, in the order in which they are exchanged."""
    return [Tensors.of(row.name, [row], row.saves) for row in plan.rows]


def folded(plan: Plan) -> list[Tensors]:
    """The largest first. Tiny ones with one choice share a line; of many, so do those alike but for a number."""
    tiny = _TINY * sum(row.dense_bytes for row in plan.rows)
    large = [row for row in plan.rows if row.dense_bytes >= tiny]
    groups: dict[Hashable, list[Row]] = {}
    for row in plan.rows:
        groups.setdefault(_key(row, tiny, len(large) > _MANY), []).append(row)
    found = [_together(plan, rows, tiny) for rows in groups.values()]
    return sorted(found, key=lambda some: -some.dense_bytes / some.count)


def _key(row: Row, tiny: float, many: bool) -> Hashable:
    if row.dense_bytes < tiny:
        return row.choice
    return (_pattern(row.name), row.numel, row.choice) if many else (row.name,)


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _together(plan: Plan, rows: Sequence[Row], tiny: float) -> Tensors:
    name = _pattern(rows[0].name) if rows[0].dense_bytes >= tiny else "small tensors"
    names = {row.name for row in rows}
    without = {name: given for name, given in plan.choice.items() if name not in names}
    saves = step_seconds(plan.profile, without) - step_seconds(plan.profile, plan.choice)
    return Tensors.of(rows[0].name if len(rows) == 1 else f"{len(rows)} {name}", rows, saves)


_COLUMNS: tuple[Column[Tensors], ...] = (
    Column(heading="tensor", text=lambda some: some.label, left=True),
    Column(heading="elements", text=lambda some: f"{some.numel:,}"),
    Column(heading="size", text=lambda some: human_bytes(some.dense_bytes)),
    Column(heading="choice", text=lambda some: some.choice, left=True),
    Column(heading="payload", text=lambda some: human_bytes(some.nbytes)),
    Column(heading="saves ms", text=lambda some: UNKNOWN if some.choice == "dense" else f"{1e3 * some.saves:.2f}"),
)
_NOTE = "saves: how much longer a step would take if only these tensors were uncompressed."
_ADVICE = "What would help more:"


class Chapter(NamedTuple):
    """What a plan says to a further question: a table, a conclusion, and plain values, which `key` names in JSON."""

    key: str
    table: Table
    conclusion: str
    document: Any


def print_plan(
    console: Console, measured: Profile, plan: Plan, tensors: Sequence[Tensors] | None, chapters: Sequence[Chapter] = ()
) -> None:
    """Print the plan's subject, table and conclusions, what else would help, and chapters; those alone for None."""
    say(console, title(plan.profile), "bold")
    for line in origin(measured, plan.profile):
        say(console, line, "dim")
    for name, latency, bandwidth in network(plan.profile):
        say(console, f"  {name:14}  latency {latency:>8}  bandwidth {bandwidth}")
    for tier in plan.profile.tiers:
        say(console, f"  {tier}", indent="    ")
    if tensors is not None:
        _print_tensors(console, plan, tensors)
    for chapter in chapters:
        print_chapter(console, chapter.table)
        say(console, f"\n{chapter.conclusion}", "bold")


def _print_tensors(console: Console, plan: Plan, tensors: Sequence[Tensors]) -> None:
    console.print()
    if tensors:
        print_table(console, tabulated(_COLUMNS, tensors, under=list(_reasons(tensors))))
        if plan.pays:
            say(console, _NOTE, "dim")
    else:
        say(console, "No gradient to plan for: those of sparse embeddings go as DDP sends them.")
    console.print()
    for text in conclusions(plan):
        say(console, text, "bold")
    if plan.advice:
        say(console, _ADVICE)
    for text in plan.advice:
        say(console, f"- {text}", indent="  ")


def html(measured: Profile, plan: Plan, chapters: Sequence[Chapter] = ()) -> str:
    """Return what is printed as a page, with every tensor."""
    title_ = f"thinwire plan: {title(plan.profile)}"
    return page(title_, lambda on: print_plan(on, measured, plan, every(plan), chapters), made=measured.made)


def _reasons(tensors: Sequence[Tensors]) -> Iterator[str]:
    """Yield the reason below each tensor; one that holds for several in a row comes below the last."""
    for (reason, like), group in groupby(tensors, key=lambda some: (some.reason, some.like)):
        counts = [some.count for some in group]
        which = "" if sum(counts) == 1 else "each: " if like else "the largest: "
        yield from ("" for _ in counts[1:])
        yield f"{which}{reason}"


UNKNOWN_OPTIMIZER = (
    "thinwire plan: what a method costs in loss depends on the optimizer: name yours, as in --optimizer adamw"
)
_TRANSPORTS = {"all_reduce": "all-reduce", "all_gather": "all-gather", "point_to_point": "point to point"}
_BEYOND = 1e14  # bytes per second: an older probe gave this if more bytes took no longer


def bit_rate(bandwidth: float) -> str:
    """Return bytes per second in the unit of links: ``6.2 Gbit/s``."""
    return "beyond measure" if bandwidth >= _BEYOND else rate_text(8 * bandwidth)


def title(profile: Profile) -> str:
    """Workers and link, on one line."""
    workers = "1 worker" if profile.world_size == 1 else f"{profile.world_size} workers"
    return f"{workers} · {profile.made.get('link', 'the link of the profile')}"


def origin(measured: Profile, profile: Profile) -> list[str]:
    """Say what was measured, and where that differs from what was asked."""
    seconds = measured.made.get("measuring_seconds")
    took = "" if seconds is None else f"Measuring took {seconds:g} s."
    lines = [str(measured.made.get("model", "")), took]
    if (measured.world_size, measured.links) != (profile.world_size, profile.links):
        lines.append(f"What if: the profile was measured with {title(measured)}.")
    return [line for line in lines if line]


def network(profile: Profile) -> list[tuple[str, str, str]]:
    """Each transport's name, latency and bandwidth."""
    if profile.world_size == 1:
        return []
    return [
        (_TRANSPORTS[name], f"{1e3 * link.latency:.2f} ms", _bandwidth(profile, name))
        for name, link in profile.links.items()
    ]


def _bandwidth(profile: Profile, name: Transport) -> str:
    """Say it, and what was not seen of it."""
    found, most = bit_rate(profile.links[name].bandwidth), profile.unseen.get(name)
    if most is None:
        return found
    seen = f"messages of up to {human_bytes(most)} hardly took longer than tiny ones"
    return f"at least {found}: {seen}" if most else "not measured: this profile is of an older version"


def conclusions(plan: Plan) -> list[str]:
    """Return the predicted step, the break-even, and what happens where nothing pays."""
    lines = [_step(plan), _break_even(plan), plan.expected_loss, plan.missing]
    if not plan.pays and not plan.missing:
        lines.insert(0, 'Nothing pays here: thinwire.attach(model, "auto") then leaves plain DDP.')
    return [line for line in lines if line]


def _step(plan: Plan) -> str:
    dense = f"Predicted step: {1e3 * plan.dense_seconds:.1f} ms uncompressed"
    if not plan.pays:
        return f"{dense}."
    faster = f"{plan.dense_seconds / plan.seconds:.2f}" if plan.seconds else UNKNOWN
    return f"{dense}, {1e3 * plan.seconds:.1f} ms as planned: {faster} times as fast."


def _break_even(plan: Plan) -> str:
    if plan.profile.world_size == 1 or not plan.rows or 0 in plan.profile.unseen.values():
        return ""
    if math.isinf(plan.break_even):
        return "Compression pays at every bandwidth this machine can saturate."
    if not plan.break_even:  # what was not measured may pay
        return "" if plan.missing else "Compression never pays here, however slow the link."
    if plan.pays:
        return f"Compression stops paying above {bit_rate(plan.break_even)} here."
    return f"Compression would pay below {bit_rate(plan.break_even)} here."
