"""Run all loops with all recipes on workers of this machine: one row each, even if one raises."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire_lab.cluster.local import Cluster, WorkerDied
from thinwire_lab.studies.loops.recipes import BY_NAME

HANDLER = "thinwire_lab.studies.loops.worker:handle"
WORKERS = 2
PLAIN = "plain DDP"
CLOSE = 1e-6
"""How far from plain DDP may a loop end if it sends everything? Relative to how far plain DDP moved."""
SANE = 0.25
"""How far must the loss fall if a loop sends less? Relative to plain DDP."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of a loop with a recipe. None means not measured: `message` says what was raised instead.

    Losses are rank 0's, means of the last steps; `share` is how far the loss fell, relative to plain DDP. The distance
    is relative to how far plain DDP moved, and the larger one of the ranks; `identical` says whether the replicas are
    bit-identical. `skipped` counts steps skipped by hand.
    """

    loop: str
    way: str
    everything: bool
    last_loss: float | None = None
    plain_loss: float | None = None
    share: float | None = None
    distance: float | None = None
    identical: bool | None = None
    skipped: int | None = None
    plain_skipped: int | None = None
    same_skips: bool | None = None
    verdict: str = ""
    message: str = ""


def run(loops: Sequence[str], ways: Sequence[str | None], steps: int) -> Iterator[Row]:
    """Yield a row for every loop and way (None: plain DDP). Workers that raise differently are replaced."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(Cluster(WORKERS, None, HANDLER, namespaces=False))
        for loop in loops:
            for way in ways:
                job = {"loop": loop, "way": way, "steps": steps, "store": str(folder / f"{loop}-{way}")}
                row, healthy = _row(cluster, job)
                yield row
                if not healthy:
                    cluster.close()
                    cluster = stack.enter_context(Cluster(WORKERS, None, HANDLER, namespaces=False))


def _row(cluster: Cluster, job: dict[str, Any]) -> tuple[Row, bool]:
    """Run a job. The second value: whether the workers can take another job."""
    way = job["way"]
    named = {"loop": job["loop"], "way": way or PLAIN, "everything": way is None or BY_NAME[way].everything}
    try:
        events = list(cluster.run(job))  # in order of arrival: the first exception is the cause
    except WorkerDied as death:
        return Row(**named, verdict="died", message=str(death)), False
    raised = [event for _, event in events if event["kind"] == "raised"]
    if raised:
        alike = len(raised) == WORKERS and len({event["message"] for event in raised}) == 1
        return Row(**named, verdict="raised", message=raised[0]["message"]), alike
    if any(event["kind"] == "unavailable" for _, event in events):
        return Row(**named, verdict="left out", message=events[0][1]["message"]), True
    by_rank = dict(events)
    return _ended(named, by_rank[0], max(event["distance"] for event in by_rank.values())), True


def _ended(named: dict[str, Any], event: dict[str, Any], distance: float) -> Row:
    same = event["skipped"] == event["plain_skipped"]
    wrong = not event["identical"] or (named["everything"] and not (distance <= CLOSE and same))
    return Row(
        **named,
        **{name: event[name] for name in ("last_loss", "plain_loss", "share", "identical")},
        distance=distance,
        skipped=len(event["skipped"]),
        plain_skipped=len(event["plain_skipped"]),
        same_skips=same,
        verdict=_verdict(named["everything"], wrong, event["share"]),
    )


def _verdict(everything: bool, wrong: bool, share: float) -> str:
    if wrong:
        return "differs"
    if everything:
        return "same"
    return "trains" if share >= SANE else "worse"
