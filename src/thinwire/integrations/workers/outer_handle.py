"""What `outer` returns: a worker that trains on its own between outer steps."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as untraced
from torch.utils._pytree import tree_leaves

from thinwire.collectives import Group, all_gather_plain, pooling
from thinwire.errors import StateError
from thinwire.handle import Handle, MemoryUse
from thinwire.integrations.membership.membership import agreed
from thinwire.integrations.membership.state import Standing, agree
from thinwire.integrations.training.drift import differing, digest
from thinwire.integrations.training.gradients import local, reshard
from thinwire.integrations.training.optimizers import Hook, nested, skipped_by_scaler, stop_observing
from thinwire.integrations.workers import outer_state
from thinwire.integrations.workers.fragments import Fragment
from thinwire.integrations.workers.meeting import Meeting, RunningStatistics, Sick
from thinwire.integrations.workers.starting import Start, Strangers
from thinwire.integrations.workers.swarm import Swarm
from thinwire.outer_steps import OuterSteps
from thinwire.trace import Meter, Stats
from thinwire.waits import all_finite, refuse_unfit

AT_WORK: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Optimizers whose steps a handle counts."""


class Outer(Handle):
    """A worker that trains on its own between outer steps: what `outer` returns.

    `steps` says when workers meet. `fragments` hold the global parameters. `inner_steps` counts this worker's own.
    `ticks` counts those that all workers have in common.
    """

    _swarm: Swarm | None = None

    def __init__(
        self,
        steps: OuterSteps,
        fragments: Sequence[Fragment],
        optimizers: Sequence[torch.optim.Optimizer],
        running: RunningStatistics,
        frozen: Mapping[str, nn.Parameter],
        samples: int | None,
    ) -> None:
        self.steps, self.fragments, self._optimizers = steps, fragments, optimizers
        self._running, self._frozen = running, dict(frozen)
        self._samples = samples or 1
        self.inner_steps = self.ticks = 0
        self._learnt = False
        self._meter, self._sick = Meter(), Sick()
        self._models = list[nn.Module]()
        self._known = {id(p) for fragment in fragments for p in fragment.own_parameters}
        for fragment in fragments:
            fragment.attachment.meter = self._meter
        self._stepped: set[torch.optim.Optimizer] = set()
        self._strangers = Strangers(self._known, optimizers)
        self._strangers.due = steps.following(0)
        self._begin = Start(fragments, frozen)
        self._hooks = [each.register_step_pre_hook(self._before) for each in optimizers]
        self._hooks += [each.register_step_post_hook(self._after) for each in optimizers]
        AT_WORK.update(optimizers)

    def watch(self, model: nn.Module) -> None:
        """Warn if a state is loaded into this model in mid-training, and keep it for `go_back`."""
        self._models.append(model)
        note = Hook(self._begin.model_loads)
        self._hooks += [module.register_load_state_dict_pre_hook(note) for module in model.modules()]

    @property
    def group(self) -> Group:
        """The process group of the workers."""
        return self.fragments[0].attachment.group

    @property
    def workers(self) -> list[str]:
        """The names of the present workers, this one included (only with `store=`)."""
        return self._swarm.workers if self._swarm else []

    @property
    def waited_for(self) -> dict[str, float]:
        """Seconds this worker has waited for each other worker's share, by worker name (only with `store=`)."""
        return dict(self._swarm.waited_for) if self._swarm else {}

    @property
    def name(self) -> str:
        """This worker's name in `workers`."""
        return self._swarm.id if self._swarm else ""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The global parameters by name, the same on all workers. Of sharded parameters, this rank's shards."""
        return {name: p for fragment in self.fragments for name, p in fragment.parameters.items()}

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The outer optimizers, one for each fragment: give them a learning-rate schedule here."""
        return [fragment.optimizer for fragment in self.fragments]

    @property
    def waited(self) -> float:
        """Seconds for which this worker has waited for exchanges, in all outer steps together."""
        return sum(fragment.waited for fragment in self.fragments) + (self._swarm.waited if self._swarm else 0.0)

    @property
    def skipped(self) -> int:
        """How many outer steps of a fragment were skipped, as a mean was not finite. `stats()` does not count them."""
        return self._sick.skipped

    @property
    def left_out(self) -> dict[int | str, int]:
        """How often a worker's Δ was not finite, by its rank in the group or, with `store=`, its name, if ever."""
        return dict(self._sick.times)

    @property
    def memory(self) -> MemoryUse:
        """Global parameters, outer optimizers and residuals; Δ and other staging; the largest fragment's scratch."""
        waiting, staging, scratch = zip(*(fragment.memory for fragment in self.fragments), strict=True)
        return MemoryUse(sum(waiting), sum(staging), max(scratch))

    def stats(self) -> Stats:
        """Return the figures of the latest outer step (all fragments together), and of all so far."""
        for fragment in self.fragments:
            fragment.attachment.steps.close_if_done()
        return self._meter.stats(
            lambda: [x for each in self.fragments for m in each.attachment.recipe.memories() for x in m.waiting()]
        )

    def differing_parameters(self) -> list[str]:
        """Return the names of global and of frozen parameters that differ between workers. A collective.

        With `store=` one worker may call it alone. It compares the global ones with those that the other present
        workers had after the latest outer step that both have taken.
        """
        if self._swarm:
            return self._swarm.differing(digests(self.parameters))
        return differing(self.parameters | self._frozen, self.group)

    def go_back(self) -> None:
        """Give this worker's model the global parameters, and drop what its optimizers hold that is not finite.

        Running statistics become what workers have last agreed on. What this one has learnt since its latest outer step
        is lost. Not a collective.
        """
        for model in self._models:
            reshard(model)
        for fragment in self.fragments:
            fragment.merge()
        self._running.take(self._running.agreed)
        for optimizer in self._optimizers:
            for p, held in list(optimizer.state.items()):
                if not all_finite([x for x in tree_leaves(held) if isinstance(x, Tensor)]):
                    del optimizer.state[p]
        self._begin.reloaded = False

    def forget(self) -> None:
        """Drop all residuals. Waits for exchanges in flight. Call it on every worker."""
        self._arrive()
        for fragment in self.fragments:
            fragment.attachment.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's memories and step, and the global parameters with their optimizers' state.

        Waits for exchanges in flight. Save it on every worker, beside each worker's own model and optimizer.

        Raises:
            StateError: After `remove`.
        """
        self._refuse_removed()
        self._arrive()
        return self._state()

    def check_state_dict(self, saved: Mapping[str, Any]) -> Standing:
        """Return where `saved` would resume this worker.

        Raises:
            ValueError: If `load_state_dict` would, on it alone.
        """
        self._refuse_removed()
        return outer_state.check(saved, self.fragments, self.steps)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Resume from this worker's `state_dict`. A collective: call it on every worker.

        It leaves the model as it is: load that and the inner optimizer from what this worker saved, or call `go_back`.

        With `store=`, call it before the first step, on workers that have a state. If others have gone on from there,
        this one stays with them, and its model gets their global parameters: what it had yet to send is lost.

        Raises:
            ValueError: On all workers, if one's state does not fit it or the others'. Nothing is changed then.
            RuntimeError: With `store=`, after an inner step.
        """
        islands = self.fragments[0].islands  # whose other ranks exchange with others, and must not load alone
        agreed(islands, lambda: agree(self.group, lambda: self.check_state_dict(saved)), StateError, ValueError)
        for fragment in self.fragments:
            fragment.land_if_possible()  # or it would overwrite what is loaded
        self._begin.loads()
        self.ticks = outer_state.load(saved, self.fragments, self.steps)
        self._running.restore(outer_state.running(saved))
        self.inner_steps, _ = saved["own"]
        self._meter.end()

    def remove(self, *, goodbye: bool = True) -> None:
        """Stop taking outer steps, and free all memory. The model keeps this worker's own parameters.

        Args:
            goodbye: With `store=`, whether to tell the others; otherwise they notice as if this worker had died.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        stop_observing(self._strangers)
        AT_WORK.difference_update(self._optimizers)
        self._leave(goodbye=goodbye)
        for fragment in self.fragments:
            fragment.land_if_possible()
            fragment.attachment.end()

    def _refuse_removed(self) -> None:
        if not self._hooks:
            raise StateError("this handle was removed, and what it kept is gone: save before remove(), or make another")

    def _go_on(self) -> None:
        """End an outer step that was interrupted while this worker waited, as by the keyboard."""
        parts = self.steps.parts_due(self.ticks - self.steps.delay)
        if any(self.fragments[part].flies for part in parts):
            self._finish(parts)

    def _arrive(self) -> None:
        """Wait for exchanges in flight."""
        self._go_on()
        for fragment in self.fragments:
            fragment.arrive()

    @untraced  # which traces the hooks of a compiled step
    def _before(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Before the first inner step, see where workers start from."""
        refuse_unfit(f"{type(optimizer).__name__} steps", "leave it out, as it counts steps, or remove() the handle")
        if self._begin.pending and self._begin.check(self.group):
            for fragment in self.fragments:
                fragment.adopt()
            self._running.take(self._running.tensors)
        self._begin.warn()
        self._go_on()

    @untraced
    def _after(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Count an inner step once all optimizers have stepped."""
        if nested(optimizer) or skipped_by_scaler(optimizer):
            return
        self._stepped.add(optimizer)
        if len(self._stepped) == len(self._optimizers):
            self._stepped.clear()
            self._step()

    def _step(self) -> None:
        self.inner_steps += 1
        self.ticks += 1
        self._learnt = True
        self._strangers.due = self.steps.following(self.ticks) - self.ticks
        self._meet()

    def _meet(self) -> None:
        """Start and end what is due at this tick."""
        self._start(self.steps.parts_due(self.ticks))
        self._finish(self.steps.parts_due(self.ticks - self.steps.delay))

    def _start(self, parts: Sequence[int]) -> None:
        """Start the exchange of these fragments, in one message."""
        if not parts:
            return
        refusal = self._refusal(parts)
        fragments = [self.fragments[part] for part in parts]
        for fragment in fragments:
            fragment.measure()
        finite = not self.steps.leave_out or all(fragment.finite() for fragment in fragments)
        weight = self._samples * self._learnt if finite else math.nan
        self._send(self._encode(parts, weight, refusal))

    def _send(self, found: Meeting) -> None:
        found.begin(self.group)

    def _leave(self, *, goodbye: bool) -> None:
        """Tell the others, where they would not know."""

    def _refusal(self, parts: Sequence[int]) -> int:
        """Return the number of what is wrong with this worker, 0 for nothing. It is sent: the others wait for it."""
        changed = next((part + 1 for part in parts if self.fragments[part].optimizer_changed), 0)
        found = self._running.missing if 0 in parts else 0, self._unknown(), changed
        own = next((len(found) * value + kind for kind, value in enumerate(found) if value), 0)
        number = -int(self.fragments[0].lowest(-own))
        if number and self._swarm:  # nobody waits for this worker alone
            raise RuntimeError(self._worded(number))
        return number

    def _worded(self, number: int) -> str:
        """Return what a number of `_refusal` stands for, on any worker."""
        value, kind = divmod(number, 3)
        if kind == 0:
            return self._running.described(value)
        if kind == 1:
            return (
                f"the optimizer trains {value} parameters that it did not train when outer steps began; workers would "
                "drift apart in them: remove() this handle on every worker, and make another"
            )
        return (
            f"handle.optimizers[{value - 1}] is no longer the {self.fragments[value - 1].kind.__name__} that "
            "make_optimizer made, or holds other parameters; expected changes of its settings alone, such as lr, or "
            "global parameters would drift apart: undo it; or remove() this handle on every worker, and make another"
        )

    def _check_refusals(self, fragments: Sequence[Fragment]) -> None:
        """Raise RuntimeError if something was wrong with a worker. Nothing was sent, then, and each keeps its Δ."""
        for fragment in fragments:
            fragment.arrive()
        refusals = {rank: n for each in fragments if each.meeting for rank, n in each.meeting.refusals.items()}
        if refusals:
            for fragment in fragments:
                fragment.meeting = None
                self._meter.skip()
            raise RuntimeError(f"{self._worded(min(refusals.values()))} (on workers {sorted(refusals)})")

    def _encode(self, parts: Sequence[int], weight: float, refusal: int = 0) -> Meeting:
        """Put into one message what is sent; to a swarm, also what a group would rather sum on the way."""
        with pooling(math.inf) if self._swarm else pooling() as pool:
            found = Meeting(pool, self.group, self.ticks, weight, refusal)
            if 0 in parts:
                self._running.share(pool)
            for part in parts:
                self.fragments[part].start(found)
        return found

    def _finish(self, parts: Sequence[int]) -> None:
        """Take the mean of these fragments, and go on from there."""
        self._check_refusals([self.fragments[part] for part in parts])
        for part in parts:
            self._take(part)

    def _take(self, part: int) -> None:
        fragment, meeting = self.fragments[part], self.fragments[part].meeting
        sick = [] if meeting is None else meeting.sick
        if fragment.arrived:
            self._sick.leave_out(sick, self.group)
        elif meeting is not None:  # otherwise a state was loaded that had nothing under way
            if sick or any(meeting.weights):
                sound = [] if sick else all_gather_plain(fragment.sound(), self.group)
                unsound = [rank for rank, well in enumerate(sound) if not well]
                self._sick.skip(sick or [self.name or rank for rank in unsound], self.group)
            self._meter.skip()
        if self._apply(part) and part == 0:
            self._running.average()

    def _apply(self, part: int) -> bool:
        """Apply the mean that has arrived, and go on from there. Return whether there was one."""
        fragment = self.fragments[part]
        taken = fragment.meeting is None or fragment.meeting.taken
        with nullcontext() if taken else fragment.keeping_moves():
            applied = fragment.apply(self.steps.rate)
        if not fragment.sound():
            self.go_back()
        elif applied and taken:
            fragment.merge(self.steps.mixing)
        return applied

    def _unknown(self) -> int:
        """Return how many parameters the optimizers train that they did not train when the handle was made."""
        trained = [p for each in self._optimizers for group in each.param_groups for p in group["params"]]
        return sum(p.requires_grad and local(p).numel() > 0 and id(p) not in self._known for p in trained)

    def _state(self) -> dict[str, Any]:
        own = [self.inner_steps, 0]  # the format has no use for the second any more
        running = self._running.state(arrived=self.fragments[0].arrived)
        return outer_state.dump(self.fragments, self.ticks, running) | {"own": own}


def digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a hash of each."""
    return {name: int(digest(x)) for name, x in tensors.items()}
