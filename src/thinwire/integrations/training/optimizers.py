"""How do we learn that an optimizer steps? Hooks on torch.optim tell observers and participants."""

import inspect
import sys
import weakref
from collections.abc import Callable
from functools import cache, partial
from threading import RLock
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

T = TypeVar("T")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Observer(Protocol):
    """Learns of the gradients that optimizers take."""

    def about_to_take(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients that are in place before the optimizer takes them. An exception prevents it."""

    def taken(self, optimizer: torch.optim.Optimizer, *, evaluated: bool = False) -> None:
        """Note that the optimizer takes its gradients; with `evaluated`, from a closure that it may call again."""


class Participant(Protocol):
    """Does a part of an optimizer's step in its place, right before and after its class's own step.

    Hooks that users have registered with the optimizer, and what a subclass does around `super().step()`, come before
    and after that: they see and set the optimizer's own settings.
    """

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Get ready for a step. An exception prevents it."""

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Do this part of the step. The step's gradients are in place now."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clean up after a step."""

    def give_back(self) -> None:
        """Clean up after a closure that raised."""


def observe(observer: Observer) -> None:
    """Tell the observer of all steps, for as long as it lives."""
    _register()
    _observers.add(observer)


def stop_observing(observer: Observer) -> None:
    """Stop telling the observer."""
    _observers.discard(observer)


def take_part(participant: Participant) -> None:
    """Let the participant take part in all steps, for as long as it lives."""
    _register()
    _participants.add(participant)


def nested(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this hook's step is part of another of the same optimizer, by the stack: counts err after raises."""
    frame: FrameType | None = sys._getframe(1)
    found = 0
    while frame is not None and found < 2:
        found += frame.f_code is _STEP and frame.f_locals["args"][0] is optimizer
        frame = frame.f_back
    return found > 1


def step_of(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return the step of this class, or the base class's that it calls, without what torch wraps around it."""
    return _stepping(kind)[1]  # type: ignore[arg-type]  # classes can be hashed, too


@cache
def _stepping(kind: type[torch.optim.Optimizer]) -> tuple[Any, Callable[..., Any]]:
    """Return the class that has the step of `kind`, and that step."""
    there = [(each, inspect.unwrap(vars(each)["step"])) for each in kind.__mro__ if "step" in vars(each)]
    return next((found for found in there[:-1] if not _goes_on(found[1])), there[-1])


def _goes_on(step: Callable[..., Any]) -> bool:
    """Whether this calls its base class's step."""
    return {"super", "step"}.issubset(getattr(getattr(step, "__code__", None), "co_names", ()))


_STEP = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__  # what torch wraps around any step


def skipped_by_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the GradScaler has told this fused optimizer to skip a step whose gradients are not finite."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


class _Alive(Generic[T]):
    """Who is told, for as long as they live. `all` is replaced, never added to: Hogwild's threads step meanwhile."""

    def __init__(self) -> None:
        self._lock = RLock()
        self.all: weakref.WeakSet[T] = weakref.WeakSet()

    def add(self, member: T) -> None:
        with self._lock:
            self.all = self.all | {member}

    def discard(self, member: T) -> None:
        with self._lock:
            self.all = self.all - {member}


_observers: _Alive[Observer] = _Alive()
_participants: _Alive[Participant] = _Alive()


@cache
def _register() -> None:
    # Once for good: a handle cannot be removed while the hooks run. In a compiled step, Dynamo must not trace them.
    register_optimizer_step_pre_hook(torch.compiler.disable(_before))
    register_optimizer_step_post_hook(torch.compiler.disable(_after))


def _before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if nested(optimizer):
        return
    evaluates = callable(_closure(args, kwargs))
    for observer in () if evaluates else _observers.all:
        observer.about_to_take(optimizer)
    if evaluates or _participants.all:
        _stand_next_to(optimizer)


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


_hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int, Callable[..., Any]]] = (
    weakref.WeakKeyDictionary()
)
"""By optimizer, the participants' hooks before and after its class's own step, and that step."""


def _stand_next_to(optimizer: torch.optim.Optimizer) -> None:
    """Have the participants' hooks be the last before the step and the first after it."""
    before: Any = optimizer._optimizer_step_pre_hooks
    after: Any = optimizer._optimizer_step_post_hooks
    if optimizer not in _hooks:
        owner, own = _stepping(type(optimizer))  # type: ignore[arg-type]
        owner.__new__(owner)._patch_step_function()  # torch does it only when the class is instantiated
        begin = optimizer.register_step_pre_hook(torch.compiler.disable(_begin))
        end = optimizer.register_step_post_hook(torch.compiler.disable(_end))
        _hooks[optimizer] = begin.id, end.id, own
    first, last, _ = _hooks[optimizer]
    before.move_to_end(first)
    after.move_to_end(last, last=False)


def _is_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step whose hook calls this is its class's own, not that of a subclass which goes on to it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _STEP:
        frame = frame.f_back
    return frame is None or inspect.unwrap(frame.f_locals["func"]) is _hooks[optimizer][2]


def _begin(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    if not _is_own(optimizer):
        return None
    for participant in _participants.all:
        participant.before_step(optimizer)
    closure = _closure(args, kwargs)
    if callable(closure):
        return args[:1], kwargs | {"closure": partial(_evaluate, closure, optimizer)}
    for participant in _participants.all:
        participant.apply(optimizer)
    return None


def _end(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for participant in _participants.all if _is_own(optimizer) else ():
        participant.after_step(optimizer)


def _evaluate(closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Any:
    try:
        loss = closure()
        for observer in _observers.all:
            observer.about_to_take(optimizer)
    except BaseException:
        for participant in _participants.all:
            participant.give_back()
        raise
    for participant in _participants.all:
        participant.apply(optimizer)
    for observer in _observers.all:
        observer.taken(optimizer, evaluated=True)
    return loss


def _after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for observer in () if nested(optimizer) else _observers.all:
        observer.taken(optimizer)
