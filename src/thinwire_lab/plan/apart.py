"""Should workers train on their own? A table of the ways to train, by when they reach a given loss."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from thinwire.planner import Plan
from thinwire_lab.apart import BASIS, SCHEMES, STEPS, Way, ways
from thinwire_lab.inputs import BadInput, counts
from thinwire_lab.plan.report import Chapter
from thinwire_lab.show.table import UNKNOWN, Column, duration, human_bytes, milliseconds, tabulated

_NOTES = (
    f"until dense's loss: seconds until the loss that uncompressed training has after {STEPS:,} steps. {UNKNOWN}: "
    "nobody has measured how many steps that takes.",
    BASIS,
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


def chapter(plan: Plan, every: Sequence[int], assumed: Mapping[tuple[str, int], float]) -> Chapter:
    """Return the ways to train with so many inner steps, best first; `assumed`: see `ways`."""
    found = ways(plan, every, assumed)
    dense = next(way for way in found if way.more == 1.0 and way.seconds == plan.dense_seconds)
    faster = dense.until / found[0].until
    said = f"First at uncompressed training's loss: {found[0].name}"
    return Chapter(
        key="outer",
        table=tabulated(_COLUMNS, found, title="Together at each step, or apart?", notes=_NOTES),
        conclusion=said + (f", {faster:.1f} times as fast as that." if found[0] != dense else "."),
        document=[
            way._asdict() | {"until": way.until if math.isfinite(way.until) else None, "steps": STEPS} for way in found
        ],
    )


def read(outer: str | None, more_steps: str | None) -> Callable[[Plan], Chapter] | None:
    """Read ``10,30`` and ``diloco:30=1.2,sparseloco:30=1.4``. Raises BadInput."""
    if outer is None:
        if more_steps is not None:
            raise BadInput("--more-steps is about outer steps; give --outer as well, as in --outer 10,30")
        return None
    assumed = dict(map(_assumption, more_steps.split(","))) if more_steps is not None else {}
    every = counts(outer, "--outer")
    if unused := [f"{name}:{inner}" for name, inner in assumed if inner not in every]:
        raise BadInput(f"--more-steps {unused[0]} is of no H in --outer {outer}: add it there, or leave it out here")
    return partial(chapter, every=every, assumed=assumed)


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
