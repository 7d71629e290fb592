"""What `attach` returns: the recipe at work on one model."""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn
from torch.futures import Future
from typing_extensions import override

from thinwire.collectives import Group, Staging, of_torch, used_here
from thinwire.errors import MomentumError, StateError
from thinwire.handle import Handle, MemoryUse
from thinwire.integrations.membership import state
from thinwire.integrations.membership.membership import Divisor, Membership
from thinwire.integrations.momentum.first_moments import ErrorFeedbackAdvice
from thinwire.integrations.momentum.handover import Handover
from thinwire.integrations.training.drift import differing
from thinwire.integrations.training.gradients import own_length, put_in_place, shape_in_memory
from thinwire.integrations.training.optimizers import Whole, observe, scaled_here, stop_observing
from thinwire.integrations.training.outcomes import Reduced, look, read
from thinwire.kernels.streams import follow_all
from thinwire.planner import Why
from thinwire.reducer import Bucket, Mean, Reducer, Released, Round, Segment, Segments
from thinwire.trace import Stats
from thinwire.waits import Verdict, on_host, refuse_unfit, unfit


@runtime_checkable
class LossScaler(Protocol):
    """What we need of a torch.amp.GradScaler."""

    def get_scale(self) -> float:
        """Return the factor on the loss."""


class Attached(Handle):
    """A handle whose `attachment` does the work: it has the steps, memories and figures."""

    _attachment: "Attachment"
    _averages = "DDP's hook, or reduce(), does that"  # once it is removed

    def __reduce__(self) -> tuple[Any, ...]:
        """Stay behind when the model is copied or saved, as DDP's own hook does."""
        return type(None), ()

    @property
    def attachment(self) -> "Attachment":
        """What reduces the gradients: of `attach`, this handle itself."""
        return self._attachment

    @property
    def group(self) -> Group:
        """The ranks that exchange gradients."""
        return self.attachment.membership.group

    @property
    def memory(self) -> MemoryUse:
        """Bytes that this rank holds between steps and needs during one. Copies of gradients count as staging."""
        waiting = sum(memory.nbytes for memory in self.attachment.recipe.memories())
        staging = self.attachment.staging
        return MemoryUse(waiting, staging.nbytes + self._copies, staging.needed)

    @property
    def _copies(self) -> int:
        """Bytes of the second copies of gradients. By default there are none."""
        return 0

    def stats(self) -> Stats:
        """Return the figures of the latest step and of all steps so far. Call it after the optimizer's step.

        It reads the residuals once. After the first call, each gradient is read once more per step. On a GPU it makes
        the host wait. Steps that DDP reduces without a hook are counted while "auto" watches them, and not otherwise.
        """
        attachment = self.attachment
        attachment.steps.close_if_done()
        return attachment.meter.stats(lambda: [x for m in attachment.recipe.memories() for x in m.waiting()])

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's memories and step, as tensors and plain containers. Save it on every rank.

        It leaves out gradients that no optimizer has taken yet.
        """
        return self.attachment.membership.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Resume from this rank's `state_dict`; a collective, so call it on every rank.

        Raises:
            ValueError: If any rank's state does not fit it or the other ranks' states, on every rank, and nothing has
                changed.
        """
        self.attachment.membership.load_state_dict(saved, self.check_state_dict)

    def check_state_dict(self, saved: Mapping[str, Any]) -> state.Standing:
        """Return what this rank would resume from `saved`, as `load_state_dict` takes it.

        Raises:
            ValueError: If `load_state_dict` would raise it, on this rank alone.
        """
        return self.attachment.membership.check_state_dict(saved)

    def differing_parameters(self) -> list[str]:
        """Return the names of parameters that differ between ranks in any bit. A collective: call it on every rank.

        Frozen ones too, and buffers that DDP broadcasts; but not those of batch normalisation, which differ from one
        forward pass to the next.
        """
        return differing(self.attachment.everything(), self.group)

    def forget(self) -> None:
        """Drop all residuals, including momentum in the memories. Call it on every rank."""
        attachment = self.attachment
        attachment.steps.settle_all(keep=False)
        for memory in attachment.recipe.memories():
            memory.restore({})
        attachment.membership.handover.accept()
        attachment.steps.fresh = True

    def keep_step(self) -> None:
        """Note that the current gradients have been applied.

        Call it only if neither a torch.optim optimizer nor an update in place applies them, for example where master
        weights are kept elsewhere.
        """
        steps, held = self.attachment.steps, self.attachment.parameters.items()
        there = steps.gradients.there  # a gradient may have been zeroed since it was applied
        steps.drop_idle({p for name, p in held if p.grad is not None or name in there})
        steps.settle_all(keep=True)

    def drop_step(self) -> None:
        """Note that the current gradients will not be applied. Zeroing them does the same."""
        self.attachment.steps.settle_all(keep=False)

    def remove(self) -> None:
        """Detach: from now on gradients are averaged uncompressed. A collective; call it between steps.

        If the recipe applies momentum, the optimizer gets it back. With momentum correction, the residual is applied at
        once. With other recipes, whatever the optimizer does not take back is sent with the next gradients.
        `recipes.orthogonal`'s residual cannot be sent that way: it is dropped, with a warning. DDP cannot drop a hook,
        so the hook stays and sums gradients as DDP would; the logger "thinwire" says so.

        Raises:
            RuntimeError: If the recipe corrects momentum and no optimizer can take it back.
        """
        self.attachment.membership.release(averages=self._averages)
        self.attachment._seen.clear()


