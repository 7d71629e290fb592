"""How much of the workers' mean is whose, and whose part was not finite."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import final

from thinwire.collectives import Group

_log = logging.getLogger("thinwire")


@final
class Weights:
    """How much this worker's Δ counts: its samples."""

    def __init__(self, group: Group, samples: int | None) -> None:
        self.group, self._samples, self._own = group, samples or 1, 1.0

    def take(self, counts: bool) -> float:
        """Return what the Δ counts; 0 if it is left out."""
        self._own = float(self._samples * counts)
        return self._own

    def divide(self, joined: bool, steps: object) -> float:
        """Return by what this worker's Δ is divided, before everybody's weights are known."""
        return self.group.size() / (self._own or 1.0)


@final
class Sick:
    """Workers whose Δ was not finite. `times`: how often, by rank. `skipped`: outer steps that all workers skipped."""

    def __init__(self) -> None:
        self.times, self.skipped = Counter[int](), 0

    def leave_out(self, ranks: Sequence[int], group: Group) -> None:
        """Note that these workers were left out of the mean."""
        self.times.update(ranks)
        if any(map(_worth_saying, map(self.times.get, ranks))):
            _log.log(_level(ranks, group), "%s: left out of the outer step", self._named(ranks))

    def skip(self, ranks: Sequence[int], group: Group) -> None:
        """Note that all workers skipped the outer step."""
        self.times.update(ranks)
        self.skipped += 1
        if _worth_saying(self.skipped):
            named = self._named(ranks) if ranks else "the mean of all workers is not finite, though each one's Δ is"
            _log.log(_level(ranks, group), "%s: nobody took the outer step (%d skipped so far)", named, self.skipped)

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"Δ of worker {rank} is not finite (time {self.times[rank]})" for rank in ranks)


def _worth_saying(times: int | None) -> bool:
    return str(times).strip("0") == "1"  # the first time, the tenth, the hundredth


def _level(ranks: Sequence[int], group: Group) -> int:
    return logging.WARNING if group.rank() in (0, *ranks) else logging.DEBUG
