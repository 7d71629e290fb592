"""Fading momentum: the memories apply an optimizer's first moment instead of the optimizer, and never both."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from thinwire.collectives import Group
from thinwire.errors import MomentumError
from thinwire.integrations.momentum import handover
from thinwire.integrations.momentum.first_moments import RescaledUpdatesAdvice, check_movable, filled, kind_of
from thinwire.integrations.momentum.handover import Handover, Holdings
from thinwire.integrations.training.gradients import in_memory_order, segment_of
from thinwire.integrations.training.optimizers import take_part
from thinwire.memories import AppliedMomentum, Memory
from thinwire.reducer import Reducer

_log = logging.getLogger("thinwire")
_NONE = torch.zeros((), dtype=torch.float32, device="cpu")
_FIX = "pass attach(..., optimizer=optimizer), which moves momentum out of it, or set its momentum to 0"


def fading(memories: Iterable[Memory]) -> list[AppliedMomentum]:
    """Return the memories that apply an optimizer's momentum."""
    return [part for memory in memories for part in memory.parts if isinstance(part, AppliedMomentum)]


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

    Parameters whose memory is another, such as small ones, keep their momentum, even in the same group. Those whose
    buffers have been moved are marked. Where there is no mark, at first or after a dense checkpoint has been loaded,
    they are moved before the next reduction.

    A recipe may change a parameter's memory between steps, as `"auto"` does. Before the next reduction, the buffer
    of each parameter that has come to fade is moved as above. One that no longer fades gets its momentum back:
    b ← Σ M_i, and M_i is dropped. An optimizer that cannot take it leaves it where it is, for the recipe to release.
    """

    def __init__(
        self,
        recipe: Reducer,
        optimizers: Sequence[torch.optim.Optimizer],
        names: Mapping[nn.Parameter, str],
        group: Group,
    ) -> None:
        segments = {p: segment_of(p, name) for p, name in names.items()}
        self._segments = {p: each for p, each in segments.items() if fading(recipe.holding(each))}
        self._names = {p: names[p] for p in self._segments}  # of all that may fade
        self._recipe, self._changes, self._memories = recipe, recipe.changes, fading(recipe.memories())
        self._own = " or a ".join(dict.fromkeys(memory.own for memory in self._memories))
        self._group, self._loss_scale, self.active = group, 1.0, bool(self._names)
        self._memory = self._chosen()  # of those that fade now
        self._held = Holdings(optimizers if self._memories else (), self._names)
        self._held.say_unmarked()
        self._stepping: torch.optim.Optimizer | None = None  # its closure may run
        self._loaded: set[str] = set()  # whose momentum a state that was just loaded has
        self._followed: tuple[object, ...] = ()
        self._follow()
        lost = [p for p, memory in self._memory.items() if not memory.keeps_length]
        self._advice = RescaledUpdatesAdvice(lost, group.rank())
        for optimizer in optimizers:
            self._advice.meets(optimizer)
            _say_if_unknown(optimizer, self._memory, group.rank())
        self._begin(self._held.unmarked(self._names))
        if self.active:
            take_part(self)

    def prepare(self, loss_scale: float) -> None:
        """Adopt the optimizers' decays of now, and move dense momentum; a collective where some fades no more."""
        self._held.check_mark()
        self._loss_scale = loss_scale
        stepping = self._stepping
        chosen = self._chosen() if self._changes else self._memory
        if self._changes and not chosen.keys() == self._memory.keys() == self._in_memory().keys():
            self.give_back()
            self._change(chosen)
            if stepping is not None:
                self._override_until_step(stepping)
        elif stepping is None:  # in a closure, `before_step` has done it
            self._take_over()

    def accept(self) -> None:
        """Accept the optimizers' state as it is. What it does not say is in memories is still to be moved."""
        self._held.accept()
        self._loaded = set()

    def restore(self, settings: Sequence[Sequence[Any]]) -> None:
        """Accept the optimizers' state: what faded is what memories have now; marks may be of other ranks' shards."""
        self.accept()
        self._loaded = {name for memory in self._memories for name in memory.state()}
        self._memory = {} if self._changes else self._memory

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Set momentum to 0 for this step. Raises MomentumError for another optimizer that has momentum."""
        if optimizer not in self._held:
            return self._meet_another(optimizer)
        self._held.check_mark()  # a step may come before the first reduction: DDP takes some without a hook
        self.give_back()
        self._take_over()
        self._override_until_step(optimizer)

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Return at once: the gradient already holds the momentum, which the memories applied."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the settings back."""
        if optimizer in self._held:
            self.give_back()

    def give_back(self) -> None:
        """Restore settings that are still overridden, because a step is over or raised."""
        self._held.give_back()
        self._stepping = None

    @override
    def end(self) -> None:
        self._held.end()
        self._memory, self._stepping, self.active = {}, None, False

    @torch.no_grad()
    def give_up(self, group: Group, loss_scale: float) -> None:
        """Give momentum back: b ← Σ M_i. A collective.

        An optimizer without momentum has no place for it, and Adam has none before its first step; the residual then
        stays in the memory, for later gradients. What no gradient can carry is dropped, with a warning. Adam has
        counted its steps all along, and corrects its bias for as many.
        """
        self._loss_scale = loss_scale
        stuck = [memory for memory in self._memories if not memory.releases]
        waited = any(bool(x.any()) for memory in stuck for x in memory.waiting())
        self._return(self._in_memory(), group)
        _drop(stuck, logging.DEBUG if group.rank() else logging.WARNING, waited=waited)
        self._advice.ends()
        self._held.unmark()
        self.end()

    def _chosen(self) -> dict[nn.Parameter, AppliedMomentum]:
        """Return the memory of each parameter that is to fade from now on."""
        memories = {p: fading([self._recipe.memory_of(segment)]) for p, segment in self._segments.items()}
        return {p: found[0] for p, found in memories.items() if found}

    def _in_memory(self) -> dict[nn.Parameter, str]:
        """Return the parameters whose momentum is in the memories, and not with the optimizer."""
        held = {name for memory in self._memories for name in memory.state()}
        return {p: name for p, name in self._names.items() if p in self._memory or name in held}

    def _change(self, chosen: Mapping[nn.Parameter, AppliedMomentum]) -> None:
        """Give momentum back where it fades no more and no step has begun, move it where it does; a collective."""
        before = self._in_memory()
        self._return({p: name for p, name in before.items() if p not in chosen}, self._group)
        self._memory = {p: memory for p, memory in chosen.items() if p in before}
        self._take_over()
        arrived = {p for p in chosen if p not in before}
        self._memory = dict(chosen)
        self._move(arrived)
        self._follow()
        self._held.mark(self._in_memory())

    def _return(self, leaving: Mapping[nn.Parameter, str], group: Group) -> None:
        """Put the residuals of these back into the optimizers' buffers. A collective."""
        free = {p: name for p, name in leaving.items() if not any(memory.begun(name) for memory in self._memories)}
        momenta = handover.summed(self._memories, "momentum", free, group, self._loss_scale)
        given = {
            leaving[p]
            for o, g, p in self._held.parameters()
            if p in leaving and filled(o, g, p, momenta.get(p), moved=self._held.marked(o, p)) and p in free
        }
        for memory in self._memories:
            memory.drop(given)

    def _override_until_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer step without momentum of what fades."""
        self._stepping, kind = optimizer, kind_of(type(optimizer))
        for _, group in self._held.groups(optimizer) if kind else ():
            ours = {p: None for p in group["params"] if p in self._memory}
            if kind and ours:
                self._held.override_for(optimizer, group, ours, **kind.without(group))

    def _take_over(self) -> None:
        """Adopt the optimizers' decays, and move what is in the buffers of parameters that are not marked."""
        self._follow()
        arrived = self._held.unmarked(self._memory)
        if self._loaded:
            ours = (p for _, _, p in self._held.parameters() if p in self._memory)
            arrived = {p for p in ours if self._names[p] not in self._loaded}
        if arrived or self._held.accepted:
            self._begin(arrived)
            self._move(arrived)
            self._held.mark(self._in_memory())
            self._loaded = set()

    def _begin(self, parameters: Collection[nn.Parameter]) -> None:
        """Say what it means for the optimizers' second moments that these, which were dense, fade from now on."""
        for optimizer, _, p in self._held.parameters():
            if p in parameters:
                self._advice.begins(optimizer, p)

    def _meet_another(self, optimizer: torch.optim.Optimizer) -> None:
        """Meet an optimizer that `attach` was not given. Raises MomentumError if it, or another one, has momentum."""
        if not any(p in self._names for group in optimizer.param_groups for p in group["params"]):
            return  # it trains something else
        handover.refuse_second_momentum(optimizer, self._memory, _FIX)
        handover.refuse_another(optimizer, {p for p, memory in self._memory.items() if memory.own_decay is None})
        if self._advice.meets(optimizer):
            _say_if_unknown(optimizer, self._memory, self._group.rank())
            states = [each for memory in self._memories for each in memory.state().items()]
            held = {name for name, fields in states if any(bool(x.any()) for x in fields.values())}
            for p in (p for group in optimizer.param_groups for p in group["params"] if self._names.get(p) not in held):
                self._advice.begins(optimizer, p)

    @torch.no_grad()
    def _move(self, parameters: Collection[nn.Parameter]) -> None:
        """Move this rank's share of the buffers of these into the memories."""
        for optimizer, group, p in self._held.parameters():
            kind, buffers = kind_of(type(optimizer)), optimizer.state.get(p, {})
            buffer: Tensor | None = buffers.get(kind.buffer) if kind else None
            if p not in parameters or not kind or not handover.first_moment_of(group) or buffer is None:
                continue
            share = in_memory_order(buffer, p).to(torch.promote_types(p.dtype, torch.float32))
            factor = self._loss_scale / kind.unit(group) / self._group.size()
            self._memory[p].receive(self._names[p], share * factor)
            buffer.zero_()

    def _follow(self) -> None:
        """Adopt the optimizers' decays. Raises MomentumError where one cannot be moved, or is missing."""
        groups = self._held.groups()
        moments, held = list[float](), list[list[int]]()
        for optimizer, group in groups:
            check_movable(optimizer, group, self._own)
            moments.append(handover.first_moment_of(group))
            held.append([*map(id, group["params"])])
        now = self._memory, moments, held
        if now == self._followed:  # as in most steps
            return
        each = ((p, moment) for (_, group), moment in zip(groups, moments, strict=True) for p in group["params"])
        decays = {self._names[p]: moment for p, moment in each if p in self._names}
        for memory in self._memories:
            memory.adopt(decays)
        names = [self._names[p] for p, memory in self._memory.items() if memory.own_decay is None]
        wanting = {name: decays.get(name) for name in names}
        if unknown := [name for name, decay in wanting.items() if decay is None]:
            raise MomentumError(
                f"no optimizer passed to attach holds {unknown[0]}, so its {self._own} is unknown: pass all "
                f"optimizers, as attach(..., optimizer=), or give the memory a {self._own}"
            )
        if zero := [name for name, decay in wanting.items() if not decay]:
            raise MomentumError(
                f"this recipe's memory takes its {self._own} from the optimizer, whose momentum for {zero[0]} is 0: "
                f"set that, or give the memory a {self._own}"
            )
        self._followed = now


def _drop(memories: Sequence[AppliedMomentum], level: int, *, waited: bool) -> None:
    """Drop what these hold, and say so. `waited`: whether there was more than momentum, some of which has gone back."""
    names = [name for m in memories for name, held in m.state().items() if bool(held.get("momentum", _NONE).any())]
    if waited:
        _log.log(level, "the residual of orthogonalised updates is dropped, as its size is not that of gradients")
    if names:
        _log.log(
            level,
            "the momentum of %d parameters, such as %s, is dropped: no optimizer passed to attach has momentum for it",
            len(names),
            names[0],
        )
    for memory in memories:
        memory.restore({})


def _say_if_unknown(optimizer: torch.optim.Optimizer, memories: Collection[nn.Parameter], rank: int) -> None:
    """Warn if this optimizer has a step of its own, whose settings name no momentum."""
    held = (p for group in optimizer.param_groups for p in group["params"])
    if handover.from_elsewhere(optimizer) and any(p in memories for p in held):
        _log.log(
            logging.DEBUG if rank else logging.WARNING,
            "%s has a step that thinwire does not know, and no setting called momentum or beta. If it applies "
            "momentum, that is added to the memory's: turn it off, or use AdamW",
            type(optimizer).__name__,
        )
