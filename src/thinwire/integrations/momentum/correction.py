"""Momentum correction: the memories apply momentum instead of the optimizer, and never both."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from typing_extensions import override

from thinwire.collectives import Group
from thinwire.errors import MomentumError
from thinwire.integrations.momentum import handover
from thinwire.integrations.momentum.handover import Handover, Holdings, Settings
from thinwire.integrations.training.gradients import local, shaped_like
from thinwire.integrations.training.optimizers import skipped_by_scaler, take_part
from thinwire.memories import Memory, MomentumCorrection

_log = logging.getLogger("thinwire")
_FIX = (
    "pass attach(..., optimizer=optimizer), which moves momentum out of it, or use a recipe without momentum correction"
)


def corrections(memories: Sequence[Memory]) -> list[MomentumCorrection]:
    """Return the memories that apply momentum."""
    return [part for memory in memories for part in memory.parts if isinstance(part, MomentumCorrection)]


@final
class Correction(Handover):
    """Hands SGD's momentum over to the memories of a recipe that corrects it, and back.

    SGD's buffer b ← m·b + g + λ·p is linear. The memories take g, which differs by rank. Weight decay λ·p, and what was
    there before, are the same on all ranks and stay in the optimizer's own buffer. The settings stay in its groups too,
    so schedules and its `state_dict` work as always; during a step they are set to zero.
    """

    def __init__(
        self, memories: Sequence[Memory], optimizers: Sequence[torch.optim.Optimizer], names: Mapping[nn.Parameter, str]
    ) -> None:
        self._every, self._memories = memories, corrections(memories)
        _check_memories(self._memories, memories, optimizers)
        self._names, self.active = names, bool(self._memories)
        self.corrects = self.active
        self._held = Holdings(optimizers if self._memories else (), names)
        self._own = next((memory.momentum for memory in self._memories if memory.momentum is not None), None)
        self._moved, self._said = 0.0, False
        if self._held:
            groups = [group for _, group in self._held.groups()]
            _check_holdings(self._held.missing(), groups, names)
            for optimizer, group in self._held.groups():
                _check_kind(optimizer, group)
            self._follow()
        if self.active:
            take_part(self)

    @override
    def check_returnable(self) -> None:
        if self.active and not self._held:
            raise RuntimeError(
                "the recipe applies momentum itself, and there is no optimizer to hand it to: attach with optimizer=, "
                "or drop the residuals with forget() and wrap the model again"
            )

    @override
    def prepare(self, loss_scale: float) -> None:
        self._held.check_mark()
        self._follow()

    def accept(self) -> None:
        """Accept the optimizer's state as it is: its momentum is in the memories, or is not wanted."""
        self._held.accept()
        self._held.unmark()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Set momentum and weight decay to 0 for this step. Raises MomentumError for another one with momentum."""
        if optimizer not in self._held:
            handover.refuse_second_momentum(optimizer, self._names if self.active else {}, _FIX)
            within = bool(self._held.overridden)  # a ZeroRedundancyOptimizer's step, which is ours, calls another's
            handover.refuse_another(optimizer, self._names if self.active and self._moved and not within else {})
            return
        if self._held.overridden:
            self.give_back()
        groups = [group for _, group in self._held.groups(optimizer)]
        found = [*map(self._set, groups)]
        if self._moved and not self._said and not {self._applied}.issuperset(found):
            self._said = True
            _log.warning(
                "the optimizer's (momentum, nesterov) have changed from %s to %s between backward and step: the "
                "old ones were applied to this step's gradients; the new ones apply from the next backward on. Set "
                "them, or step a scheduler, before backward or after the step",
                self._applied,
                found[0],
            )
        for group in groups:
            self._held.override_until_step(group, momentum=0.0, nesterov=False, weight_decay=0.0)

    @torch.no_grad()
    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Compute b ← m·b + λ·p and p ← p − η·b (or Nesterov's), with m what memories have applied in this step."""
        if optimizer not in self._held or skipped_by_scaler(optimizer):
            return
        momentum, nesterov = self._applied
        for group, kept in self._held.overridden:
            decay, rate = kept["weight_decay"], float(group["lr"])
            held = [p for p in group["params"] if p in self._names and p.grad is not None]
            if not momentum and decay and held:
                torch._foreach_mul_(held, 1 - rate * decay)
            if not decay:
                held = [p for p in held if optimizer.state.get(p, {}).get("momentum_buffer") is not None]
            if held and momentum:
                buffers = [handover.buffer_of(optimizer, p) for p in held]
                torch._foreach_mul_(buffers, momentum)
                torch._foreach_add_(buffers, held, alpha=decay)
                if nesterov:
                    torch._foreach_mul_(held, 1 - rate * decay)
                torch._foreach_add_(held, buffers, alpha=-rate * (momentum if nesterov else 1))

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Put momentum and weight decay back, and mark the optimizer's state: its momentum is in the memories."""
        if optimizer in self._held:
            self._held.give_back()
            if self._held.accepted or not self._held.settled():
                self._held.mark(self._names)

    def give_back(self) -> None:
        """Restore settings that are still overridden, because a step raised."""
        self._held.give_back()

    @override
    def end(self) -> None:
        self._held.end()
        self.active = self.corrects = False

    def settings(self) -> list[list[Any]]:
        """Return [momentum, nesterov] of each memory, for `restore`."""
        # float: a numpy.float64 would make a checkpoint that torch.load refuses
        return [[None if m.momentum is None else float(m.momentum), m.nesterov] for m in self._memories]

    @override
    def restore(self, settings: Sequence[Sequence[Any]]) -> None:
        self.accept()
        for memory, (momentum, nesterov) in zip(self._memories, settings, strict=True):
            if not self._moved:
                memory.adopt(momentum, nesterov=nesterov)
        for _, group in self._held.groups():
            if not group["momentum"] and self._own is None:
                group["momentum"], group["nesterov"] = settings[0]
        self._follow()

    def give_up(self, group: Group, loss_scale: float) -> None:
        """Give momentum back to the optimizer, and apply the residual, which has its momentum already, at once."""
        residuals = handover.summed(self._memories, "residual", self._names, group, loss_scale)
        for _, settings, p in self._held.parameters():
            shaped = shaped_like(p, residuals[p]).to(p.dtype)
            with torch.no_grad():
                local(p).add_(shaped, alpha=float(settings["lr"]) * (1 if settings["maximize"] else -1))
        velocities = handover.summed(self._memories, "velocity", self._names, group, loss_scale)
        self.accept()
        for optimizer, settings, p in self._held.parameters():
            velocity = shaped_like(p, velocities[p])
            local(handover.buffer_of(optimizer, p)).add_(velocity, alpha=-1 if settings["maximize"] else 1)
        for memory in self._every:
            memory.restore({})
        self.end()

    def _follow(self) -> None:
        found = {self._set(group) for _, group in self._held.groups()}
        if not (found or self._held):
            return
        if len(found) > 1:
            raise MomentumError(
                f"parameter groups have different (momentum, nesterov): {sorted(found)}; make them equal"
            )
        momentum, nesterov = found.pop() if found else (0.0, False)
        if momentum and self._own not in (None, momentum):
            raise MomentumError(
                f"the recipe has momentum {self._own} and the optimizer {momentum}: leave one of them out"
            )
        if self._moved and not momentum:
            raise MomentumError(
                f"the optimizer's momentum was changed from {self._moved} to 0: set it in its param_groups again. If "
                "an earlier version of thinwire saved this state, load the handle's state last, because it holds the "
                "momentum"
            )
        self._moved = momentum
        for memory in self._memories:
            if (memory.momentum, memory.nesterov) != (momentum, nesterov) and (momentum or memory.momentum is None):
                memory.adopt(momentum, nesterov=nesterov)

    @property
    def _applied(self) -> tuple[float, bool]:
        for memory in self._memories:
            return memory.momentum or 0.0, memory.nesterov
        return 0.0, False

    def _set(self, group: Settings) -> tuple[float, bool]:
        """Return the (momentum, nesterov) of a group, laid aside or not."""
        for other, kept in self._held.overridden:
            if other is group:
                return float(kept["momentum"]), bool(kept["nesterov"])
        return float(group["momentum"]), bool(group["nesterov"])


