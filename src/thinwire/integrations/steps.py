"""When is a step over? When an optimizer has taken its gradients, or when they have been thrown away.

A backward pass reduces every parameter once. What the memories staged for it waits until its fate is known, parameter
by parameter: kept when an optimizer steps, dropped when the gradient is gone at the next backward pass without any
optimizer having taken it. Gradients that are still in place then are added to: further reductions go on from what is
staged, and all of them are one step.
"""

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from thinwire.integrations.gradients import Gradients, in_memory_order
from thinwire.integrations.optimizers import skipped_by_scaler
from thinwire.memories import Memory
from thinwire.reducer import Bucket

_PATIENCE = 3  # steps that nobody known took, before that is said


class Witness(NamedTuple):
    """A parameter's name and itself, flat, the place of its largest gradient, and its value there before any step."""

    name: str
    parameter: Tensor
    place: int
    value: float

    @property
    def moved(self) -> bool:
        """Whether the parameter has changed since."""
        return float(self.parameter[self.place]) != self.value


class Reduced(NamedTuple):
    """What came of one bucket: the parameters whose mean is not finite, and those whose mean is all zeros."""

    bad: frozenset[str] = frozenset()
    empty: frozenset[str] = frozenset()
    witnesses: tuple[Witness, ...] = ()


