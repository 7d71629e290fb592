"""The reducer behind "auto": it follows a plan and changes it."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple, Never, final

from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from thinwire.collectives import Group
from thinwire.memories import ErrorFeedback, Memory
from thinwire.planner.candidates import DENSE, Budget, in_words, shared
from thinwire.planner.decide import TOLERANCE, chosen, rows
from thinwire.planner.live.policy import policy
from thinwire.planner.live.step_log import Choice, Log, Policy, StepLog
from thinwire.planner.plan import Why, reducer
from thinwire.planner.probe.measure import Ranks, refuse_measuring
from thinwire.planner.profile import Profile
from thinwire.reducer import Bucket, Mean, Reducer, Round, Segment
from thinwire.reducer.wrappers import release

_log = logging.getLogger("thinwire")


class Decision(NamedTuple):
    """From `step` on, tensors are sent as `choice` says; others go uncompressed. `reason` says why, in words."""

    step: int
    choice: Choice
    reason: str


@final
class Adaptive(Reducer):
    """Observe uncompressed steps, plan, race the plan against them, and keep the fastest; again when the link changes.

    All ranks decide the same, from figures that they exchange first. Where a tensor's candidate changes, its residual
    in a memory that the new one does not have is sent with its next gradient. Momentum that fades goes back to the
    optimizer instead, if that can take it: `memory_of` says where it belongs, and a handover follows. `history` lists
    the decisions, and the logger "thinwire" logs them.
    """

    changes: ClassVar[bool] = True

    def __init__(
        self, budget: Budget | None = None, *, sizes: Sequence[int], caps: Sequence[int] | None = None
    ) -> None:
        self.budget, self._sizes, self._caps = budget or Budget(), tuple(sizes), caps
        self.history: list[Decision] = []
        self._memories = shared(self.budget.candidates(), ErrorFeedback())
        self._step: int | None = None  # of the latest reduction
        self._policy: Policy[Never] | None = None
        self._profile: Profile | None = None
        self._log: StepLog | None = None
        self._reducer = reducer({}, *self._memories)

    def __repr__(self) -> str:
        """Return what must agree on all ranks."""
        return f"Adaptive({self.budget})"

    @property
    def choice(self) -> Choice:
        """The candidate's name for each tensor that is compressed now."""
        return self._reducer.chosen

    def prepare(self, group: Group, samples: Sequence[Tensor] = ()) -> None:
        """Measure links and candidates, for seconds, within `attach`; a collective. Raises RuntimeError in captures."""
        refuse_measuring()
        for candidate in self.budget.candidates():
            candidate.reducer(*self._memories).prepare(group, samples)
        if group.size() > 1 and samples and self._sizes:
            self._policy = policy(self.budget, self._sizes, Ranks(group=group, device=samples[0].device), self._caps)
            next(self._policy)

    @property
    def idle(self) -> bool:
        """Whether nothing is compressed and there is no residual, so that DDP can reduce by itself."""
        return not self.choice and not any(memory.waits() for memory in self._memories)

    @property
    def settled(self) -> bool:
        """Whether there is a decision, or there will never be one."""
        return self._policy is None or bool(self.history)

    def why(self) -> Why:
        """Return the reason for the latest decision, and each tensor's. Raises RuntimeError before the first."""
        if self._policy is None:
            return Why("uncompressed, as there is only one rank, or no gradient to plan for", {})
        if self._profile is None:
            raise RuntimeError(
                "nothing is decided yet, as the first steps are observed, then raced: call why() some 40 steps later"
            )
        best = chosen(self._profile, self.budget, TOLERANCE)
        told = {}
        for row in rows(self.history[-1].choice, self._profile):
            predicted = best.get(row.name, DENSE.name)
            raced = f"measured steps decided this; predictions alone favoured {predicted}"
            told[row.name] = row if row.choice == predicted else replace(row, reason=raced)
        return Why(self.history[-1].reason, told)

    def go_on(self, log: Log, step: int, rank: int) -> None:
        """Take the finished reduction's log, and choose for the next; all of one step go by the same choice."""
        if self._policy is None:
            return
        decided = self._policy.send(log)
        if decided.reason:
            reason = self._with_loss(decided.reason, decided.choice)
            self.history.append(Decision(step, decided.choice, reason))
            self._profile = decided.profile
            _log.log(logging.DEBUG if rank else logging.INFO, "step %d: %s", step, reason)
        if decided.choice != self.choice and step != self._step:
            self._reducer = reducer(decided.choice, *self._memories)

    @override
    def begin(self, at: Round) -> None:
        if self._log is not None and self._log.parts:
            self._log = self._next(self._log, at)

    def reduce(self, bucket: Bucket, at: Round) -> "Future[Mean]":
        """Start reducing by the current choice. A gradient that comes a second time begins the next reduction."""
        if self._log is None:
            self._log, self._step = StepLog(bucket.flat.device), at.step
        elif self._log.holds(bucket.segments):
            self._log = self._next(self._log, at)
        log = self._log
        log.add(bucket)
        waiting = [memory for memory in self._memories if memory.waits()]
        for segment in bucket.segments if waiting else ():  # residuals that its candidate has no memory for
            own, alone = self._reducer.memory_of(segment), Bucket(flat=bucket.flat, segments=[segment])
            release([memory for memory in waiting if memory is not own], alone, at.scale)
        at = replace(at, watch=at.watch and not self.idle)
        future = self._reducer.reduce(bucket, at)

        def finish(done: "Future[Mean]") -> Mean:
            mean = done.value()  # raises what the reducer raised
            log.finish()
            return mean

        return future.then(finish)

    @override
    def reduce_rows(self, gradient: Tensor, name: str, at: Round) -> "Future[Tensor]":
        return self._reducer.reduce_rows(gradient, name, at)

    def memories(self) -> Sequence[Memory]:
        """Return the memories that the candidates share, error feedback first."""
        return self._memories

    def memory_of(self, segment: Segment) -> Memory:
        """Return the memory of the parameter's candidate now."""
        return self._reducer.memory_of(segment)

    def holding(self, segment: Segment) -> Sequence[Memory]:
        """Return all memories: residuals in one that the candidate does not have are sent, or go to the optimizer."""
        return self._memories

    def _next(self, log: StepLog, at: Round) -> StepLog:
        self.go_on(log.close(), at.step, at.group.rank())
        self._step = at.step
        return log.next()

    def _with_loss(self, reason: str, choice: Choice) -> str:
        """Add what the choice is expected to cost, if the optimizer is known."""
        return ". ".join(filter(None, (reason, in_words(choice.values(), self.budget.optimizer))))
