"""What handing momentum over takes: the optimizers, their settings during a step, and where their momentum is."""

import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives import Group
from thinwire.errors import MomentumError
from thinwire.integrations.training.gradients import local
from thinwire.integrations.training.optimizers import step_of
from thinwire.memories import Memory

Settings = dict[str, Any]
"""One of an optimizer's param_groups."""

_MARK = "momentum_in_memory"
_marks: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[nn.Parameter, str]] = weakref.WeakKeyDictionary()
"""By optimizer: whose momentum is in memories, and in which, by parameter. Groups have it for its state alone."""


class Handover(ABC):
    """Hands momentum over from optimizers to memories that are `active`, all of it if it `corrects`, and back."""

    active: bool
    corrects: bool = False

    def check_returnable(self) -> None:  # noqa: B027 - most are
        """Raise RuntimeError if memories apply momentum that nothing can take back."""

    @abstractmethod
    def prepare(self, loss_scale: float) -> None:
        """Adopt the momentum that the optimizers have now, for residuals of this loss scale, or raise MomentumError."""

    @abstractmethod
    def accept(self) -> None:
        """Accept the optimizers' state as it is: what it says is in memories is there, or is not wanted."""

    def settings(self) -> list[list[Any]]:
        """Return what an attachment saves of it, for `restore`."""
        return []

    def restore(self, settings: Sequence[Sequence[Any]]) -> None:
        """Take over what `settings` returned."""
        self.accept()

    @abstractmethod
    def give_up(self, group: Group, loss_scale: float) -> None:
        """Give momentum back to the optimizers, which apply it alone from now on. A collective."""

    @abstractmethod
    def end(self) -> None:
        """Stop taking part in the optimizers' steps."""


