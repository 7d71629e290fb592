"""Moving momentum from the optimizer into the memory, and seeing to it that it is not applied twice."""

import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from thinwire.errors import MomentumError
from thinwire.integrations.gradients import shaped_like
from thinwire.integrations.optimizers import skipped_by_scaler
from thinwire.memories import Memory, MomentumCorrection

Group = dict[str, Any]

_MARK = "momentum_in_memory"
_FIX = (
    "pass attach(..., optimizer=optimizer), which moves momentum out of it, or use a recipe without momentum correction"
)


def corrections(memories: Sequence[Memory]) -> list[MomentumCorrection]:
    """Return the memories that apply momentum."""
    return [part for memory in memories for part in memory.parts if isinstance(part, MomentumCorrection)]


@final
class Handover:
    """Applies SGD's momentum to gradients in the memories, in SGD's stead.

    SGD's buffer b ← m·b + g + λ·p is linear. The memories take g, which differs by rank. What all ranks have alike
    stays with the optimizer, in its own buffer: weight decay λ·p, and what was there before. So settings stay in the
    optimizer's groups, and schedules and its `state_dict` work as ever; they are laid aside while it steps.
    """

    def __init__(
        self,
        memories: Sequence[Memory],
        optimizers: Sequence[torch.optim.Optimizer],
        names: Mapping[nn.Parameter, str],
    ) -> None:
        self._memories = corrections(memories)
        _check_memories(self._memories, memories, optimizers)
        self._names = names
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet(optimizers if self._memories else ())
        self._lent: list[tuple[Group, Group]] = []
        self._own = next((memory.momentum for memory in self._memories if memory.momentum is not None), None)
        self._moved = 0.0
        self._token, self._accepts = uuid.uuid4().hex, False
        for optimizer in self._optimizers:
            optimizer.register_state_dict_pre_hook(partial(_give_back_first, weakref.ref(self)))
        if self._optimizers:
            _check_holdings(list(self._groups()), names)
            _check_kind(self._groups())
            self.follow()

    @property
    def active(self) -> bool:
        """Whether memories apply momentum."""
        return bool(self._memories)

    def check_returnable(self) -> None:
        """Raise RuntimeError where memories apply momentum and no optimizer is known that could go on with it."""
        if self._memories and not self._optimizers:
            raise RuntimeError(
                "the recipe applies a momentum of its own, and no optimizer is there to take it back: attach with "
                "optimizer=, or drop what waits with forget() and wrap the model anew"
            )

    def follow(self) -> None:
        """Take on the momentum that the optimizer is set to now.

        Raises MomentumError where it cannot be applied in its stead, or where what the memories held is missing.
        """
        if not self._optimizers:
            return
        momentum, nesterov = _one_setting([self._set(group) for group in self._groups()])
        if momentum and self._own not in (None, momentum):
            raise MomentumError(
                f"the recipe has momentum {self._own} and the optimizer {momentum}: leave one of them out"
            )
        if self._moved and not momentum:
            raise MomentumError(
                f"the optimizer's momentum has become 0, and was {self._moved}: set it again in its param_groups; a "
                "state that an earlier version of thinwire saved has it in the attachment's state: load that last"
            )
        self._moved = momentum
        for memory in self._memories:
            if momentum or memory.momentum is None:
                memory.adopt(momentum, nesterov=nesterov)

    def check_paid(self) -> None:
        """Raise MomentumError where the optimizer's state was saved beside memories that nobody has loaded."""
        if not self._accepts and any(group.get(_MARK, self._token) != self._token for group in self._groups()):
            raise MomentumError(
                "when this optimizer's state was saved, its momentum was in the memory of an attachment: load that "
                "attachment's state too, with load_state_dict, or go on without what it held: attachment.forget()"
            )

    def paid(self) -> None:
        """Note that what belongs to the optimizer's state is here, or is not wanted."""
        self._accepts = True
        for group in self._groups():
            group.pop(_MARK, None)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Lay aside momentum and weight decay. Raises MomentumError for another optimizer that has some."""
        if optimizer not in self._optimizers:
            _refuse_second_momentum(optimizer, self._names if self._memories else {})
            return
        self.give_back()
        for group in self._groups(optimizer):
            kept = {key: group[key] for key in ("momentum", "nesterov", "weight_decay")}
            self._lent.append((group, kept))
            group.update(momentum=0.0, nesterov=False, weight_decay=0.0)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Put momentum and weight decay back in their place."""
        if optimizer in self._optimizers:
            self.give_back()
            for group in self._groups(optimizer):
                group[_MARK] = self._token
            self._accepts = False

    def give_back(self) -> None:
        """Put back what is laid aside, also after a step that raised."""
        while self._lent:
            group, kept = self._lent.pop()
            group.update(kept)

    def end(self) -> None:
        """Leave the optimizer alone from now on."""
        self.give_back()
        self._optimizers, self._memories = weakref.WeakSet(), []

    def settings(self) -> list[list[Any]]:
        """Return [momentum, nesterov] of each memory."""
        return [[memory.momentum, memory.nesterov] for memory in self._memories]

    def restore(self, settings: Sequence[Sequence[Any]], decay: Mapping[str, float]) -> None:
        """Take over settings as `settings` gave them, and weight decay as version 1 moved it, by parameter."""
        self.paid()
        for memory, (momentum, nesterov) in zip(self._memories, settings, strict=True):
            if not self._moved:
                memory.adopt(momentum, nesterov=nesterov)
        for group in self._groups():
            saved = {abs(decay[self._names[p]]) for p in group["params"] if self._names.get(p) in decay}
            if saved and not group["weight_decay"]:
                group["weight_decay"] = saved.pop()
            if not group["momentum"] and self._own is None:
                group["momentum"], group["nesterov"] = settings[0]
        self.follow()

    def take_back(self, velocities: Mapping[str, Tensor]) -> None:
        """Add all ranks' velocities, flat, to the optimizer's own buffers: from now on it applies momentum alone."""
        self.paid()
        for optimizer, group, p in self._parameters():
            velocity = velocities.get(self._names[p])
            if velocity is not None:
                _buffer(optimizer, p).add_(shaped_like(p, velocity), alpha=-1 if group["maximize"] else 1)
        self.end()

    def apply_once(self, waiting: Mapping[str, Tensor]) -> None:
        """Apply what waits on all ranks, flat: it has its momentum already."""
        for _, group, p in self._parameters():
            if self._names[p] in waiting:
                shaped = shaped_like(p, waiting[self._names[p]]).to(p.dtype)
                with torch.no_grad():
                    p.add_(shaped, alpha=float(group["lr"]) * (1 if group["maximize"] else -1))

    def _parameters(self) -> Iterator[tuple[torch.optim.Optimizer, Group, nn.Parameter]]:
        for optimizer in self._optimizers:
            for group in self._groups(optimizer):
                yield from ((optimizer, group, p) for p in group["params"] if p in self._names)

    def _groups(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[Group]:
        """Return the groups that hold any of these parameters."""
        for each in self._optimizers if optimizer is None else [optimizer]:
            yield from (group for group in each.param_groups if any(p in self._names for p in group["params"]))

    def _set(self, group: Group) -> tuple[float, bool]:
        """Return a group's (momentum, nesterov), be they laid aside."""
        kept = next((kept for lent, kept in self._lent if lent is group), group)
        return float(kept["momentum"]), bool(kept["nesterov"])

    @torch.no_grad()
    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Compute b ← m·b + λ·p and p ← p − η·b, or p − η·(λ·p + m·b) with Nesterov's momentum."""
        if optimizer not in self._optimizers or skipped_by_scaler(optimizer):
            return
        for group, kept in self._lent:
            momentum, decay, rate = kept["momentum"] or self._own or 0.0, kept["weight_decay"], float(group["lr"])
            held = [p for p in group["params"] if p in self._names and p.grad is not None]
            if not momentum and decay and held:
                torch._foreach_mul_(held, 1 - rate * decay)
            held = [p for p in held if momentum and (decay or _has_buffer(optimizer, p))]
            if held:
                buffers = [_buffer(optimizer, p) for p in held]
                torch._foreach_mul_(buffers, momentum)
                torch._foreach_add_(buffers, held, alpha=decay)
                if kept["nesterov"]:
                    torch._foreach_mul_(held, 1 - rate * decay)
                torch._foreach_add_(held, buffers, alpha=-rate * (momentum if kept["nesterov"] else 1))


def _give_back_first(handover: "weakref.ref[Handover]", optimizer: torch.optim.Optimizer) -> None:
    me = handover()
    if me is not None:
        me.give_back()


def _has_buffer(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> bool:
    return optimizer.state.get(p, {}).get("momentum_buffer") is not None


def _buffer(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> Tensor:
    if not _has_buffer(optimizer, p):
        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
    buffer: Tensor = optimizer.state[p]["momentum_buffer"]
    return buffer


def _check_memories(
    correcting: Sequence[MomentumCorrection], memories: Sequence[Memory], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    if correcting and len(correcting) < len(memories):
        raise MomentumError(
            "parts of this recipe correct momentum and others would go without: give all of them the same "
            "MomentumCorrection, as in recipes.dense(memory=memory)"
        )
    if not optimizers and any(memory.momentum is None for memory in correcting):
        raise MomentumError(f"this recipe corrects momentum but knows none: {_FIX}, or give the recipe momentum=")


def _check_holdings(groups: list[Group], names: Mapping[nn.Parameter, str]) -> None:
    held = {p for group in groups for p in group["params"]}
    if missing := [name for p, name in names.items() if p not in held]:
        raise MomentumError(
            f"the optimizer does not hold {', '.join(missing[:3])}{', …' * (len(missing) > 3)}, and momentum "
            "correction covers the whole model: pass the one that updates all of it, or a list of several"
        )
    for group in groups:
        if (group.get("momentum") or group.get("weight_decay")) and any(
            p.requires_grad and p not in names for p in group["params"]
        ):
            raise MomentumError(
                "a parameter group mixes what can be moved with what cannot, sparse embeddings or parameters that this "
                "model does not reduce: put those in a group of their own"
            )


def _check_kind(groups: Iterator[Group]) -> None:
    for group in groups:
        if "dampening" not in group:
            raise MomentumError(
                "momentum correction takes the place of SGD's momentum, and this is another optimizer: use "
                "torch.optim.SGD, or a recipe without momentum correction such as recipes.topk"
            )
        if group["dampening"]:
            raise MomentumError("SGD's dampening cannot be moved into the memory; set dampening=0")


def _one_setting(found: Sequence[tuple[float, bool]]) -> tuple[float, bool]:
    if len(set(found)) > 1:
        raise MomentumError(
            f"parameter groups have different (momentum, nesterov): {sorted(set(found))}; make them equal"
        )
    return found[0] if found else (0.0, False)


def _refuse_second_momentum(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    for group in optimizer.param_groups if names else ():
        if (group.get("momentum") or any(group.get("betas", ())[:1])) and any(p in names for p in group["params"]):
            raise MomentumError(f"{type(optimizer).__name__} applies momentum a second time: {_FIX}")
