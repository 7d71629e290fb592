"""When is a step over? When an optimizer has taken its gradients, or when they have been thrown away.

A backward pass reduces every parameter once. What the memories staged for it is pending until we know, parameter by
parameter, what becomes of the gradient. We keep it when an optimizer steps. We drop it when the next backward pass
finds the gradient gone and no optimizer has taken it. If the gradient is still there, backward adds to it: the next
reduction goes on from what is staged, and both belong to one step.

So a step that a GradScaler skips calls nothing here. What was not finite is rolled back as the backward pass is closed
(`close`), the rest once the next one finds its gradients gone (`find_thrown_away`), parameter by parameter: of several
optimizers, one may step while another skips.
"""

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import final

import torch
from torch import Tensor, nn

from thinwire.integrations.training.gradients import Gradients, accumulator
from thinwire.integrations.training.optimizers import had_gradients, skipped_by_scaler
from thinwire.integrations.training.outcomes import Questions, Reduced, Sent, Unread, Witness
from thinwire.memories import Memory

_ERROR, _BAD, _NOTHING = map(attrgetter, ("error", "bad", "nothing"))  # of an outcome
_PATIENCE = 3  # steps that no known optimizer took, before we warn
_EMPTY = 5  # reductions in a row that brought nothing, before we warn
_LOOKS_EVERY = 16  # reductions from one look whether anything arrives to the next, as long as it does


