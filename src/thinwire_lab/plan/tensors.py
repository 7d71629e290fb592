"""The tensors of a plan. Tensors treated alike are folded, to keep the table short."""

import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from thinwire.planner import Plan, Row, step_seconds

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
    return sorted(_grouped(plan, list(groups.values()), tiny), key=lambda some: -some.dense_bytes / some.count)


def _key(row: Row, tiny: float, many: bool) -> Hashable:
    if row.dense_bytes < tiny:
        return row.choice
    return (_pattern(row.name), row.numel, row.choice) if many else (row.name,)


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _grouped(plan: Plan, groups: Sequence[Sequence[Row]], tiny: float) -> Iterator[Tensors]:
    for rows in groups:
        name = _pattern(rows[0].name) if rows[0].dense_bytes >= tiny else "small tensors"
        label = rows[0].name if len(rows) == 1 else f"{len(rows)} {name}"
        yield Tensors.of(label, rows, _saves(plan, rows))


def _saves(plan: Plan, rows: Sequence[Row]) -> float:
    names = {row.name for row in rows}
    without = {name: given for name, given in plan.choice.items() if name not in names}
    return step_seconds(plan.profile, without) - step_seconds(plan.profile, plan.choice)
