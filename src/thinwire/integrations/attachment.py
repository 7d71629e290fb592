"""What `attach` returns: the recipe at work on one model."""

from collections.abc import Mapping
from typing import Any, Protocol, final

from torch import Tensor, nn
from torch.futures import Future

from thinwire.exchanges.compat import Group
from thinwire.integrations import replicas, state
from thinwire.reducer import Bucket, Reducer, Round, Slot


class LossScaler(Protocol):
    """What is asked of a torch.amp.GradScaler."""

    def get_scale(self) -> float:
        """Return the factor on the loss."""


@final
class Attachment:
    """Counts steps, keeps the memories of a step that is whole and finite, and drops those of one that is not.

    A step is whole when every parameter has been reduced; the first bucket that repeats a parameter begins the next.
    """

    def __init__(
        self,
        recipe: Reducer,
        parameters: Mapping[str, nn.Parameter],
        group: Group,
        *,
        decay: Mapping[str, float],
        scaler: LossScaler | None,
        may_be_unused: bool,
    ) -> None:
        self.recipe = recipe
        self._parameters = dict(parameters)
        self._names = {p: name for name, p in parameters.items()}
        self._group, self._decay, self._scaler, self._may_be_unused = group, dict(decay), scaler, may_be_unused
        self._watch = any(memory.stateful for memory in recipe.memories())
        self._loss_scale = 1.0  # of what waits, momentum from the optimizer at first
        self._step = 0
        self._seen: set[str] = set()
        self._started = 0
        self._outcomes: list[bool] = []

    @property
    def step(self) -> int:
        """Steps done since attaching, those before a resumed checkpoint and those called off included."""
        self._settle_if_done()
        return self._step

    @property
    def memory_bytes(self) -> int:
        """Bytes this rank holds between steps."""
        return sum(memory.nbytes for memory in self.recipe.memories())

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters whose gradients are reduced, by name."""
        return self._parameters

    def reduce(self, flat: Tensor, parameters: list[nn.Parameter], gradients: list[Tensor]) -> "Future[Tensor]":
        """Start reducing a bucket of which `gradients` are views; the future holds `flat` when it is the mean."""
        names = self._enter(parameters)
        origin = flat.storage_offset()
        slots = tuple(
            Slot(name=name, offset=int(g.storage_offset() - origin), length=g.numel(), shape=tuple(g.shape))
            for name, g in zip(names, gradients, strict=True)
        )
        bucket = Bucket(flat=flat, slots=slots)
        idle = self._idle(bucket)
        self._add_decay(names, gradients, idle)
        future = self.recipe.reduce(bucket, self._round(idle))
        return self._note(future, flat)

    def reduce_sparse(self, gradient: Tensor, parameters: list[nn.Parameter]) -> "Future[Tensor]":
        """Start reducing the sparse gradient of an nn.Embedding(sparse=True)."""
        (name,) = self._enter(parameters)
        self._started += 1
        outcomes = self._outcomes

        def finish(done: "Future[Tensor]") -> Tensor:
            mean = done.value()  # raises what the reducer raised
            outcomes.append(bool(mean.coalesce().values().isfinite().all()))
            return mean

        return self.recipe.reduce_rows(gradient, name, self._round(frozenset())).then(finish)

    def count_plain_step(self) -> None:
        """Note that DDP has reduced a step by itself."""
        self._step += 1

    def verify_replicas(self) -> bool:
        """Return whether every parameter is bit-identical on all ranks. A collective: call it on every rank."""
        return not self.differing_parameters()

    def differing_parameters(self) -> list[str]:
        """Return the names of parameters that differ between ranks. A collective: call it on every rank."""
        return replicas.differing(self._parameters, self._group)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's memories and step: tensors and plain containers. Each rank has its own; save them all."""
        self._settle_if_done()
        return state.dump(self._step, self._loss_scale, self.recipe.memories(), self._decay)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Resume from this rank's `state_dict`. Raises ValueError, changing nothing, where it does not fit."""
        state.check(saved, self.recipe.memories(), self._parameters)
        self._settle()
        self._follow_loss_scale(float(saved["loss_scale"]))
        state.load(saved, self.recipe.memories(), self._parameters)
        self._step, self._decay = int(saved["step"]), dict(saved["weight_decay"])

    def _round(self, idle: frozenset[str]) -> Round:
        group = self._group
        return Round(step=self._step, group=group, scale=1 / group.size(), idle=idle, watch=self._watch)

    def _enter(self, parameters: list[nn.Parameter]) -> list[str]:
        """Note that these parameters are being reduced, and return their names."""
        names = [self._names[p] for p in parameters]
        if not self._seen.isdisjoint(names):
            self._settle()
        if not self._seen:
            self._follow_loss_scale(1.0 if self._scaler is None else self._scaler.get_scale())
        self._seen.update(names)
        return names

    def _note(self, future: "Future[bool]", result: Tensor) -> "Future[Tensor]":
        """Remember what the future says, but not the future: what holds it at exit can end the process."""
        self._started += 1
        outcomes = self._outcomes

        def finish(done: "Future[bool]") -> Tensor:
            outcomes.append(done.value())  # raises what the reducer raised
            return result

        return future.then(finish)

    def _settle_if_done(self) -> None:
        """End the step in hand if all of it is there; of one in flight, the memories hold nothing yet."""
        if self._seen == self._parameters.keys() and len(self._outcomes) == self._started:
            self._settle()

    def _settle(self) -> None:
        """End the step in hand, if any: keep its memories if it is whole and finite, else drop them."""
        if not self._seen:
            return
        whole = self._seen == self._parameters.keys()
        keep = whole and len(self._outcomes) == self._started and all(self._outcomes)
        for memory in self.recipe.memories():
            (memory.commit if keep else memory.rollback)()
        self._step += whole
        self._seen.clear()
        self._started, self._outcomes = 0, []

    def _follow_loss_scale(self, scale: float) -> None:
        if scale != self._loss_scale:
            for memory in self.recipe.memories():
                memory.rescale(scale / self._loss_scale)
            self._loss_scale = scale

    def _idle(self, bucket: Bucket) -> frozenset[str]:
        """Return the parameters without a gradient: DDP hands out zeros, and drops the result if all ranks had none."""
        if not self._may_be_unused:
            return frozenset()
        views = zip(bucket.slots, bucket.views(), strict=True)
        return frozenset(slot.name for slot, g in views if not bool(g[:1024].any()) and not bool(g.any()))

    def _add_decay(self, names: list[str], gradients: list[Tensor], idle: frozenset[str]) -> None:
        for name, gradient in zip(names, gradients, strict=True):
            if name in self._decay and name not in idle:
                gradient.add_(self._parameters[name].detach(), alpha=self._decay[name] * self._loss_scale)