@final
class Holdings:
    """The optimizers' groups that hold any of these parameters.

    `overridden`: those whose settings are changed while the optimizer steps, with what they were. `accepted`: whether
    marks of other attachments are accepted until the next `mark`.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[nn.Parameter, str]) -> None:
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet(optimizers)
        self._names = names
        self.overridden: list[tuple[Settings, Settings]] = []
        self._parts: list[tuple[torch.optim.Optimizer, Settings, Settings]] = []
        self._token, self.accepted = uuid.uuid4().hex, False
        self._left: weakref.WeakKeyDictionary[torch.optim.Optimizer, object] = weakref.WeakKeyDictionary()
        for optimizer in optimizers:
            if optimizer not in _marks:
                _read(optimizer)
                optimizer.register_load_state_dict_post_hook(_read)
            optimizer.register_state_dict_pre_hook(partial(_before_state, weakref.ref(self)))
            optimizer.register_load_state_dict_pre_hook(partial(_before_state, weakref.ref(self)))

    def __contains__(self, optimizer: torch.optim.Optimizer) -> bool:
        return optimizer in self._optimizers

    def __bool__(self) -> bool:
        return bool(self._optimizers)

    def groups(self, optimizer: torch.optim.Optimizer | None = None) -> list[tuple[torch.optim.Optimizer, Settings]]:
        """Return each group with its optimizer: of all optimizers, or of one."""
        optimizers, others = self._optimizers if optimizer is None else [optimizer], self._names.keys().isdisjoint
        return [(each, group) for each in optimizers for group in each.param_groups if not others(group["params"])]

    def parameters(self) -> Iterator[tuple[torch.optim.Optimizer, Settings, nn.Parameter]]:
        """Yield each of the parameters, with its optimizer and group."""
        for optimizer, group in self.groups():
            yield from ((optimizer, group, p) for p in group["params"] if p in self._names)

    def missing(self) -> list[str]:
        """Return the names of parameters that no optimizer holds."""
        held = {p for _, _, p in self.parameters()}
        return [name for p, name in self._names.items() if p not in held]

    def override_until_step(self, group: Settings, **instead: Any) -> None:
        """Set a group to other settings until `give_back`."""
        self.overridden.append((group, {key: group[key] for key in instead}))
        group.update(instead)

    def override_for(
        self, optimizer: torch.optim.Optimizer, group: Settings, ours: Collection[nn.Parameter], **instead: Any
    ) -> None:
        """Set these parameters of a group to other settings until `give_back`; the others keep theirs."""
        rest = [p for p in group["params"] if p not in ours]
        if not rest:
            return self.override_until_step(group, **instead)
        held: list[nn.Parameter] = group["params"]
        whole = held.whole if isinstance(held, _Rest) else held
        part = group | instead | {"params": list(ours)}
        group["params"] = _Rest(rest, whole)
        self._parts.append((optimizer, group, part))
        optimizer.param_groups.append(part)

    def give_back(self) -> None:
        """Restore the settings that were overridden."""
        while self.overridden:
            group, kept = self.overridden.pop()
            group.update(kept)
        while self._parts:
            optimizer, group, part = self._parts.pop()
            optimizer.param_groups[:] = [each for each in optimizer.param_groups if each is not part]
            rest, ours = group["params"], part["params"]
            whole, here = rest.whole if isinstance(rest, _Rest) else [*rest, *ours], {*rest, *ours}
            if here.issuperset(whole):
                group["params"] = whole
            else:  # others are still elsewhere
                group["params"] = _Rest((p for p in whole if p in here), whole)

    def check_mark(self) -> None:
        """Raise MomentumError if an optimizer's state was saved with memories that have not been loaded."""
        if self.accepted or self.settled():
            return
        marks = [each for optimizer in self._optimizers for each in _marks[optimizer].items()]
        if any(mark != self._token and p in self._names for p, mark in marks):
            raise MomentumError(
                "when this optimizer's state was saved, its momentum was in the memory of an attachment: load the "
                "handle's state too, with load_state_dict, or drop it: handle.forget()"
            )

    def settled(self) -> bool:
        """Return whether marks are as the last `mark` left them."""
        held = [*self._optimizers]
        return all(map(is_, map(self._left.get, held), map(_marks.get, held)))

    def marked(self, optimizer: torch.optim.Optimizer, p: nn.Parameter) -> bool:
        """Whether the momentum of `p` is in memories, and not with the optimizer."""
        return p in _marks[optimizer]

    def unmarked(self, among: Collection[nn.Parameter]) -> set[nn.Parameter]:
        """Return which of these have their momentum with their optimizer."""
        found: set[nn.Parameter] = set()
        for optimizer, group in self.groups():
            marks = _marks[optimizer]
            found.update([p for p in group["params"] if p in among and p not in marks])
        return found

    def mark(self, parameters: Collection[nn.Parameter]) -> None:
        """Say of which of these parameters momentum is in the memories, however they are grouped."""
        for optimizer in self._optimizers:
            before = _marks[optimizer]
            here = before.keys() | {p for _, group in self.groups(optimizer) for p in group["params"]}
            others = {p: mark for p, mark in before.items() if p not in self._names}
            self._note(optimizer, others | {p: self._token for p in parameters if p in here})
            self._left[optimizer] = _marks[optimizer]
        self.accepted = False

    def say_unmarked(self) -> None:
        """Have groups without a mark say so: which are marked depends on how a model is cut, and keys must not."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group.setdefault(_MARK, False)

    def accept(self) -> None:
        """Accept marks of other attachments until the next `mark`, also those of a state that is yet to be loaded."""
        self.accepted = True

    def unmark(self) -> None:
        """Say that the optimizers' state has all of their momentum."""
        for optimizer in self._optimizers:
            self._note(optimizer, {p: mark for p, mark in _marks[optimizer].items() if p not in self._names})
            for group in optimizer.param_groups if not _marks[optimizer] else ():
                group.pop(_MARK, None)

    def end(self) -> None:
        """Give everything back, and let go of the optimizers."""
        self.give_back()
        self._optimizers = weakref.WeakSet()

    def _note(self, optimizer: torch.optim.Optimizer, marks: dict[nn.Parameter, str]) -> None:
        if marks != _marks[optimizer]:
            _marks[optimizer] = marks
            _write(optimizer)


