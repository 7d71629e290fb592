"""Should workers train on their own? A table of the ways to train, by when they reach a given loss."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.planner import Plan
from thinwire_lab.apart import SCHEMES, STEPS, Way, basis, ways
from thinwire_lab.inputs import BadInput, counts
from thinwire_lab.show.table import UNKNOWN, Column, Table, duration, human_bytes, milliseconds, tabulated

_NOTES = (
    f"until dense's loss: seconds until the loss that uncompressed training has after {STEPS:,} steps. {UNKNOWN}: "
    "nobody has measured how many steps that takes.",
    basis(),
    "Encoding and decoding at outer steps count as free; H: the inner steps from one to the next.",
)
_COLUMNS: tuple[Column[Way], ...] = (
    Column(heading="way to train", text=lambda way: way.name, left=True),
    Column(heading="payload\na step", text=lambda way: human_bytes(way.nbytes)),
    Column(heading="step ms", text=lambda way: milliseconds(way.seconds), rank=lambda way: way.seconds),
    Column(heading="times the\nsteps", text=lambda way: UNKNOWN if way.more is None else f"{way.more:.2f}"),
    Column(
        heading="until\ndense's loss",
        text=lambda way: duration(way.until) if math.isfinite(way.until) else UNKNOWN,
        rank=lambda way: way.until if math.isfinite(way.until) else None,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Apart:
    """The numbers of inner steps to consider, and what to assume of them."""

    every: tuple[int, ...]
    assumed: Mapping[tuple[str, int], float]
    key: ClassVar[str] = "outer"
    title: ClassVar[str] = "Together at each step, or apart?"
    notes: ClassVar[tuple[str, ...]] = _NOTES

    def found(self, plan: Plan) -> list[Way]:
        """Return the ways to train, best first."""
        return ways(plan, self.every, self.assumed)

    def table(self, plan: Plan) -> Table:
        """Return them as a table."""
        return tabulated(_COLUMNS, self.found(plan), title=self.title)

    def conclusion(self, plan: Plan) -> str:
        """Name the first at that loss."""
        best, *_ = self.found(plan)
        dense = next(way for way in self.found(plan) if way.more == 1.0 and way.seconds == plan.dense_seconds)
        faster = dense.until / best.until
        return f"First at uncompressed training's loss: {best.name}" + (
            f", {faster:.1f} times as fast as that." if best != dense else "."
        )

    def document(self, plan: Plan) -> list[dict[str, Any]]:
        """Return them as plain JSON values."""
        return [
            way._asdict() | {"until": way.until if math.isfinite(way.until) else None, "steps": STEPS}
            for way in self.found(plan)
        ]


def read(outer: str | None, more_steps: str | None) -> Apart | None:
    """Read ``10,30`` and ``diloco:30=1.2,sparseloco:30=1.4``. Raises BadInput."""
    if outer is None:
        if more_steps is not None:
            raise BadInput("--more-steps is about outer steps; give --outer as well, as in --outer 10,30")
        return None
    assumed = dict(map(_assumption, more_steps.split(","))) if more_steps is not None else {}
    every = counts(outer, "--outer")
    if unused := [f"{name}:{inner}" for name, inner in assumed if inner not in every]:
        raise BadInput(f"--more-steps {unused[0]} is of no H in --outer {outer}: add it there, or leave it out here")
    return Apart(every=every, assumed=assumed)


def _assumption(text: str) -> tuple[tuple[str, int], float]:
    where, _, factor = text.partition("=")
    name, _, every = where.strip().partition(":")
    try:
        found = (name, int(every)), float(factor)
    except ValueError as error:
        raise BadInput(f"--more-steps {text!r}: expected a method, H and a factor, as in sparseloco:30=1.2") from error
    if name not in SCHEMES or not 1 <= found[1] < math.inf:
        raise BadInput(f"--more-steps {text!r}: expected one of {', '.join(SCHEMES)}, and a factor of 1 or more")
    return found
