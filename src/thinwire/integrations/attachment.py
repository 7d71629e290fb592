"""What `attach` returns: the recipe at work on one model."""

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn
from torch.futures import Future

from thinwire.checked import checked
from thinwire.collectives import Group
from thinwire.integrations import state
from thinwire.integrations.drift import differing
from thinwire.integrations.gradients import put_in_place
from thinwire.integrations.handover import Handover
from thinwire.integrations.layout import Layout
from thinwire.integrations.optimizers import observe, stop_observing
from thinwire.integrations.outcomes import Reduced, look, read
from thinwire.integrations.redistribution import noting_from
from thinwire.integrations.starvation import Starvation
from thinwire.integrations.steps import Steps
from thinwire.planner import Why
from thinwire.reducer import Bucket, Reducer, Released, Round, Segment
from thinwire.stats import Meter, Stats
from thinwire.waits import Verdict, on_host

_log = logging.getLogger("thinwire")

Divisor = Callable[[bool, bool], float]
"""How many ranks does a sum stand for? All of them, or only those that still have data.

Arguments: whether this rank has run out of data, and whether this reduction continues a step. Raises RuntimeError if
the two do not go together.
"""


@runtime_checkable
class LossScaler(Protocol):
    """What we need of a torch.amp.GradScaler."""

    def get_scale(self) -> float:
        """Return the factor on the loss."""