class _Rest(list[nn.Parameter]):
    """A group's parameters while some of them are in a group of their own. `whole`: all of them."""

    def __init__(self, parameters: Iterable[nn.Parameter], whole: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.whole = whole


def _write(optimizer: torch.optim.Optimizer) -> None:
    """Put marks into the groups, as the optimizer's state has them: one for a group, or one for each parameter."""
    for group in optimizer.param_groups:
        found = [_marks[optimizer].get(p, False) for p in group["params"]]
        group[_MARK] = found if len(set(found)) > 1 else next(iter(found), False)


def unsigned(group: Settings) -> Settings:
    """Return a group whose marks say that momentum is in memories, as on every rank, but not in which."""
    marks = group.get(_MARK, False)
    found = [bool(mark) for mark in marks] if isinstance(marks, list) else bool(marks)
    return group | {_MARK: found} if _MARK in group else group


def _read(optimizer: torch.optim.Optimizer) -> None:
    """Take marks from the groups. One that stands for a group, as in older states, is each parameter's."""
    _marks[optimizer] = found = {}
    for group in optimizer.param_groups:
        marks, parameters = group.get(_MARK, False), group["params"]
        fits = isinstance(marks, list) and len(marks) == len(parameters)
        one = next(filter(None, marks), False) if isinstance(marks, list) else marks
        each = marks if fits else [one] * len(parameters)
        found.update({p: mark for p, mark in zip(parameters, each, strict=True) if mark})


def first_moment_of(group: Settings) -> float:
    """Return the decay of the first moment that a group asks for: `momentum`, the first of `betas`, or `beta1`."""
    first = next(iter(group.get("betas", ())), 0.0)
    return float(group.get("momentum") or first or group.get("beta1") or 0.0)


def buffer_of(optimizer: torch.optim.Optimizer, p: nn.Parameter, name: str = "momentum_buffer") -> Tensor:
    """Return an optimizer's buffer for `p`; if there is none yet, one of zeros."""
    if optimizer.state.get(p, {}).get(name) is None:
        optimizer.state[p][name] = torch.zeros_like(p, memory_format=torch.preserve_format)
    found: Tensor = optimizer.state[p][name]
    return found


def from_elsewhere(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is not one of torch's, so that only the names of its settings say what it does."""
    return not step_of(type(optimizer)).__module__.startswith("torch.")


def has_momentum(optimizer: torch.optim.Optimizer, group: Settings) -> bool:
    """Whether an optimizer applies momentum to a group.

    For one from elsewhere, every setting that is called so counts: `beta`, `mu`, or a third of the `betas`. The second
    of `betas`, and `beta2`, are taken for the second moment's.
    """
    named = from_elsewhere(optimizer) and any(_of_momentum(key, value) for key, value in group.items())
    return named or bool(first_moment_of(group))


def _of_momentum(key: str, value: Any) -> bool:
    if key == "betas":
        return any(float(beta) for beta in (*value[:1], *value[2:]))
    called = key == "mu" or "momentum" in key or key.startswith("beta")
    return called and key not in (_MARK, "beta2", "beta_2") and isinstance(value, float | Tensor) and float(value) != 0


def refuse_second_momentum(optimizer: torch.optim.Optimizer, names: Collection[nn.Parameter], fix: str) -> None:
    """Raise MomentumError if an optimizer applies momentum to any of these parameters."""
    for group in optimizer.param_groups if names else ():
        if has_momentum(optimizer, group) and any(p in names for p in group["params"]):
            raise MomentumError(f"{type(optimizer).__name__} applies momentum a second time: {fix}")


def refuse_another(optimizer: torch.optim.Optimizer, names: Collection[nn.Parameter]) -> None:
    """Raise MomentumError if an optimizer that attach was not given holds any of these, whose momentum has moved."""
    if any(p in names for group in optimizer.param_groups for p in group["params"]):
        raise MomentumError(
            f"{type(optimizer).__name__} steps parameters whose momentum the recipe took from another optimizer: pass "
            "all optimizers that step them to attach(..., optimizer=). To go on with this one alone, attach again with "
            "it, and if it should have no momentum, call remove() first"
        )


def summed(
    memories: Sequence[Memory], field: str, names: Mapping[nn.Parameter, str], group: Group, loss_scale: float
) -> dict[nn.Parameter, Tensor]:
    """Return the sum over ranks of the residual under `field`, flat. A collective."""
    found: dict[nn.Parameter, Tensor] = {}
    for memory in memories:
        held = memory.state()
        for p, name in names.items():  # on some ranks there may be nothing
            total = torch.zeros(local(p).numel(), dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
            total += held.get(name, {}).get(field, 0)
            dist.all_reduce(total, group=group)
            found[p] = found.get(p, 0) + total / loss_scale
    return found


def _before_state(holdings: "weakref.ref[Holdings]", optimizer: torch.optim.Optimizer, *_: object) -> None:
    me = holdings()
    if me is not None and optimizer in me:
        me.give_back()
        if any(_MARK in group for group in optimizer.param_groups) or _marks[optimizer]:
            _write(optimizer)