@final
class Attachment(Attached):
    """What `attach` returns: it reduces the gradients of one model with a recipe, and keeps residuals between steps.

    A step ends when an optimizer takes the gradients. Several backward passes may accumulate into one step. Gradients
    that are thrown away leave every memory as it was.

    `parameters` maps names to the parameters whose gradients are reduced, and `names` is the reverse. `ended`: whether
    a later attachment took over. `exchanges`: whether gradients pass through thinwire; as long as nothing pays, DDP
    reduces them itself. `sharing` lists other attachments to some of these parameters.

    Args:
        recipe: Reduces the gradients.
        parameters: Those whose gradients are reduced, by name.
        groups: Those of the mesh, that which exchanges gradients first.
        handover: Moves momentum between the optimizers and the recipe's memories.
        divisor: Returns how many ranks a sum stands for.
        scaler: The loss scaler, if there is one.
        may_be_unused: Whether backward may leave parameters out.
        why: Returns why each tensor is sent as it is, unless you chose the recipe.
        everything: Returns the parameters that must match on all replicas, also frozen ones; by default `parameters`.
    """

    def __init__(
        self,
        recipe: Reducer,
        parameters: Mapping[str, nn.Parameter],
        groups: Sequence[Group],
        *,
        handover: Handover,
        divisor: Divisor,
        scaler: LossScaler | None,
        may_be_unused: bool,
        everything: Callable[[], Mapping[str, Tensor]] | None = None,
        why: Callable[[], Why] | None = None,
    ) -> None:
        self.parameters: Mapping[str, nn.Parameter] = dict(parameters)
        self.names: Mapping[nn.Parameter, str] = {p: name for name, p in parameters.items()}
        self.everything = everything or (lambda: self.parameters)
        held = self.everything().items()
        self.membership = Membership(
            recipe,
            self.parameters,
            groups,
            resting={n: p for n, p in held if isinstance(p, nn.Parameter) and p not in self.names},
            handover=handover,
            divisor=divisor,
        )
        self.steps, self.meter, self._why = self.membership.steps, self.membership.meter, why
        self._scaler, self._may_be_unused = scaler, may_be_unused
        self._gpus = {p.device for p in parameters.values() if p.is_cuda}
        self._watch = any(memory.stateful for memory in recipe.memories())
        self._round, self.staging = Round(step=0, group=groups[0], scale=1.0), Staging()
        self.ended = False
        self.sharing: weakref.WeakSet[Attachment] = weakref.WeakSet()
        self.exchanges = True
        self._whole: Whole | None = None
        self._said: set[str] = set()
        self._seen: dict[tuple[int, ...], Segments] = {}
        self.advice = ErrorFeedbackAdvice(recipe.memories(), groups[0].rank())
        observe(self)

    @property
    @override
    def attachment(self) -> "Attachment":
        return self

    @property
    def recipe(self) -> Reducer:
        """The current recipe; it changes after `remove`."""
        return self.membership.recipe

    @property
    def samples(self) -> int | None:
        """How many samples this rank's gradient stands for, if means are weighted by them; see `attach`. Can be set."""
        return self.membership.samples

    @samples.setter
    def samples(self, count: int) -> None:
        if self.membership.samples is None or count < 1:
            raise ValueError(f"samples is {count}; expected at least 1, and attach(..., samples=) on every rank")
        self.membership.samples = count

    @property
    def step(self) -> int:
        """Steps done so far, including skipped ones and those before a resumed checkpoint."""
        self.steps.rest()
        return self.steps.step

    @property
    def waits(self) -> bool:
        """Whether this rank holds a residual."""
        return self.membership.waits

    def reduce(self, flat: Tensor, parameters: list[nn.Parameter], *, joined: bool = False) -> "Future[Tensor]":
        """Start reducing a bucket of these parameters' gradients, one after another, each in its memory order.

        Args:
            flat: The bucket, which then holds the mean.
            parameters: Those whose gradients it holds, in order.
            joined: This rank has run out of data, and only takes part so that the others can go on.

        Returns:
            A future of `flat`, done once that is the mean.

        Raises:
            RuntimeError: If another attachment has taken over, and within the capture of a CUDA graph.
        """
        key, membership = (flat.numel(), *map(id, parameters)), self.membership  # which the attachment holds
        segments = self._seen[key] = self._seen.get(key) or self._segments(parameters, flat.numel())
        self._enter(segments.names, parameters, joined=joined)
        bucket = Bucket(flat=flat, segments=segments)
        gradients = self.steps.gradients
        means = gradients.take_out(bucket) if gradients.means else []
        self.meter.gradient(flat, membership.group.size(), self._round.scale)
        at = self._round if on_host(flat) else replace(self._round, watch=False, verdict=Verdict())
        return self._finishing(membership.recipe.reduce(bucket, at), bucket, means, at.verdict)

    def _segments(self, parameters: Sequence[nn.Parameter], numel: int) -> Segments:
        """Return the segments of a bucket of these, or raise RuntimeError if they do not fill its `numel` elements."""
        names = [self.names[p] for p in parameters]
        ends = list(accumulate(own_length(p) for p in parameters))
        if (ends or [0])[-1] != numel:
            raise RuntimeError(
                f"the bucket has {numel} elements; expected {(ends or [0])[-1]}, its gradients one after another"
            )
        return Segments(
            Segment(name=name, offset=end - own_length(p), length=own_length(p), shape=shape_in_memory(p))
            for name, p, end in zip(names, parameters, ends, strict=True)
        )

    def reduce_sparse(
        self, gradient: Tensor, parameters: list[nn.Parameter], *, joined: bool = False
    ) -> "Future[Tensor]":
        """Start reducing the sparse gradient of an nn.Embedding(sparse=True).

        Args:
            gradient: A COO tensor.
            parameters: The parameter, as the only one.
            joined: As in `reduce`.

        Returns:
            A future of the mean, sparse too.
        """
        (name,) = names = [self.names[p] for p in parameters]
        self._enter(names, parameters, joined=joined)
        future = self.recipe.reduce_rows(gradient, name, self._round)
        _, note = self.steps.started([name])

        def finish(done: "Future[Tensor]") -> Tensor:
            mean = done.value()  # raises what the reducer raised
            finite = bool(mean.coalesce().values().isfinite().all())
            note(Reduced() if finite else Reduced(frozenset([name])))
            return mean

        return of_torch(future.then(finish))

    def serve(self, model: nn.Module) -> None:
        """Watch for parameters that join this model later, and for states that are loaded into it."""
        self._whole = Whole(model, self.parameters.values(), self.check_loaded)
        if not self.steps.fresh:  # an earlier attachment had found a state loaded
            self._whole.doubt()

    def check_loaded(self) -> None:
        """Check that the residual was loaded if the model or its optimizer was.

        Raises:
            StateError: If it was not.
        """
        if self.outdated:
            raise StateError(
                "a state was loaded into this model or its optimizer, but the residuals were not loaded with it: on "
                "every rank, load the handle's state of the same step with load_state_dict, or drop the residuals with "
                "forget(). If they still fit, keep them: handle.load_state_dict(handle.state_dict())"
            )
        if self._whole is not None:
            self._whole.accept()

    @property
    def outdated(self) -> bool:
        """Whether a state was loaded into the model or its optimizer, and the residual is not of that state."""
        return self._whole is not None and self._whole.loaded and not self.steps.fresh and self.waits

    def about_to_take(self, optimizer: torch.optim.Optimizer) -> None:
        """Check gradients before an optimizer takes them, and warn about those that were never reduced.

        Raises:
            MomentumError: Instead of the warning, if the memory holds their momentum. Also if the recipe applies
                momentum, and a gradient was added to after it was reduced.
            RuntimeError: Within the capture of a CUDA graph, and in inference mode.
        """
        if unfit() and self.exchanges and self.steps.owned_by(optimizer):
            refuse_unfit(f"{type(optimizer).__name__} steps")
        self.steps.send(optimizer)
        if self.membership.handover.corrects:
            self._refuse_added(optimizer)
        if not self.exchanges:
            return
        if unreduced := self.steps.unreduced(optimizer):
            idle = [] if self._may_be_unused else [name for name, p in self.parameters.items() if p.grad is None]
            self._object(_UNREDUCED, _first(unreduced), _UNUSED.format(_first(idle)) if idle else "")
        if self._whole is not None and (late := self._whole.late(optimizer)):
            self._object(_LATE, _first(late))
        if self.membership.handover.active and self.steps.takes_again(optimizer):
            self._warn(_AGAIN, type(optimizer).__name__)
        if self._watch and not self.steps.step % _LOOKS_EVERY:
            self._look_for_scaling(optimizer)

    def _look_for_scaling(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn of a GradScaler that we were not given, and of clipping that comes too late."""
        if self._scaler is None and self.steps.owned_by(optimizer) and scaled_here():
            self._warn(_SCALED, type(optimizer).__name__)
        parts = (part for memory in self.recipe.memories() for part in memory.parts)
        late = any(getattr(part, "clip_norm", 0) is None and getattr(part, "momentum", None) != 0 for part in parts)
        if late and (changed := self.steps.changed(optimizer)):
            self._warn(_CHANGED, _first(changed))

    def _object(self, text: str, *told: str) -> None:
        """Warn of what becomes of these parameters, or raise MomentumError where momentum has moved."""
        if self.membership.handover.active:
            raise MomentumError(text.format(*told) + ". The recipe holds their momentum, which would not be applied")
        self._warn(text, *told)

    def _warn(self, text: str, *what: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text.format(*what), stacklevel=2)

    def taken(self, optimizer: torch.optim.Optimizer, *, evaluated: bool = False) -> None:
        """Keep what was staged for an optimizer's gradients.

        An optimizer may call its closure several times; the gradients of every call count as taken.

        Args:
            optimizer: The one that has stepped.
            evaluated: Whether the step, or a hook after it, goes on.

        Raises:
            RuntimeError: For LBFGS, if there is a residual.
        """
        if evaluated and self.membership.handover.corrects:
            self._refuse_added(optimizer)
        if evaluated and isinstance(optimizer, torch.optim.LBFGS):
            self._take_exactly(optimizer)
        elif self.steps.stepped(optimizer) and not evaluated:
            _kept_by.setdefault(optimizer, set()).add(self)
            if self._whole is not None and optimizer not in self._whole.optimizers:
                self._whole.follow(optimizer)
            if self.advice.feedback and optimizer not in self.advice.met:
                self.advice.stepped(optimizer)

    def _refuse_added(self, optimizer: torch.optim.Optimizer) -> None:
        if added := self.steps.added_to_means(optimizer):
            raise MomentumError(
                f"a second backward pass has added to the gradient of {added[0]!r} after it was reduced, and the "
                "recipe, which applies momentum, does not see that part: add the term to the loss, or call its "
                "backward before the model's"
            )

    def _take_exactly(self, optimizer: torch.optim.Optimizer) -> None:
        waited, owned = self.waits, self.steps.stepped(optimizer)
        self.steps.close_if_done()
        if not owned or not self.waits:
            return
        if not waited:
            self.forget()
        raise RuntimeError(
            "LBFGS compares gradients of several evaluations, and this recipe sends a part of each later: use "
            "recipes.dense(), or an optimizer that takes one gradient a step"
        )

    def why(self) -> Why:
        """Return why each tensor is sent as it is, if a plan or "auto" chose it; `print` shows it as a table.

        Raises:
            RuntimeError: If you chose the recipe yourself, or if nothing has been chosen yet.
        """
        if self._why is None:
            raise RuntimeError('you chose the recipe yourself; why() explains the choice of a plan or of "auto"')
        if isinstance(self.recipe, Released):
            return Why("uncompressed since remove()", {})
        return self._why()

    def end(self) -> None:
        """Free all memory, and stop following gradients."""
        self.ended = True
        self._seen.clear()
        stop_observing(self)
        if self._whole is not None:
            self._whole.end()
        self.membership.handover.end()
        self.steps.stop_following()
        for memory in self.recipe.memories():
            memory.restore({})
        for attachments in _kept_by.values():
            attachments.discard(self)

    def _enter(self, names: Sequence[str], parameters: Sequence[nn.Parameter], *, joined: bool) -> None:
        refuse_unfit("gradients are reduced")
        if self.ended:
            raise RuntimeError(
                "another attachment to these parameters has taken over; train the model that it was attached to"
            )
        for other in self.sharing:
            other._refuse_again(self, parameters)
        if not self.steps.enter(names, joined=joined):
            return
        if self._whole is not None and self._whole.before is not None:
            self.check_loaded()
        steps, membership = self.steps, self.membership
        steps.fresh = False
        if not membership.agreed:
            membership.agree()
        for gpu in self._gpus:  # a reduction that was called off may still be under way
            follow_all(gpu)
        if (loss_scale := 1.0 if self._scaler is None else self._scaler.get_scale()) != membership.loss_scale:
            membership.follow_loss_scale(loss_scale)
        divisor = membership.divisor(joined, steps)
        scale = 1 / divisor if membership.samples is None else membership.weight(joined=joined)
        self.meter.begin(steps.step)
        self._round = Round(
            step=steps.step,
            draw=steps.draw,
            group=membership.group,
            scale=scale,
            watch=self._watch,
            listeners=(self.meter,),
            staging=self.staging,
        )
        self.staging.turn()
        membership.recipe.begin(self._round)
        if membership.handover.active:
            membership.handover.prepare(membership.loss_scale)

    def _refuse_again(self, other: "Attachment", parameters: Sequence[nn.Parameter]) -> None:
        """Raise RuntimeError if another attachment that keeps something reduces what was reduced here already."""
        again = [self.names[p] for p in parameters if p in self.names and self.steps.has_reduced(self.names[p])]
        if again and not self.ended and (self._watch or other._watch):
            raise RuntimeError(
                f"the gradient of {again[0]!r}, which two attached models share, goes through both of their recipes in "
                "one backward: call backward for each model's loss, or wrap both models in one DistributedDataParallel"
            )

    def _finishing(
        self,
        future: "Future[Mean]",
        bucket: Bucket,
        means: Sequence[tuple[Tensor, Tensor]],
        verdict: Verdict | None,
    ) -> "Future[Tensor]":
        """Return the future of the mean. Keep only its outcome: a future held at exit can end the process.

        Its callback does not hold this object: the collective's thread frees it later than whoever waits goes on.
        """
        names, parameters, watch, gradients = bucket.segments.names, self.parameters, self._watch, self.steps.gradients
        questions, note = self.steps.started(names)
        # If no rank used a parameter, DDP leaves its .grad as it is, and an optimizer would take that.
        idle = self._may_be_unused and not gradients.added.issuperset(names)

        def finish(done: "Future[Mean]") -> Tensor:
            finite = done.value().finite  # raises what the reducer raised
            for gradient, mean in means:
                used_here(mean)
                gradient.add_(mean)
            if idle:
                put_in_place(bucket, parameters)
            gradients.arrived(bucket, idle=idle)
            if verdict is None:
                note(read(bucket, parameters, questions, finite=finite) if any(questions) or not finite else Reduced())
            else:  # the host must not wait here: the step's end does
                note(look(bucket, parameters, questions, verdict, watch=watch))
            return bucket.flat

        return of_torch(future.then(finish))


def _first(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + f" and {len(names) - 3} more" * (len(names) > 3)


# The residual lives as long as its optimizer. If the model is wrapped anew, it is still there.
_kept_by: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[Attachment]] = weakref.WeakKeyDictionary()


_UNREDUCED = (
    "an optimizer applies gradients of {} that were never reduced, so ranks drift apart: call the wrapped model "
    "itself, not its .module or a replaced forward; leave no_sync() before a step's last backward; step after "
    "backward, not within it; and call reduce() if the handle has that{}"
)
_UNUSED = "; and if DDP waits for {}, which got no gradient, wrap the module in DDP with find_unused_parameters=True"
_LATE = (
    "an optimizer applies gradients of {}, which were unfrozen or added after the model was wrapped. Nothing reduces "
    "them, so ranks drift apart: wrap the model again and attach"
)
_SCALED = (
    "a GradScaler has {} step, and thinwire was not given it, so each change of its scale makes the residual too large "
    "or too small: pass it, as in attach(..., scaler=scaler)"
)
_CHANGED = (
    "the gradients of {} were written to between backward and the optimizer's step, as clipping does. With this recipe "
    "they contain momentum by then: to clip each worker's own gradient instead, set the recipe's clip_norm=. Clipping "
    "to infinity, as for a log of norms, does no harm"
)
_LOOKS_EVERY = 16  # steps from one look for these two to the next
_AGAIN = (
    "{} steps twice on one gradient, as where optimizer.step() follows scaler.step(optimizer). The recipe applies "
    "momentum once per backward: leave out one of the two"
)
