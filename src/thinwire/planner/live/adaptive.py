"""A reducer that follows a plan, and changes it."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Never, final

from torch import Tensor
from torch.futures import Future

from thinwire.exchanges.compat import Group
from thinwire.memories import ErrorFeedback, Memory
from thinwire.planner.candidates import Budget
from thinwire.planner.live.life import live
from thinwire.planner.live.log import StepLog
from thinwire.planner.live.steps import Choice, Decided, Life
from thinwire.planner.plan import reducer
from thinwire.planner.probe.agreed import Ranks
from thinwire.reducer import Bucket, Reducer, Round

_log = logging.getLogger("thinwire")


class Decision(NamedTuple):
    """From `step` on tensors go by `choice` (those left out uncompressed), for the reason given in words."""

    step: int
    choice: Choice
    reason: str


@final
class Adaptive(Reducer):
    """Observe uncompressed steps, plan, try the plan against them, keep what is fastest; again when the link changes.

    All ranks decide alike, from figures that they have exchanged. What waits for a tensor whose candidate keeps
    nothing is sent along with its next gradient. `history` holds what was decided, and logger "thinwire" says it.
    """

    def __init__(self, budget: Budget | None = None, *, sizes: Sequence[int]) -> None:
        self.budget, self._sizes = budget or Budget(), tuple(sizes)
        self.history: list[Decision] = []
        self._memory = ErrorFeedback()
        self._life: Life[Never] | None = None
        self._log: StepLog | None = None
        self._reducer = reducer({}, self._memory)

    def __repr__(self) -> str:
        """Return what must be alike on all ranks."""
        return f"Adaptive({self.budget})"

    @property
    def choice(self) -> Choice:
        """The candidate's name for each tensor that is compressed now."""
        return self._reducer.chosen

    def prepare(self, group: Group, samples: Sequence[Tensor] = ()) -> None:
        """Measure links and candidates, which takes seconds."""
        for candidate in self.budget.candidates():
            candidate.reducer(self._memory).prepare(group, samples)
        if group.size() > 1 and samples and self._sizes:
            self._life = live(self.budget, self._sizes, Ranks(group=group, device=samples[0].device))
            next(self._life)

    def reduce(self, bucket: Bucket, at: Round) -> "Future[bool]":
        """Start as was decided; with a step's first bucket life goes on, which may take collectives."""
        log = self._logged(bucket, at)
        self._release(bucket, at)
        at = replace(at, watch=at.watch and (bool(self.choice) or self._memory.waits()))
        future = self._reducer.reduce(bucket, at)
        return future.then(lambda done: _finished(done, log))

    def reduce_rows(self, gradient: Tensor, name: str, at: Round) -> "Future[Tensor]":
        """Uncompressed."""
        return self._reducer.reduce_rows(gradient, name, at)

    def memories(self) -> Sequence[Memory]:
        """Return the memory, which all candidates share."""
        return (self._memory,)

    def _logged(self, bucket: Bucket, at: Round) -> StepLog:
        """Note the bucket in the step's log; one that brings back a gradient begins the next step."""
        log = self._log
        if log is None or log.holds(bucket.slots):
            if log is not None and self._life is not None:
                log.close()
                self._use(self._life.send(log), at)
            log = self._log = StepLog(bucket.flat.device, log)
        log.add(bucket)
        return log

    def _use(self, decided: Decided, at: Round) -> None:
        if decided.reason:
            self.history.append(Decision(at.step, decided.choice, decided.reason))
            _log.log(logging.INFO if at.group.rank() == 0 else logging.DEBUG, "step %d: %s", at.step, decided.reason)
        if decided.choice != self.choice:
            self._reducer = reducer(decided.choice, self._memory)

    def _release(self, bucket: Bucket, at: Round) -> None:
        """Add what waits for tensors whose candidate keeps nothing to their gradients."""
        if not self._memory.waits():
            return
        for slot, gradient in zip(bucket.slots, bucket.views(), strict=True):
            kept = self._memory in self._reducer.of(slot.name).memories()
            if not kept and slot.name not in at.idle and self._memory.waits(slot.name):
                self._memory.release(slot.name, gradient, at.scale)


def _finished(done: "Future[bool]", log: StepLog) -> bool:
    finite = done.value()
    log.finish()
    return finite