def _check_memories(
    correcting: Sequence[MomentumCorrection], memories: Sequence[Memory], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    if correcting and len(correcting) < len(memories):
        raise MomentumError(
            "parts of this recipe apply momentum correction and others do not: give all of them the same "
            "MomentumCorrection, as in recipes.dense(memory=memory)"
        )
    if not optimizers and any(memory.momentum is None for memory in correcting):
        raise MomentumError(f"this recipe applies momentum and was not given any: {_FIX}, or give the recipe momentum=")


def _check_holdings(missing: Sequence[str], groups: Sequence[Settings], names: Mapping[nn.Parameter, str]) -> None:
    if missing:
        raise MomentumError(
            f"the optimizer does not hold {', '.join(missing[:3])}{', …' * (len(missing) > 3)}, and momentum "
            "correction covers the whole model: pass the one that updates all of it, or a list of several"
        )
    for group in groups:
        if (group.get("momentum") or group.get("weight_decay")) and any(
            p.requires_grad and p not in names for p in group["params"]
        ):
            raise MomentumError(
                "a parameter group mixes parameters whose momentum can move into the memory with sparse embeddings, or "
                "with parameters that this model does not reduce: put those in a group of their own"
            )


def _check_kind(optimizer: torch.optim.Optimizer, group: Settings) -> None:
    own = getattr(optimizer, "optim", optimizer)  # that of a ZeroRedundancyOptimizer
    if "dampening" not in group or handover.from_elsewhere(own):
        raise MomentumError(
            f"momentum correction takes the place of torch.optim.SGD's momentum, and {type(own).__name__} has a "
            "different step: use SGD, or a class derived from it whose step calls super().step(), or a recipe without "
            "momentum correction such as recipes.topk"
        )
    if group["dampening"]:
        raise MomentumError("SGD's dampening cannot be moved into the memory; set dampening=0")
