"""What a check found: ✓, ✗ or –, with a line that says why, and figures."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_OF_THE_NETWORK = ("onnection", "peer", "pair closure", "imed out", "timeout", "ocket", "NCCL error")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One row. ok: None if the check does not apply here, or is a figure alone. said: one line on why."""

    section: str
    name: str
    ok: bool | None
    said: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def mark(self) -> str:
        """✓, ✗ or –."""
        return {True: "✓", False: "✗", None: "–"}[self.ok]  # noqa: RUF001 - the sign of what does not apply


def first_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


Found = dict[int, dict[int, Finding]]
"""Findings by row and by rank."""


class Wrong(Exception):  # noqa: N818 - it reads better where it is raised and caught
    """A promise was not kept; the message says which."""


def looked_into(section: str, name: str, check: Callable[[dict[str, Any]], tuple[bool | None, str]]) -> Finding:
    """Return what `check` says of a row, with the figures that it fills in. Whatever it raises is what was found."""
    start, figures = time.perf_counter(), dict[str, Any]()
    try:
        ok, said = check(figures)
    except Wrong as wrong:
        ok, said = False, str(wrong)
    except Exception as error:  # whatever it is, the other rows are still to be checked
        ok, said = False, first_line(error)
    return Finding(section=section, name=name, ok=ok, said=said, figures=figures, seconds=time.perf_counter() - start)


def merged(by_rank: Mapping[int, Finding]) -> Finding:
    """Return what the ranks found together: the cause, if one failed and others were waiting for it."""
    wrong = {rank: found for rank, found in by_rank.items() if found.ok is False}
    if not wrong:
        return by_rank[min(by_rank)]
    rank = min(wrong, key=lambda rank: (_remoteness(wrong[rank].said), rank))
    found = wrong[rank]
    return found if len(by_rank) == 1 else replace(found, said=f"rank {rank}: {found.said}")


def _remoteness(said: str) -> int:
    """Return how likely this only follows from what happened on another rank."""
    return 2 if any(words in said for words in _OF_THE_NETWORK) else int(said.startswith("no answer"))