@final
class Steps:
    """Follows the gradients of these parameters from reduction to optimizer, and keeps or drops what is staged.

    `step` counts steps and `draw` reductions. `open`: whether a reduction is done and neither kept nor dropped.
    `fresh`: whether none has begun since the memories were loaded. `uneven`: whether ranks may run out of data, and
    follow the others.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], memories: Sequence[Memory]) -> None:
        self.parameters, self._memories = parameters, [memory for memory in memories if memory.stateful]
        self.gradients = Gradients(parameters)
        self.step = 0
        self.draw = 0
        self.open = False
        self.fresh = True
        self.pending: set[str] = set()  # reduced, and no optimizer has taken them yet
        self.adding: str | None = None  # to whose .grad autograd adds now
        self._kept: set[str] = set()  # of the latest reduction
        self._joined = self._follows = self.uneven = False
        self._seen: set[str] = set()
        self._started = 0
        self._outcomes: list[Reduced | Unread] = []
        self._sent: Sent | None = None  # all of them
        self._taken: list[tuple[torch.optim.Optimizer, list[str]]] = []  # before they were read
        self._witnesses: list[Witness] = []
        self._stepped: set[str] = set()  # held by an optimizer that has stepped
        self._known: set[str] = set()  # and these by one that will
        self._unclaimed = self._nothing = 0
        self._takers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._names = {id(p): name for name, p in parameters.items()}
        self._nodes = [accumulator(p) for p in parameters.values()]
        _following.add(self)
        me = weakref.ref(self)  # otherwise the parameters would keep this object alive
        self._handles = [
            node.register_prehook(partial(_before_adding, me, name))
            for name, node in zip(parameters, self._nodes, strict=True)
        ]

    def stop_following(self) -> None:
        """Stop following gradients."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    @property
    def begun(self) -> bool:
        """Whether a reduction has some of the parameters, and others are still to come."""
        return 0 < len(self._seen) < len(self.parameters)

    def enter(self, names: Sequence[str], *, joined: bool) -> bool:
        """Take in a bucket of these (`joined`: without data of its own); return whether it begins a reduction."""
        if self._seen:
            if self.begun and self._seen.isdisjoint(names):
                return False
            self.close()
        self._follows = joined or self._joined
        if not joined and self.gradients.reduced:
            self.find_thrown_away()
        self._joined = joined
        if self.open and not self.pending:
            self.step, self.open = self.step + 1, False
        return True

    def settled(self) -> list[bool]:
        """Return which latest means were kept and which are pending; none if it is for ranks with data to say."""
        return [not self._follows and name in names for names in (self._kept, self.pending) for name in self.parameters]

    def follow(self, settled: Sequence[int]) -> None:
        """Settle as ranks with data have; `settled` counts those. Gradients may accumulate there, and not here."""
        self.uneven = True
        names = [*self.parameters]
        kept, pending = (
            {name for name, count in zip(names, counts, strict=True) if count}
            for counts in (settled[: len(names)], settled[len(names) :])
        )
        if self._follows:
            self.settle(self.pending & kept, keep=True)
            self.settle(self.pending - pending, keep=False)

    def rest(self) -> None:
        """Settle what can be told before another backward: what is applied by hand, gone, or of other ranks."""
        self.close_if_done()
        applied = {n for n in self.pending if self._joined or (n not in self._known and self._moved(n))}
        self.settle(applied, keep=True)
        self.find_thrown_away(among=self.gradients.there)
        if all(self.parameters[name].grad is None for name in self.pending):  # no optimizer can take any of it
            self.settle(set(self.pending), keep=False)
            self.step, self.open = self.step + self.open, False

    def find_thrown_away(self, among: Collection[str] | None = None) -> None:
        """Drop what was staged for gradients that are gone, `among` these, or else also for those there never were."""
        names = self.gradients.reduced - self.gradients.added
        for name in names if among is None else names.intersection(among):
            if self.gradients.gone(name):
                self.thrown_away(name)

    def has_reduced(self, name: str) -> bool:
        """Whether the gradient that is in place has been reduced, or is being reduced, since backward added to it."""
        return name in self._seen or name in self.gradients.reduced - self.gradients.added

    def note_replaced(self, name: str) -> None:
        """Note that this rank's gradient has replaced a mean without passing autograd's node."""
        if name in self.gradients.reduced:
            self.gradients.forget([name])
            self.thrown_away(name)
        self.gradients.added.add(name)

    def started(self, names: Collection[str]) -> tuple[Questions, Callable[[Reduced | Unread], None]]:
        """Note that a bucket of these is in flight. Return what to find out, and whom to tell, from any thread."""
        self._seen.update(names)
        self._started += 1
        due = self._nothing > 0 or self.draw % _LOOKS_EVERY == 0
        questions = Questions(due, frozenset(names) - self._known)
        return questions, self._outcomes.append

    @property
    def spoilt(self) -> bool:
        """Whether a mean that has arrived in this reduction is not finite."""
        return any(outcome.bad for outcome in self._read())

    def failure(self) -> Exception | None:
        """Return, once, what was wrong with what a GPU received in this reduction. All of it is dropped then."""
        error = next((outcome.error for outcome in self._read() if outcome.error), None)
        if error is not None:
            self._outcomes[:] = [Reduced(bad=frozenset(self._seen)) for _ in self._outcomes]
        return error

    def spoil(self) -> None:
        """Take every mean of this reduction for one that is not finite: elsewhere in the model there is one."""
        self._outcomes[:1] = [Reduced(bad=frozenset(self._seen))]

    def drop_idle(self, used: Collection[Tensor]) -> None:
        """Drop what was staged for all but `used`, which some rank has a gradient for. The step goes on."""
        self.close_if_done()
        names = [name for name, p in self.parameters.items() if p not in used]
        for memory in self._memories if names else ():
            memory.rollback(names)
        self.pending.difference_update(names)
        self.gradients.forget(names)

    def close_if_done(self) -> None:
        """Close the reduction if all of it has arrived. While it is in flight, nothing has been settled yet."""
        if self._arrived:
            self.close()

    @property
    def _arrived(self) -> bool:
        return len(self._seen) == len(self.parameters) and len(self._outcomes) == self._started

    def close(self) -> None:
        """Close the reduction, if any; drop incomplete or non-finite means, and on PayloadError all of it."""
        if not self._seen:
            return
        seen, whole = set(self._seen), len(self._seen) == len(self.parameters)
        done = whole and len(self._outcomes) == self._started
        outcomes = self._read()
        error = next(filter(None, map(_ERROR, outcomes)), None)
        bad = set().union(*map(_BAD, outcomes)) if done and error is None else seen
        for memory in self._memories if bad else ():
            memory.rollback(bad)
        self.pending = (self.pending | seen) - bad
        self._kept -= seen
        if done and not self._joined:
            if self._sent is None:
                self.gradients.note_reduced(seen)
            self._nothing = self._nothing + 1 if all(map(_NOTHING, outcomes)) else 0
            if self._nothing == _EMPTY:
                warnings.warn(_ZEROS.format(count=_EMPTY), stacklevel=2)
        if not self.open:
            self._witnesses.clear()
        for outcome in outcomes:
            self._witnesses += outcome.witnesses
        self.draw += whole
        self.open |= whole
        self._seen.clear()
        self._started, self._outcomes, self._sent = 0, [], None
        taken, self._taken = self._taken, []
        for optimizer, names in taken:
            self._take(optimizer, names)
        if error is not None:
            raise error

    def _read(self) -> list[Reduced]:
        """Return the outcomes. The first call makes the host wait for a GPU, once for all buckets."""
        if Unread in map(type, self._outcomes):
            self._outcomes[:] = (self._sent or Sent(self._outcomes)).read()
        return list(self._outcomes)  # type: ignore[arg-type]  # none is Unread

    def know(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Note that these will step, so that what else moves their parameters takes no gradient: SAM's first step."""
        for optimizer in optimizers:
            self._known.update(self.owned_by(optimizer))

    def unreduced(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return parameters with a gradient for this optimizer that no reduction, done or in flight, has made."""
        added = self.gradients.added - self._seen - self.gradients.reduced
        found = [(name, self.parameters[name]) for name in self.owned_by(optimizer) if name in added] if added else ()
        return [name for name, p in found if p.grad is not None and not _reduced(p)] if found else []

    def takes_again(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer has taken the gradients in place already, and nothing has been added since."""
        taken = self._takers.get(optimizer) == self.draw and not self._seen
        if not (taken or optimizer in dict(self._taken)) or self.gradients.added:
            return False
        return any(self.parameters[name].grad is not None for name in self.owned_by(optimizer))

    def send(self, optimizer: torch.optim.Optimizer) -> None:
        """Have a GPU send what became of the means that this optimizer is about to take: the next step reads it.

        The host does not wait here, or the GPU would wait for the host. A malformed mean is zero.
        """
        unread = self._sent is None and Unread in map(type, self._outcomes)
        if unread and self._arrived and self.owned_by(optimizer):
            self._sent = Sent(self._outcomes)
            if not self._joined:
                self.gradients.note_reduced(self._seen)

    def added_to_means(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return for which parameters of this optimizer something was added to a mean that is in place."""
        added = (self.gradients.added & self.gradients.reduced) - self._seen
        return [name for name in self.owned_by(optimizer) if name in added] if added else []

    def changed(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return for which parameters of this optimizer something has written to a mean, as clipping does."""
        return [n for n in self.owned_by(optimizer) if self.has_reduced(n) and self.gradients.changed(n)]

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Keep what was staged for this optimizer's gradients; return whether it holds any of the parameters."""
        owned = self.owned_by(optimizer)
        if not owned:
            return False
        if self._sent is None:
            self.close_if_done()
        self._known.update(owned)
        self._stepped.update(owned)
        if not skipped_by_scaler(optimizer):
            begun = had_gradients.get(optimizer, ())
            there = [n for n in owned if (p := self.parameters[n]).grad is not None or p in begun]
            if self._sent is None:
                self._take(optimizer, there)
            else:
                self._taken.append((optimizer, there))
        return True

    def _take(self, optimizer: torch.optim.Optimizer, names: Sequence[str]) -> None:
        taken = self.pending.intersection(names)
        self.settle(taken, keep=True)
        if taken:
            self._takers[optimizer] = self.draw

    def settle(self, names: Collection[str], *, keep: bool) -> None:
        """Keep or drop what the memories staged for these. This ends the step."""
        if not names:
            return
        for memory in self._memories:
            (memory.commit if keep else memory.rollback)(names)
        self.pending -= set(names)
        if keep:
            self._kept.update(names)
            self.gradients.forget(names)
        if self.open:
            self.step, self.open = self.step + 1, False

    def settle_all(self, *, keep: bool) -> None:
        """Keep or drop everything that is pending."""
        self.close_if_done()
        self.settle(set(self.pending), keep=keep)

    def take_back(self) -> None:
        """Drop a reduction that has failed on this rank, and all that no optimizer has taken."""
        self.close()
        self.settle_all(keep=False)

    def settle_by_gradients(self) -> None:
        """Keep what is pending where a gradient is in place, and drop the rest."""
        self.rest()
        self.find_thrown_away()
        self.settle(set(self.pending), keep=True)

    def owned_by(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return which of the parameters this optimizer holds now: its groups may change at any time."""
        names = self._names
        return [names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names]

    def restart(self, step: int, draw: int) -> None:
        """Go on from this step and draw, and drop what is pending."""
        self.close()
        self.settle(set(self.pending), keep=False)
        self.step, self.draw, self.open, self.fresh = step, draw, False, True

    def thrown_away(self, name: str) -> None:
        """Drop what was staged for a gradient that is gone, unless the parameter has moved, as scripts may."""
        self.close_if_done()
        if self._joined or name not in self.pending:  # without data, others say what became of a mean
            return
        taken = name not in self._known and self._moved(name)
        if self.open and name not in self._stepped:
            self._unclaimed = 0 if taken else self._unclaimed + 1
            if self._unclaimed == _PATIENCE:
                warnings.warn(_UNCLAIMED.format(name=name), stacklevel=2)
        self.settle([name], keep=taken)

    def _moved(self, name: str) -> bool:
        """Whether this parameter has changed, or any that has no optimizer if its own gradient was all zeros."""
        unknown = [witness for witness in self._witnesses if witness.name not in self._known]
        return any(witness.moved for witness in [w for w in unknown if w.name == name] or unknown)


_following: weakref.WeakSet[Steps] = weakref.WeakSet()


def _reduced(p: nn.Parameter) -> bool:
    """Whether any reduction has made the gradient of this parameter, which several models may share."""
    names = ((each, each._names.get(id(p))) for each in list(_following))
    return any(name in each.gradients.reduced or name in each._seen for each, name in names)


def _before_adding(steps: "weakref.ref[Steps]", name: str, grads: object) -> None:
    me = steps()
    if me is not None:
        if me._seen:
            me.close_if_done()
        if me.gradients.reduced:
            me.gradients.settle_views()
        if name in me.gradients.reduced and me.gradients.gone(name):
            me.thrown_away(name)
        me.gradients.added.add(name)
        me.adding = name


_ZEROS = (
    "the last {count} reductions returned only zeros, as gradients were zero before they were sent. Is the loss "
    "scale too small, the loss detached from the model, or a part of it frozen that should learn?"
)
_UNCLAIMED = (
    "the gradient of {name!r} was reduced and then zeroed, and no torch.optim optimizer that holds it has ever "
    "stepped, so each step is rolled back. If something else applies it, call the attachment's keep_step() afterwards"
)
