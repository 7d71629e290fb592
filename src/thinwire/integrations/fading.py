"""Fading momentum: the memories apply an optimizer's first moment instead of the optimizer, and never both."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from thinwire.collectives import Group
from thinwire.errors import MomentumError
from thinwire.integrations.gradients import in_memory_order, local, shaped_like
from thinwire.integrations.handover import (
    Handover,
    Holdings,
    Settings,
    first_moment_of,
    marked,
    refuse_second_momentum,
    summed,
)
from thinwire.integrations.optimizers import take_part
from thinwire.memories import FadingMomentum, Memory
from thinwire.reducer import Reducer, Segment

_FIX = "pass attach(..., optimizer=optimizer), which moves momentum out of it, or set its momentum to 0"


@dataclass(frozen=True, kw_only=True)
class FirstMoment:
    """Where an optimizer has the momentum of its gradients.

    `setting` is its decay β in a group, and `buffer` its tensor in the state: Σ βᵏ·g, times 1 − β if `averaged`.
    `alone`: whether the optimizer works on if the buffer is there and the rest of the state is not.
    """

    setting: str
    buffer: str
    averaged: bool
    alone: bool

    def without(self, group: Settings) -> dict[str, Any]:
        """Return the group's setting with β = 0."""
        value = group[self.setting]
        return {self.setting: (value[0] * 0, *value[1:]) if self.setting == "betas" else 0.0}

    def unit(self, group: Settings) -> float:
        """Return what one gradient adds to the buffer: 1 or 1 − β, negative where the optimizer maximizes."""
        sign = -1.0 if group.get("maximize") else 1.0
        return sign * (1 - first_moment_of(group)) if self.averaged else sign


_ADAM = FirstMoment(setting="betas", buffer="exp_avg", averaged=True, alone=False)
_KINDS = {
    torch.optim.Adam: _ADAM,  # and AdamW, which derives from it
    torch.optim.RAdam: _ADAM,
    torch.optim.Adamax: _ADAM,
    torch.optim.Muon: FirstMoment(setting="momentum", buffer="momentum_buffer", averaged=True, alone=True),
    torch.optim.SGD: FirstMoment(setting="momentum", buffer="momentum_buffer", averaged=False, alone=True),
}
"""The optimizers whose first moment is linear in the gradients, so that it can be applied to them beforehand.

RMSprop's momentum is of what it has divided by the second moment. NAdam keeps a product of its momenta, which zeros
would end. Without momentum they work, as do optimizers that have none, such as Adafactor.
"""


def fading(memories: Iterable[Memory]) -> list[FadingMomentum]:
    """Return the memories that are momentum and fade."""
    return [part for memory in memories for part in memory.parts if isinstance(part, FadingMomentum)]


