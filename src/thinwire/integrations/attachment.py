"""What `attach` returns: the recipe at work on one model."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from thinwire.collectives import Group
from thinwire.integrations import replicas, state
from thinwire.integrations.gradients import Gradients, shaped_like
from thinwire.integrations.joining import Divisor
from thinwire.integrations.momentum import Handover, corrections
from thinwire.integrations.optimizers import listen, stop_listening
from thinwire.integrations.steps import Reduced, Steps, read
from thinwire.memories import Memory
from thinwire.reducer import Bucket, Reducer, Released, Round, Slot


class LossScaler(Protocol):
    """What is asked of a torch.amp.GradScaler."""

    def get_scale(self) -> float:
        """Return the factor on the loss."""


@final
class Attachment:
    """Reduces gradients by a recipe, and keeps what its memories staged for those that an optimizer takes.

    A step is what an optimizer takes. Gradients that add up over several backward passes are one step; those that are
    thrown away leave every memory as it was.
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
    ) -> None:
        self.recipe = recipe
        self._parameters = dict(parameters)
        self._names = {p: name for name, p in parameters.items()}
        self._group, self._handover, self._divisor = group, handover, divisor
        self._scaler, self._may_be_unused = scaler, may_be_unused
        self._watch = any(memory.stateful for memory in recipe.memories())
        self._loss_scale = 1.0  # of what waits
        self._round = Round(step=0, group=group, scale=1.0)
        self._agreed = False
        self._ended = False
        self.steps = Steps(self._parameters, recipe.memories())
        listen(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Be left behind where the model is copied or saved, as DDP leaves its hook."""
        return _nothing, ()

    @property
    def step(self) -> int:
        """Steps done since attaching, those before a resumed checkpoint and those called off included."""
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

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters whose gradients are reduced, by name."""
        return self._parameters

    @property
    def names(self) -> Mapping[nn.Parameter, str]:
        """The names of these parameters."""
        return self._names

    @property
    def gradients(self) -> Gradients:
        """What every .grad is made of."""
        return self.steps.gradients

    def keep_step(self) -> None:
        """Tell that the gradients in place have been applied.

        Needed only where neither a torch.optim optimizer nor an update in place does that, as with master weights that
        are kept elsewhere.
        """
        self.steps.settle_all(keep=True)

    def drop_step(self) -> None:
        """Tell that the gradients in place will not be applied. Zeroing them says so as well."""
        self.steps.settle_all(keep=False)

    def reduce(
        self, flat: Tensor, parameters: list[nn.Parameter], gradients: list[Tensor], *, joined: bool = False
    ) -> "Future[Tensor]":
        """Start reducing a bucket of which `gradients` are views; the future holds `flat` when it is the mean.

        `joined`: this rank has no data left and keeps the others company.
        """
        names = self._enter(parameters, joined=joined)
        origin = flat.storage_offset()
        slots = [
            Slot(name=name, offset=int(g.storage_offset() - origin), length=g.numel(), shape=tuple(g.shape))
            for name, g in zip(names, gradients, strict=True)
        ]
        bucket = Bucket(flat=flat, slots=tuple(slots))
        means = self.gradients.take_out(names, bucket.views())
        return self._finishing(self.recipe.reduce(bucket, self._round), names, bucket, means)

    def reduce_sparse(
        self, gradient: Tensor, parameters: list[nn.Parameter], *, joined: bool = False
    ) -> "Future[Tensor]":
        """Start reducing the sparse gradient of an nn.Embedding(sparse=True)."""
        (name,) = self._enter(parameters, joined=joined)
        future = self.recipe.reduce_rows(gradient, name, self._round)
        note = self.steps.outcome([name])

        def finish(done: "Future[Tensor]") -> Tensor:
            mean = done.value()  # raises what the reducer raised
            finite = bool(mean.coalesce().values().isfinite().all())
            note(Reduced() if finite else Reduced(frozenset([name])))
            return mean

        return future.then(finish)

    def count_plain_step(self) -> None:
        """Note that DDP has reduced a step by itself."""
        self.steps.step += 1
        self.steps.draw += 1

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Lay aside momentum that the memories apply. Raises MomentumError where it would be applied twice."""
        self._handover.before_step(optimizer)

    def ready(self, optimizer: torch.optim.Optimizer, *, evaluated: bool) -> None:
        """Apply what is left of momentum; what a closure has evaluated is taken, however often it is called."""
        self._handover.apply(optimizer)
        if evaluated and isinstance(optimizer, torch.optim.LBFGS):
            self._take_exactly(optimizer)
        elif evaluated:
            self.steps.stepped(optimizer)

    def _take_exactly(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep what was staged, or raise RuntimeError where that leaves something waiting."""
        waited = self.waits
        if not self.steps.stepped(optimizer) or not self.waits:
            return
        if not waited:
            self.forget()
        raise RuntimeError(
            "LBFGS compares gradients of several evaluations, and with this recipe a part of each waits for a later "
            "one: use recipes.dense(), or an optimizer that takes one gradient a step"
        )

    def broke_off(self, optimizer: torch.optim.Optimizer) -> None:
        """Put back what was laid aside."""
        self._handover.give_back()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep what was staged for the gradients that this optimizer has taken."""
        self._handover.after_step(optimizer)
        if self.steps.stepped(optimizer):
            _kept_by.setdefault(optimizer, set()).add(self)

    def verify_replicas(self) -> bool:
        """Return whether every parameter is bit-identical on all ranks. A collective: call it on every rank."""
        return not self.differing_parameters()

    def differing_parameters(self) -> list[str]:
        """Return the names of parameters that differ between ranks. A collective: call it on every rank."""
        return replicas.differing(self._parameters, self._group)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's memories and step: tensors and plain containers. Each rank has its own; save them all.

        Gradients that no optimizer has taken yet are not in it.
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

        Raises ValueError on every rank, changing nothing, where a state does not fit its rank or the others'.
        """
        place = state.Place.of(self._group)
        state.agree(self._group, lambda: state.check(saved, self.recipe, self._parameters, place))
        self._agreed = True
        self.steps.restart(int(saved["step"]), int(saved.get("draw", saved["step"])))
        self._follow_loss_scale(float(saved["loss_scale"]))
        state.load(saved, self.recipe.memories(), self._parameters)
        self._handover.restore(saved["momentum"], saved.get("weight_decay", {}))

    def forget(self) -> None:
        """Drop everything that waits, momentum in the memories included. Call it on every rank."""
        self.steps.settle_all(keep=False)
        for memory in self.recipe.memories():
            memory.restore({})
        self._handover.paid()

    def take_over(self, earlier: "Attachment") -> None:
        """Go on with what waits in an attachment that has served some of these parameters until now, and end that."""
        earlier.steps.settle_by_gradients()
        names = {name: self._names[p] for name, p in earlier.parameters.items() if p in self._names}
        for mine, theirs in self._alike(earlier):
            held = theirs.state()
            mine.restore({new: held[old] for old, new in names.items() if old in held})
        self.steps.restart(earlier.step, earlier.steps.draw)
        self._loss_scale = earlier._loss_scale
        self._handover.paid()
        earlier.end()

    def _alike(self, earlier: "Attachment") -> Iterable[tuple[Memory, Memory]]:
        """Return this one's memories beside the earlier one's, if those are alike."""
        mine, theirs = self.recipe.memories(), earlier.recipe.memories()
        return zip(mine, theirs, strict=True) if state.kinds(mine) == state.kinds(theirs) else ()

    @property
    def ended(self) -> bool:
        """Whether another has taken over."""
        return self._ended

    def end(self) -> None:
        """Free what is held; gradients are no longer followed."""
        self._ended = True
        stop_listening(self)
        self._handover.end()
        self.steps.gradients.close()
        for memory in self.recipe.memories():
            memory.restore({})
        for attachments in _kept_by.values():
            attachments.discard(self)

    def remove(self) -> None:
        """Give the model back: from now on gradients are averaged as they are. A collective; call it between steps.

        Momentum goes back to the optimizer. What waited beside it is applied at once; what waits for other recipes is
        sent along with the next gradients. DDP cannot drop a hook: it stays, and passes through.
        """
        self._handover.check_returnable()
        self.steps.settle_by_gradients()
        memories = self.recipe.memories()
        if self._handover.active:
            self._handover.apply_once(self._summed("residual"))
            self._handover.take_back(self._summed("velocity"))
            self.forget()
        self.recipe = Released(waiting=tuple(memories))

    def _summed(self, field: str) -> dict[str, Tensor]:
        """Return the sum over ranks of what waits under `field`, by parameter."""
        found: dict[str, Tensor] = {}
        for memory in corrections(self.recipe.memories()):
            held = memory.state()
            for name in self._parameters:  # on some ranks there may be nothing
                mine = held.get(name, {}).get(field)
                p = self._parameters[name]
                dtype = memory.held(p.dtype)
                total = torch.zeros(p.numel(), dtype=dtype, device=p.device) if mine is None else mine.clone()
                dist.all_reduce(total, group=self._group)
                found[name] = total / self._loss_scale
        return found

    def _enter(self, parameters: list[nn.Parameter], *, joined: bool) -> list[str]:
        """Note that these parameters are being reduced, and return their names."""
        if self._ended:
            raise RuntimeError("another attachment to these parameters has taken over; train the model it was given")
        names = [self._names[p] for p in parameters]
        if self.steps.begins_with(names):
            self._begin(joined=joined)
        return names

    def _begin(self, *, joined: bool) -> None:
        if not self._agreed:
            state.agree(self._group, lambda: state.Standing(step=self.steps.step, draw=self.steps.draw))
            self._agreed = True
        self._handover.check_paid()
        continues = self.steps.begin(joined=joined)
        self._handover.follow()
        divisor = self._divisor(joined, continues)
        self._round = Round(
            step=self.steps.step,
            draw=self.steps.draw,
            group=self._group,
            scale=1 / divisor,
            watch=self._watch,
        )
        self._follow_loss_scale(1.0 if self._scaler is None else self._scaler.get_scale())

    def _finishing(
        self, future: "Future[bool]", names: Sequence[str], bucket: Bucket, means: Sequence[tuple[Tensor, Tensor]]
    ) -> "Future[Tensor]":
        """Remember what the future says, but not the future: what holds it at exit can end the process."""
        note = self.steps.outcome(names)
        parameters = {slot.name: self._parameters[slot.name] for slot in bucket.slots}
        questions = self.steps.questions(parameters)
        # DDP leaves the .grad of what no rank has used as it is, and an optimizer would take that.
        idle = self._may_be_unused and not self.gradients.adds_to_all(names)

        def finish(done: "Future[bool]") -> Tensor:
            finite = done.value()  # raises what the reducer raised
            for gradient, mean in means:
                gradient.add_(mean)
            if idle:
                _put_in_place(bucket, parameters)
            note(read(bucket, parameters, questions, finite=finite))
            return bucket.flat

        return future.then(finish)

    def _follow_loss_scale(self, scale: float) -> None:
        if scale != self._loss_scale:
            for memory in self.recipe.memories():
                memory.rescale(scale / self._loss_scale)
            self._loss_scale = scale


# What waits lives as long as an optimizer that takes it, so that wrapping a model anew finds it.
_kept_by: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[Attachment]] = weakref.WeakKeyDictionary()


def _put_in_place(bucket: Bucket, parameters: Mapping[str, nn.Parameter]) -> None:
    """Write the means to every .grad that is there."""
    for slot, mean in zip(bucket.slots, bucket.views(), strict=True):
        p = parameters[slot.name]
        if p.grad is not None and not p.grad.is_sparse:
            p.grad.copy_(shaped_like(p, mean))


def _nothing() -> None:
    """Return what is left of an attachment in a copy."""
