"""How do we learn that an optimizer steps? Hooks on torch.optim tell observers and participants."""

import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from threading import RLock
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
    # Once for good: a handle cannot be removed while the hooks run.
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
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
    for participant in _participants:
        participant.after_step(optimizer)
    for observer in _observers:
        observer.taken(optimizer)