@final
class Fading(Handover):
    """Hands the first moment of Adam, AdamW, RAdam, Adamax, Muon and SGD over to fading memories, and back.

    With K ranks, rank i's memory takes its share M_i ← M_i + b / K of a buffer b = Σ βᵏ·g, and b becomes 0. From then
    on the optimizer has β = 0 whenever it steps, and otherwise its own settings, so schedules and `state_dict` work as
    always. AdamW then does, with d = Σ what the ranks delivered, λ its weight decay and t the steps it has counted:

        p ← p − η·λ·p,   v ← β₂·v + (1 − β₂)·d²,   p ← p − η·d / (√(v / (1 − β₂ᵗ)) + ε)

    If everything is delivered, d = β·Σ M_i + ḡ in the first step and d = ḡ, the mean gradient, in later ones. SGD does
    p ← p − η·(d + λ·p) and Muon orthogonalises d; neither looks ahead as Nesterov's momentum does. In `maximize`, M has
    the gradient's sign.

    Parameters whose memory is another, such as small ones, keep their momentum, even in the same group. Groups whose
    buffers have been moved are marked. Where there is no mark, at first or after a dense checkpoint has been loaded,
    they are moved before the next reduction.
    """

    def __init__(
        self,
        recipe: Reducer,
        optimizers: Sequence[torch.optim.Optimizer],
        names: Mapping[nn.Parameter, str],
        ranks: int,
    ) -> None:
        self._memory = {p: memory for p, name in names.items() if (memory := _memory_of(recipe, p, name))}
        self._memories = fading(recipe.memories())
        self._names = {p: names[p] for p in self._memory}
        self._ranks, self._loss_scale, self.active = ranks, 1.0, bool(self._memory)
        self._held = Holdings(optimizers if self.active else (), self._names)
        self._follow()
        if self.active:
            take_part(self)

    def prepare(self, loss_scale: float) -> None:
        """Get ready for a reduction: adopt the decays that the optimizers have now, and move dense momentum."""
        self._held.check_mark()
        self._loss_scale = loss_scale
        if not self._held.laid_aside:  # in a closure, `before_step` has done it
            self._take_over()

    def accept(self) -> None:
        """Accept the optimizers' state as it is. What it does not say is in memories is still to be moved."""
        self._held.accept()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Lay momentum aside. Raises MomentumError for another optimizer that has momentum."""
        if optimizer not in self._held:
            return refuse_second_momentum(optimizer, self._memory, _FIX)
        self.give_back()
        self._take_over()
        if kind := _kind(optimizer):
            for _, group in list(self._held.groups(optimizer)):
                ours = {p: None for p in group["params"] if p in self._memory}
                self._held.lay_aside_for(optimizer, group, ours, **kind.without(group))

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: the memories have applied momentum."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the settings back."""
        if optimizer in self._held:
            self.give_back()

    def give_back(self) -> None:
        """Put back whatever is still laid aside, because a step raised."""
        self._held.give_back()

    def end(self) -> None:
        """Stop taking part in the optimizers' steps."""
        self._held.end()
        self._memory, self.active = {}, False

    @torch.no_grad()
    def give_up(self, group: Group, loss_scale: float) -> None:
        """Give momentum back: b ← Σ M_i. A collective.

        An optimizer without momentum has no place for it, and Adam has none before its first step; what waits then
        stays in the memory. Adam has counted its steps all along, and corrects its bias for as many.
        """
        momenta = summed(self._memories, "momentum", self._names, group, loss_scale)
        given = {self._names[p] for o, g, p in self._held.parameters() if _filled(o, g, p, momenta[p])}
        for memory in self._memories:
            memory.restore({name: fields for name, fields in memory.state().items() if name not in given})
        self._held.unmark()
        self.end()

    def _take_over(self) -> None:
        """Adopt the optimizers' decays, and move what is in the buffers of groups that are not marked."""
        self._follow()
        for optimizer, group, p in self._held.parameters():
            kind = _kind(optimizer)
            if kind and first_moment_of(group) and not marked(group):
                self._empty(p, optimizer.state.get(p, {}).get(kind.buffer), kind.unit(group))
        self._held.mark()

    @torch.no_grad()
    def _empty(self, p: nn.Parameter, buffer: Tensor | None, unit: float) -> None:
        """Move this rank's share of a buffer into the memory."""
        if buffer is not None:
            share = in_memory_order(buffer, p).to(torch.promote_types(p.dtype, torch.float32))
            self._memory[p].receive(self._names[p], share * (self._loss_scale / unit / self._ranks))
            buffer.zero_()

    def _follow(self) -> None:
        """Adopt the optimizers' decays. Raises MomentumError where one cannot be moved, or is missing."""
        decays: dict[str, float] = {}
        for optimizer, group in self._held.groups():
            _check_movable(optimizer, group)
            decays |= {self._names[p]: first_moment_of(group) for p in group["params"] if p in self._names}
        for memory in self._memories:
            memory.adopt(decays)
        wanting = [name for p, name in self._names.items() if self._memory[p].decay is None]
        _check_decays({name: decays.get(name) for name in wanting})


def _memory_of(recipe: Reducer, p: nn.Parameter, name: str) -> FadingMomentum | None:
    part = local(p)
    segment = Segment(name=name, offset=0, length=part.numel(), shape=tuple(part.shape))
    return next(iter(fading([recipe.memory_of(segment)])), None)


def _kind(optimizer: torch.optim.Optimizer) -> FirstMoment | None:
    return next((_KINDS[base] for base in type(optimizer).__mro__ if base in _KINDS), None)


def _filled(optimizer: torch.optim.Optimizer, group: Settings, p: nn.Parameter, momentum: Tensor) -> bool:
    """Put momentum back into the buffer of `p`, if the optimizer has one."""
    kind, state = _kind(optimizer), optimizer.state.get(p, {})
    if kind is None or not first_moment_of(group) or not (kind.alone or kind.buffer in state):
        return False
    buffer = state.get(kind.buffer)
    if buffer is None:
        buffer = optimizer.state[p][kind.buffer] = torch.zeros_like(p, memory_format=torch.preserve_format)
    if marked(group):
        buffer.zero_()  # Adam has put there what was delivered last
    local(buffer).add_(shaped_like(p, momentum), alpha=kind.unit(group))
    return True


def _check_movable(optimizer: torch.optim.Optimizer, group: Settings) -> None:
    if group.get("dampening"):
        raise MomentumError("SGD's dampening cannot be moved into the memory; set dampening=0")
    if _kind(optimizer) is None and first_moment_of(group):
        raise MomentumError(
            f"{type(optimizer).__name__} has momentum that cannot be moved into the memory: set its momentum, or the "
            "first of its betas, to 0 and give the recipe's memory a decay; or use AdamW, Adam, RAdam, Adamax, Muon or "
            "SGD"
        )


def _check_decays(decays: Mapping[str, float | None]) -> None:
    """Raise MomentumError for a memory that is to adopt its decay where there is none."""
    if unknown := [name for name, decay in decays.items() if decay is None]:
        raise MomentumError(
            f"this recipe's memory takes its decay from the optimizer, and none that was given holds {unknown[0]}: "
            "pass attach(..., optimizer=) those that update the whole model, or give the memory a decay"
        )
    if zero := [name for name, decay in decays.items() if not decay]:
        raise MomentumError(
            f"this recipe's memory takes its decay from the optimizer, whose momentum for {zero[0]} is 0: set that, or "
            "give the memory a decay"
        )