@final
class Steps:
    """Follows the gradients of these parameters from reduction to optimizer, and settles the memories accordingly."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], memories: Sequence[Memory]) -> None:
        self._parameters, self._memories = parameters, memories
        me = weakref.ref(self)
        self.gradients = Gradients(parameters, partial(_close_if_done, me), partial(_thrown_away, me))
        self.step = 0
        self.draw = 0
        self.on_kept: list[Callable[[int], None]] = []
        """Called with the step's number when an optimizer has taken gradients, once a step."""
        self._pending: set[str] = set()
        self._open = False  # a reduction is whole whose step is not over
        self._joined = False
        self._seen: set[str] = set()
        self._started = 0
        self._outcomes: list[Reduced] = []
        self._witnesses: list[Witness] = []
        self._known: set[str] = set()
        self._unclaimed = 0
        self._owned: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, list[str]]] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def begun(self) -> bool:
        """Whether some parameters have been handed in for a reduction, and others are to come."""
        return 0 < len(self._seen) < len(self._parameters)

    def is_pending(self, name: str) -> bool:
        """Whether no optimizer has taken this parameter's gradient yet."""
        return name in self._pending

    def begins_with(self, names: Sequence[str]) -> bool:
        """Return whether a bucket of these is the first of a reduction."""
        if not (self.begun and self._seen.isdisjoint(names)):
            self.close()
        return not self._seen

    def begin(self, *, joined: bool) -> bool:
        """Begin a reduction, and return whether it goes on with a step. `joined` ranks keep the others company."""
        self._joined = joined
        if not joined:
            self.gradients.look_at_rest()
        if self._open and not self._pending:
            self._end_step()
        return self._open

    def outcome(self, names: Iterable[str]) -> Callable[[Reduced], None]:
        """Note that a bucket of these is under way, and return what to call, in any thread, with what came of it."""
        self._seen.update(names)
        self._started += 1
        return self._outcomes.append

    def questions(self, names: Iterable[str]) -> "Questions":
        """Return what must be found out about the means of these."""
        return Questions(empty=self.gradients.accumulates, witnesses=frozenset(names) - self._known)

    def close_if_done(self) -> None:
        """Close the reduction in hand if all of it is there; while it is in flight, nothing has been settled yet."""
        if self._seen and not self.begun and len(self._outcomes) == self._started:
            self.close()

    def close(self) -> None:
        """Close the reduction in hand, if any: its means wait for an optimizer, unless it was not whole or finite."""
        if not self._seen:
            return
        seen, whole = set(self._seen), not self.begun
        done = whole and len(self._outcomes) == self._started
        bad = set().union(*(outcome.bad for outcome in self._outcomes)) if done else seen
        self._each_memory(bad, keep=False)
        self._pending = (self._pending | seen) - bad
        if done:
            self.gradients.note_reduced(seen, set().union(*(outcome.empty for outcome in self._outcomes)))
        if not self._open:
            self._witnesses.clear()
        self._witnesses += [witness for outcome in self._outcomes for witness in outcome.witnesses]
        self.draw += whole
        self._open |= whole
        self._seen.clear()
        self._started, self._outcomes = 0, []
        if self._joined:
            self.settle(self._pending, keep=True)

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Keep what this optimizer has just taken. Returns whether it holds any of these parameters."""
        self.close_if_done()
        owned = self.owned(optimizer)
        self._known.update(owned)
        if not skipped_by_scaler(optimizer):
            taken = [name for name in owned if name in self._pending and self._parameters[name].grad is not None]
            self.settle(taken, keep=True)
        return bool(owned)

    def settle(self, names: Collection[str], *, keep: bool) -> None:
        """Keep or drop what the memories staged for these, which ends the step."""
        if not names:
            return
        self._each_memory(names, keep=keep)
        self._pending -= set(names)
        if keep:
            self.gradients.forget(names)
        if self._open:
            self._end_step()
            for call in self.on_kept if keep else ():
                call(self.step)

    def settle_all(self, *, keep: bool) -> None:
        """Keep or drop everything that is pending."""
        self.close_if_done()
        self.settle(set(self._pending), keep=keep)

    def settle_by_gradients(self) -> None:
        """Keep what is pending where a gradient is in place, and drop the rest."""
        self.close_if_done()
        gone = {name for name in self._pending if self._parameters[name].grad is None}
        self.settle(gone, keep=False)
        self.settle(set(self._pending), keep=True)

    def owned(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return which of the parameters this optimizer holds."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        found = self._owned.get(optimizer)
        if found is None or found[0] != count:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            found = self._owned[optimizer] = count, [n for n, p in self._parameters.items() if id(p) in held]
        return found[1]

    def restart(self, step: int, draw: int) -> None:
        """Go on from this step and draw; whatever is pending is forgotten."""
        self.close()
        self.settle(set(self._pending), keep=False)
        self.step, self.draw, self._open = step, draw, False

    def thrown_away(self, name: str) -> None:
        """Drop what was staged for a gradient that is gone, and that no optimizer took.

        Who updates parameters by hand has no optimizer to say so: there the parameters themselves tell.
        """
        self.close_if_done()
        if name not in self._pending:
            return
        if name in self._known:
            self.settle([name], keep=False)
            return
        unknown = [witness for witness in self._witnesses if witness.name not in self._known]
        taken = any(witness.moved for witness in [w for w in unknown if w.name == name] or unknown)
        if self._open:
            self._unclaimed = 0 if taken else self._unclaimed + 1
            if self._unclaimed == _PATIENCE:
                warnings.warn(_UNCLAIMED.format(name=name), stacklevel=2)
        self.settle([name], keep=taken)

    def _end_step(self) -> None:
        self.step += 1
        self._open = False

    def _each_memory(self, names: Collection[str], *, keep: bool) -> None:
        for memory in self._memories:
            (memory.commit if keep else memory.rollback)(names)


class Questions(NamedTuple):
    """What to find out about means: which are all zeros, and where the largest of these lies."""

    empty: bool
    witnesses: frozenset[str]


def read(bucket: Bucket, parameters: Mapping[str, nn.Parameter], questions: Questions, *, finite: bool) -> Reduced:
    """Return what came of a bucket that holds means now."""
    if finite and not any(questions):
        return Reduced()
    means = {slot.name: mean for slot, mean in zip(bucket.slots, bucket.views(), strict=True)}
    if not finite:
        return Reduced(
            bad=frozenset(name for name, mean in means.items() if not mean.isfinite().all()) or frozenset(means)
        )
    empty = frozenset(name for name, mean in means.items() if not _any(mean)) if questions.empty else frozenset[str]()
    found = (_witness(name, means[name], parameters[name]) for name in means.keys() & questions.witnesses)
    return Reduced(empty=empty, witnesses=tuple(witness for witness in found if witness is not None))


def _witness(name: str, mean: Tensor, parameter: nn.Parameter) -> Witness | None:
    place = int(mean.abs().argmax()) if mean.numel() else 0
    if not mean.numel() or not bool(mean[place]):
        return None
    p = in_memory_order(parameter.detach(), parameter)
    return Witness(name, p, place, float(p[place]))


def _any(x: Tensor) -> bool:
    """Whether anything differs from 0; a sample mostly says so."""
    return bool(x[:: x.numel() // 4096 + 1].any()) or bool(x.any())


def _close_if_done(steps: "weakref.ref[Steps]") -> None:
    me = steps()
    if me is not None:
        me.close_if_done()


def _thrown_away(steps: "weakref.ref[Steps]", name: str) -> None:
    me = steps()
    if me is not None:
        me.thrown_away(name)


_UNCLAIMED = (
    "the gradient of {name!r} was reduced and thrown away again, and no torch.optim optimizer that holds it has ever "
    "stepped: what was sent of it is taken back each time. If something else applies it, call the attachment's "
    "keep_step() afterwards"
)