@final
@checked
class Attachment:
    """Reduces the gradients of one model with a recipe, and keeps what waits between steps. See `attach`.

    A step ends when an optimizer takes the gradients. Several backward passes may accumulate into one step. Gradients
    that are thrown away leave every memory as it was. `parameters` maps names to the parameters whose gradients are
    reduced; `names` is the reverse. `ended`: whether a later attachment has taken over.
    """

    def __init__(
        self,
        recipe: Reducer,
        parameters: Mapping[str, nn.Parameter],
        group: Group,
        *,
        handover: Handover,
        divisor: Divisor,
        scaler: LossScaler | None,
        may_be_unused: bool,
        why: Callable[[], Why] | None = None,
    ) -> None:
        self.recipe, self.meter, self._why = recipe, Meter(), why
        self.parameters: Mapping[str, nn.Parameter] = dict(parameters)
        self.names: Mapping[nn.Parameter, str] = {p: name for name, p in parameters.items()}
        self._group, self._handover, self._divisor = group, handover, divisor
        self._scaler, self._may_be_unused = scaler, may_be_unused
        self._watch = any(memory.stateful for memory in recipe.memories())
        self._loss_scale = 1.0  # of what waits
        self._round = Round(step=0, group=group, scale=1.0)
        self._agreed = False
        self.ended = False
        self.steps = Steps(self.parameters, recipe.memories())
        self.starvation = Starvation(recipe.memories(), group.rank())
        observe(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Stay behind when the model is copied or saved, as DDP's own hook does."""
        return _nothing, ()

    @property
    def group(self) -> Group:
        """The ranks that exchange gradients."""
        return self._group

    @property
    def layout(self) -> Layout:
        """This rank's place among those that save together. Raises TypeError if this serves the shards of a model."""
        return Layout.whole(self._group, self.parameters)

    @property
    def step(self) -> int:
        """Steps done so far. Steps before a resumed checkpoint and steps called off count too."""
        self.steps.close_if_done()
        return self.steps.step

    @property
    def memory_bytes(self) -> int:
        """Bytes this rank holds between steps."""
        return sum(memory.nbytes for memory in self.recipe.memories())

    @property
    def waits(self) -> bool:
        """Whether anything waits on this rank for a later step."""
        memories = self.recipe.memories()
        held = ((m.free, fields) for m in memories for fields in m.state().values())
        return any(bool(x.any()) for free, fields in held for field, x in fields.items() if field not in free)

    def keep_step(self) -> None:
        """Say that the gradients in place have been applied.

        Call it only if neither a torch.optim optimizer nor an update in place applies them, for example where master
        weights are kept elsewhere.
        """
        self.steps.settle_all(keep=True)

    def drop_step(self) -> None:
        """Say that the gradients in place will not be applied. Zeroing them says the same."""
        self.steps.settle_all(keep=False)

    def reduce(
        self, flat: Tensor, parameters: list[nn.Parameter], gradients: list[Tensor], *, joined: bool = False
    ) -> "Future[Tensor]":
        """Start reducing a bucket; `gradients` are views of it. The future holds `flat` once that is the mean.

        `joined`: this rank has run out of data, and only takes part so that the others can go on. Raises RuntimeError
        if another attachment has taken over.
        """
        names = self._enter(parameters, joined=joined)
        origin = flat.storage_offset()
        segments = [
            Segment(name=name, offset=int(g.storage_offset() - origin), length=g.numel(), shape=tuple(g.shape))
            for name, g in zip(names, gradients, strict=True)
        ]
        bucket = Bucket(flat=flat, segments=tuple(segments))
        means = self.steps.gradients.take_out(names, bucket.views())
        self.meter.gradient(flat, self._group.size(), self._round.scale)
        at = self._round if on_host(flat) else replace(self._round, watch=False, verdict=Verdict())
        return self._finishing(self.recipe.reduce(bucket, at), names, bucket, means, at.verdict)

    def reduce_sparse(
        self, gradient: Tensor, parameters: list[nn.Parameter], *, joined: bool = False
    ) -> "Future[Tensor]":
        """Start reducing the sparse gradient of an nn.Embedding(sparse=True). The future holds the mean, sparse too."""
        (name,) = self._enter(parameters, joined=joined)
        future = self.recipe.reduce_rows(gradient, name, self._round)
        _, note = self.steps.started([name])

        def finish(done: "Future[Tensor]") -> Tensor:
            mean = done.value()  # raises what the reducer raised
            finite = bool(mean.coalesce().values().isfinite().all())
            note(Reduced() if finite else Reduced(frozenset([name])))
            return mean

        return future.then(finish)

    def taken(self, optimizer: torch.optim.Optimizer, *, evaluated: bool = False) -> None:
        """Keep what was staged for this optimizer's gradients. Raises RuntimeError for LBFGS if anything waits.

        An optimizer may call its closure several times; the gradients of every call count as taken.
        """
        if evaluated and isinstance(optimizer, torch.optim.LBFGS):
            self._take_exactly(optimizer)
        elif self.steps.stepped(optimizer) and not evaluated:
            _kept_by.setdefault(optimizer, set()).add(self)
            self.starvation.stepped(optimizer)

    def _take_exactly(self, optimizer: torch.optim.Optimizer) -> None:
        waited = self.waits
        if not self.steps.stepped(optimizer) or not self.waits:
            return
        if not waited:
            self.forget()
        raise RuntimeError(
            "LBFGS compares gradients of several evaluations, and with this recipe a part of each waits for a later "
            "one: use recipes.dense(), or an optimizer that takes one gradient a step"
        )

    def verify_replicas(self) -> bool:
        """Return whether every parameter is bit-identical on all ranks. A collective: call it on every rank."""
        return not self.differing_parameters()

    def differing_parameters(self) -> list[str]:
        """Return the names of parameters that differ between ranks. A collective: call it on every rank."""
        return differing(self.parameters, self._group)

    def stats(self) -> Stats:
        """Return what the latest step and all steps together sent and took. Call it after the optimizer's step.

        It reads what waits once, and from the first call on each gradient is read once more. On a GPU it makes the host
        wait. Steps that DDP reduces without a hook are counted while plan="auto" watches them, and not otherwise.
        """
        self.steps.close_if_done()
        return self.meter.stats(lambda: [x for memory in self.recipe.memories() for x in memory.waiting()])

    def why(self) -> Why:
        """Return why each tensor is sent as it is, if a plan or plan="auto" chose it. `print` shows it as a table.

        Raises RuntimeError if you chose the recipe yourself, or if nothing has been chosen yet.
        """
        if self._why is None:
            raise RuntimeError('you chose the recipe yourself; why() says what a plan or plan="auto" has chosen')
        return self._why()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's memories and step, as tensors and plain containers. Save it on every rank.

        It leaves out gradients that no optimizer has taken yet.
        """
        self.steps.close_if_done()
        return state.dump(
            state.Place.of(self._group),
            recipe=state.words(self.recipe),
            step=self.steps.step,
            draw=self.steps.draw,
            loss_scale=self._loss_scale,
            memories=self.recipe.memories(),
            momentum=self._handover.settings(),
        )

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Resume from this rank's `state_dict`. A collective: call it on every rank.

        If any rank's state does not fit it or the other ranks' states, raises ValueError on every rank and changes
        nothing.
        """
        state.agree(self._group, lambda: self.check_state_dict(saved))
        self._agreed = True
        self.steps.restart(int(saved["step"]), int(saved.get("draw", saved["step"])))
        self._follow_loss_scale(float(saved["loss_scale"]))
        state.load(saved, self.recipe.memories(), self.parameters)
        if self.recipe.changes:
            state.hold_alike(self._group, self.recipe.memories(), self.parameters)
        self._handover.restore(saved["momentum"], saved.get("weight_decay", {}))
        self.meter.end()

    def check_state_dict(self, saved: Mapping[str, Any]) -> state.Standing:
        """Return where this rank would go on from. Raises ValueError if `load_state_dict` would, on this rank alone."""
        return state.check(saved, self.recipe, self.parameters, state.Place.of(self._group))

    def forget(self) -> None:
        """Drop everything that waits, including momentum in the memories. Call it on every rank."""
        self.steps.settle_all(keep=False)
        for memory in self.recipe.memories():
            memory.restore({})
        self._handover.accept()

    def regroup(self, group: Group, divisor: Divisor) -> None:
        """Go on among the ranks of another group, with what waits here; notes follow the number of ranks.

        A collective of the new group, between steps. All go on from the latest step that any of them has come to.
        """
        standing = state.latest(group, state.Standing(step=self.steps.step, draw=self.steps.draw))
        self.recipe.prepare(group)
        self.steps.restart(standing.step, standing.draw)
        factor = self._group.size() / group.size()
        for memory in self.recipe.memories() if factor != 1 else ():
            held = memory.state()
            memory.restore(noting_from(held, held, factor))
        self._group, self._divisor, self._agreed = group, divisor, True

    def join(self, saved: Mapping[str, Any]) -> None:
        """Go on where another rank is, from its `state_dict`: its step and its notes. What waits there stays there.

        Not a collective. What waits here stays too. Raises ValueError if the state does not fit.
        """
        place = state.Place(saved["rank"], saved["world_size"])
        standing = state.check(saved, self.recipe, self.parameters, place)
        self.steps.restart(standing.step, standing.draw)
        self._follow_loss_scale(float(saved["loss_scale"]))
        for memory, theirs in zip(self.recipe.memories(), saved["memories"], strict=True):
            memory.restore(noting_from(memory.state(), theirs, place.world_size / self._group.size()))
        self._handover.restore(saved["momentum"], {})
        self.meter.end()

    def take_back(self) -> None:
        """Drop a reduction that has failed on this rank, and all that no optimizer has taken."""
        self.steps.close()
        self.steps.settle_all(keep=False)

    def take_over(self, earlier: "Attachment") -> None:
        """Take over what waits in an earlier attachment to some of these parameters, and end that one."""
        earlier.steps.settle_by_gradients()
        names = {name: self.names[p] for name, p in earlier.parameters.items() if p in self.names}
        self._follow_loss_scale(earlier._loss_scale)
        mine, theirs = self.recipe.memories(), earlier.recipe.memories()
        same = state.kinds(mine) == state.kinds(theirs)
        for memory, other in zip(mine, theirs, strict=True) if same else ():
            held = other.state()
            memory.restore({new: held[old] for old, new in names.items() if old in held})
        if not same and earlier._handover.active:  # nothing waits; the optimizer has its momentum to itself again
            earlier._handover.give_up(self._group, earlier._loss_scale)
        self.steps.restart(earlier.step, earlier.steps.draw)
        self._handover.accept()
        earlier.end()

    def end(self) -> None:
        """Free all memory, and stop following gradients."""
        self.ended = True
        stop_observing(self)
        self._handover.end()
        self.steps.stop_following()
        for memory in self.recipe.memories():
            memory.restore({})
        for attachments in _kept_by.values():
            attachments.discard(self)

    def check_removable(self) -> None:
        """Raise RuntimeError if `remove` would, on this rank alone."""
        self._handover.check_returnable()

    def remove(self, *, averages: str = "DDP's hook, or reduce(), does that") -> None:
        """Give the model back: from now on gradients are averaged uncompressed. A collective; call it between steps.

        If the recipe applies momentum, the optimizer gets it back. With momentum correction, what waits is applied at
        once; with other recipes, what waits and is not given back goes out with the next gradients. DDP cannot drop a
        hook, so the hook stays and sums gradients as DDP would; the logger "thinwire" says so, and in the words of
        `averages` what does it. Raises RuntimeError if the recipe corrects momentum and no optimizer can take it back.
        """
        self.check_removable()
        self.steps.settle_by_gradients()
        if self._handover.active:
            self._handover.give_up(self._group, self._loss_scale)
        self.recipe = Released(waiting=tuple(self.recipe.memories()))
        self.meter.end()
        level = logging.DEBUG if self._group.rank() else logging.WARNING
        _log.log(level, "removed: gradients are averaged uncompressed from now on; %s", averages)

    def _enter(self, parameters: Sequence[nn.Parameter], *, joined: bool) -> list[str]:
        """Note that these parameters are being reduced, and return their names."""
        if self.ended:
            raise RuntimeError("another attachment to these parameters has taken over; train the model it was given")
        names = [self.names[p] for p in parameters]
        if self.steps.enter(names, joined=joined):
            self._begin(joined=joined)
        return names

    def _begin(self, *, joined: bool) -> None:
        """Get ready for a reduction."""
        steps = self.steps
        if not self._agreed:
            state.agree(self._group, lambda: state.Standing(step=steps.step, draw=steps.draw))
            self._agreed = True
        self._follow_loss_scale(1.0 if self._scaler is None else self._scaler.get_scale())
        scale = 1 / self._divisor(joined, steps.open)
        self.meter.begin(steps.step)
        self._round = Round(
            step=steps.step,
            draw=steps.draw,
            group=self._group,
            scale=scale,
            watch=self._watch,
            listeners=(self.meter,),
        )
        self.recipe.begin(self._round)
        if self._handover.active:
            self._handover.prepare(self._loss_scale)

    def _finishing(
        self,
        future: "Future[bool]",
        names: Sequence[str],
        bucket: Bucket,
        means: Sequence[tuple[Tensor, Tensor]],
        verdict: Verdict | None,
    ) -> "Future[Tensor]":
        """Return the future of the mean. Keep only its outcome: a future held at exit can end the process."""
        (questions, note), watch = self.steps.started(names), self._watch
        parameters = {name: self.parameters[name] for name in names}
        # If no rank used a parameter, DDP leaves its .grad as it is, and an optimizer would take that.
        idle = self._may_be_unused and not self.steps.gradients.added.issuperset(names)

        def finish(done: "Future[bool]") -> Tensor:
            finite = done.value()  # raises what the reducer raised
            for gradient, mean in means:
                gradient.add_(mean)
            if idle:
                put_in_place(bucket, parameters)
            if verdict is None:
                note(read(bucket, parameters, questions, finite=finite))
            else:  # the host must not wait here: the step's end does
                note(look(bucket, parameters, questions, verdict, watch=watch))
            return bucket.flat

        return future.then(finish)

    def _follow_loss_scale(self, scale: float) -> None:
        if scale != self._loss_scale:
            for memory in self.recipe.memories():
                memory.rescale(scale / self._loss_scale)
            self._loss_scale = scale


# What waits lives as long as its optimizer. If the model is wrapped anew, it is still there.
_kept_by: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[Attachment]] = weakref.WeakKeyDictionary()


def _nothing() -> None:
    """Stand in for an attachment in a copy of the model."""
