"""What optimizers do: every step of every torch.optim optimizer, told to those who want to know."""

import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Listener(Protocol):
    """Who is told of steps, for as long as it lives."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that a step begins. What is raised prevents it."""

    def ready(self, optimizer: torch.optim.Optimizer, *, evaluated: bool) -> None:
        """Note that the gradients it takes are in place; `evaluated` by a closure, which may be called again."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the step was taken."""

    def broke_off(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the closure has raised."""


def listen(listener: Listener) -> None:
    """Tell `listener` of every optimizer's steps."""
    _register()
    _listeners.add(listener)


def stop_listening(listener: Listener) -> None:
    """Tell it no longer."""
    _listeners.discard(listener)


def skipped_by_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler has left it to this fused optimizer to skip a step whose gradients are not finite."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


@cache
def _register() -> None:
    # Once for good: a handle cannot be removed while the hooks run.
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    for listener in _alive():
        listener.before_step(optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if callable(closure):
        return args[:1], kwargs | {"closure": partial(_evaluate, closure, optimizer)}
    for listener in _alive():
        listener.ready(optimizer, evaluated=False)
    return args, kwargs


def _evaluate(closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Any:
    try:
        loss = closure()
    except BaseException:
        for listener in _alive():
            listener.broke_off(optimizer)
        raise
    for listener in _alive():
        listener.ready(optimizer, evaluated=True)
    return loss


def _after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for listener in _alive():
        listener.after_step(optimizer)


def _alive() -> Iterator[Listener]:
    return iter(list(_listeners))
