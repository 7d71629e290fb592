"""Momentum correction: the memories apply momentum instead of the optimizer, and never both."""

import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives import Group
from thinwire.errors import MomentumError
from thinwire.integrations.gradients import shaped_like
from thinwire.integrations.optimizers import skipped_by_scaler, take_part
from thinwire.memories import Memory, MomentumCorrection

Settings = dict[str, Any]
"""One of an optimizer's param_groups."""

_MARK = "momentum_in_memory"
_FIX = (
    "pass attach(..., optimizer=optimizer), which moves momentum out of it, or use a recipe without momentum correction"
)


def corrections(memories: Sequence[Memory]) -> list[MomentumCorrection]:
    """Return the memories that apply momentum."""
    return [part for memory in memories for part in memory.parts if isinstance(part, MomentumCorrection)]


@final
class Handover:
    """Hands SGD's momentum over to the memories of a recipe that corrects it, and back.

    SGD's buffer b ← m·b + g + λ·p is linear. The memories take g, which differs by rank. The rest is the same on all
    ranks and stays in the optimizer's own buffer: weight decay λ·p, and what was there before. The settings stay in the
    optimizer's groups too, so schedules and its `state_dict` work as always. During a step we set them to zero and keep
    them aside. `active`: whether memories apply momentum.
    """

    def __init__(
        self,
        memories: Sequence[Memory],
        optimizers: Sequence[torch.optim.Optimizer],
        names: Mapping[nn.Parameter, str],
    ) -> None:
        self._memories = corrections(memories)
        _check_memories(self._memories, memories, optimizers)
        self._names, self.active = names, bool(self._memories)
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet(optimizers if self._memories else ())
        self._laid_aside: list[tuple[Settings, Settings]] = []
        self._own = next((memory.momentum for memory in self._memories if memory.momentum is not None), None)
        self._moved = 0.0
        self._token, self._accepted = uuid.uuid4().hex, False
        for optimizer in self._optimizers:
            optimizer.register_state_dict_pre_hook(partial(_give_back_first, weakref.ref(self)))
        if self._optimizers:
            groups = list(self._groups())
            _check_holdings(groups, names)
            _check_kind(groups)
            self._follow()
        if self.active:
            take_part(self)

    def check_returnable(self) -> None:
        """Raise RuntimeError if memories apply momentum and there is no optimizer to take it back."""
        if self.active and not self._optimizers:
            raise RuntimeError(
                "the recipe applies a momentum of its own, and no optimizer is there to take it back: attach with "
                "optimizer=, or drop what waits with forget() and wrap the model anew"
            )

    def prepare(self) -> None:
        """Get ready for a reduction: adopt the momentum the optimizer has now.

        Raises MomentumError if the memories cannot apply it, or if the optimizer's state was saved with memories that
        have not been loaded.
        """
        if not self._accepted and any(group.get(_MARK, self._token) != self._token for group in self._groups()):
            raise MomentumError(
                "when this optimizer's state was saved, its momentum was in the memory of an attachment: load that "
                "attachment's state too, with load_state_dict, or go on without what it held: attachment.forget()"
            )
        self._follow()

    def accept(self) -> None:
        """Accept the optimizer's state as it is: its momentum is in the memories, or is not wanted."""
        self._accepted = True
        for group in self._groups():
            group.pop(_MARK, None)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Lay aside momentum and weight decay. Raises MomentumError for another optimizer that has momentum."""
        if optimizer not in self._optimizers:
            _refuse_second_momentum(optimizer, self._names if self.active else {})
            return
        self.give_back()
        for group in self._groups(optimizer):
            kept = {key: group[key] for key in ("momentum", "nesterov", "weight_decay")}
            self._laid_aside.append((group, kept))
            group.update(momentum=0.0, nesterov=False, weight_decay=0.0)

    @torch.no_grad()
    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Compute b ← m·b + λ·p and p ← p − η·b, or p − η·(λ·p + m·b) with Nesterov's momentum."""
        if optimizer not in self._optimizers or skipped_by_scaler(optimizer):
            return
        for group, kept in self._laid_aside:
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

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Put momentum and weight decay back, and mark the optimizer's state: its momentum is in the memories."""
        if optimizer in self._optimizers:
            self.give_back()
            for group in self._groups(optimizer):
                group[_MARK] = self._token
            self._accepted = False

    def give_back(self) -> None:
        """Put back whatever is still laid aside, because a step raised."""
        while self._laid_aside:
            group, kept = self._laid_aside.pop()
            group.update(kept)

    def end(self) -> None:
        """Stop taking part in the optimizer's steps."""
        self.give_back()
        self._optimizers, self._memories, self.active = weakref.WeakSet(), [], False

    def settings(self) -> list[list[Any]]:
        """Return [momentum, nesterov] of each memory, for `restore`."""
        # float: a numpy.float64 would make a checkpoint that torch.load refuses
        return [[None if m.momentum is None else float(m.momentum), m.nesterov] for m in self._memories]

    def restore(self, settings: Sequence[Sequence[Any]], decay: Mapping[str, float]) -> None:
        """Take over what `settings` returned, and weight decay by parameter as state version 1 has it."""
        self.accept()
        for memory, (momentum, nesterov) in zip(self._memories, settings, strict=True):
            if not self._moved:
                memory.adopt(momentum, nesterov=nesterov)
        for group in self._groups():
            saved = {abs(decay[self._names[p]]) for p in group["params"] if self._names.get(p) in decay}
            if saved and not group["weight_decay"]:
                group["weight_decay"] = saved.pop()
            if not group["momentum"] and self._own is None:
                group["momentum"], group["nesterov"] = settings[0]
        self._follow()

    def give_up(self, parameters: Mapping[str, nn.Parameter], group: Group, loss_scale: float) -> None:
        """Give momentum back to the optimizer, which applies it alone from now on. A collective.

        What waits has its momentum already, so we apply it at once.
        """
        residuals = _summed(self._memories, "residual", parameters, group, loss_scale)
        for _, settings, p in self._parameters():
            shaped = shaped_like(p, residuals[self._names[p]]).to(p.dtype)
            with torch.no_grad():
                p.add_(shaped, alpha=float(settings["lr"]) * (1 if settings["maximize"] else -1))
        velocities = _summed(self._memories, "velocity", parameters, group, loss_scale)
        self.accept()
        for optimizer, settings, p in self._parameters():
            velocity = shaped_like(p, velocities[self._names[p]])
            _buffer(optimizer, p).add_(velocity, alpha=-1 if settings["maximize"] else 1)
        self.end()

    def _follow(self) -> None:
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

    def _parameters(self) -> Iterator[tuple[torch.optim.Optimizer, Settings, nn.Parameter]]:
        for optimizer in self._optimizers:
            for group in self._groups(optimizer):
                yield from ((optimizer, group, p) for p in group["params"] if p in self._names)

    def _groups(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[Settings]:
        """Return the groups that hold any of these parameters."""
        for each in self._optimizers if optimizer is None else [optimizer]:
            yield from (group for group in each.param_groups if any(p in self._names for p in group["params"]))

    def _set(self, group: Settings) -> tuple[float, bool]:
        """Return the (momentum, nesterov) of a group, laid aside or not."""
        kept = next((kept for other, kept in self._laid_aside if other is group), group)
        return float(kept["momentum"]), bool(kept["nesterov"])


def _summed(
    memories: Sequence[MomentumCorrection],
    field: str,
    parameters: Mapping[str, nn.Parameter],
    group: Group,
    loss_scale: float,
) -> dict[str, Tensor]:
    """Return the sum over ranks of what waits under `field`, flat, by parameter. A collective."""
    found: dict[str, Tensor] = {}
    for memory in memories:
        held = memory.state()
        for name, p in parameters.items():  # on some ranks there may be nothing
            mine, dtype = held.get(name, {}).get(field), memory.held(p.dtype)
            total = torch.zeros(p.numel(), dtype=dtype, device=p.device) if mine is None else mine.clone()
            dist.all_reduce(total, group=group)
            found[name] = total / loss_scale
    return found


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


def _check_holdings(groups: Sequence[Settings], names: Mapping[nn.Parameter, str]) -> None:
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


def _check_kind(groups: Sequence[Settings]) -> None:
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
