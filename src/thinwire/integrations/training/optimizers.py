"""How do we learn that an optimizer steps? Hooks on torch.optim tell observers and participants."""

import sys
import weakref
from collections.abc import Callable, Iterator
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
        """Look at the gradients that are in place before the optimizer steps. An exception prevents it."""

    def taken(self, optimizer: torch.optim.Optimizer, *, evaluated: bool = False) -> None:
        """Note that the optimizer takes its gradients; with `evaluated`, from a closure that it may call again."""


class Participant(Protocol):
    """Does a part of an optimizer's step in its place."""

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
    """Whether the step whose hook calls this is part of another step of the same optimizer.

    torch wraps `step` of every class that has been instantiated. Where a subclass calls `super().step()`, hooks fire
    for both. We ask the stack: a count would stay wrong after a step that raised, and in another thread.
    """
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None and steps < 2:
        steps += frame.f_code is _STEP and frame.f_locals["args"][0] is optimizer
        frame = frame.f_back
    return steps > 1


_STEP = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__  # what torch wraps around any step


def skipped_by_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the GradScaler has told this fused optimizer to skip a step whose gradients are not finite."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


class _Alive(Generic[T]):
    """Who is told, for as long as they live. One thread may step while another one adds: Hogwild's threads do."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._members: weakref.WeakSet[T] = weakref.WeakSet()

    def add(self, member: T) -> None:
        with self._lock:
            self._members.add(member)

    def discard(self, member: T) -> None:
        with self._lock:
            self._members.discard(member)

    def __iter__(self) -> Iterator[T]:
        with self._lock:
            return iter(list(self._members))


_observers: _Alive[Observer] = _Alive()
_participants: _Alive[Participant] = _Alive()


@cache
def _register() -> None:
    # Once for good: a handle cannot be removed while the hooks run. In a compiled step, Dynamo must not trace them.
    register_optimizer_step_pre_hook(torch.compiler.disable(_before))
    register_optimizer_step_post_hook(torch.compiler.disable(_after))


def _before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    if nested(optimizer):
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    for observer in () if callable(closure) else _observers:
        observer.about_to_take(optimizer)
    for participant in _participants:
        participant.before_step(optimizer)
    if callable(closure):
        return args[:1], kwargs | {"closure": partial(_evaluate, closure, optimizer)}
    for participant in _participants:
        participant.apply(optimizer)
    return args, kwargs


def _evaluate(closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Any:
    try:
        loss = closure()
    except BaseException:
        for participant in _participants:
            participant.give_back()
        raise
    for participant in _participants:
        participant.apply(optimizer)
    for observer in _observers:
        observer.taken(optimizer, evaluated=True)
    return loss


def _after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if nested(optimizer):
        return
    for participant in _participants:
        participant.after_step(optimizer)
    for observer in _observers:
        observer.taken(optimizer)
