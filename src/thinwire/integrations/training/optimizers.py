"""How do we learn that an optimizer steps, and of what joins a model or is loaded into it? By hooks of torch's."""

import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from threading import RLock
from types import CodeType, FrameType
from typing import Any, Generic, Protocol, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from thinwire.integrations.training.drift import digest
from thinwire.integrations.training.gradients import local

T = TypeVar("T")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Observer(Protocol):
    """Learns of the gradients that optimizers take."""

    def about_to_take(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients that are in place before the optimizer takes them. An exception prevents it."""

    def taken(self, optimizer: torch.optim.Optimizer, *, evaluated: bool = False) -> None:
        """Note that the optimizer takes its gradients; with `evaluated`, its step, or a hook after it, goes on."""


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
    steps = running(_STEP)
    return len(steps) > 1 and [held["args"][0] for held in steps].count(optimizer) > 1


def scaled_here() -> bool:
    """Whether a GradScaler that is enabled takes this hook's step, by the stack."""
    return any(held["self"].is_enabled() for held in running(_SCALED_STEP))


def running(code: CodeType) -> Sequence[Mapping[str, Any]]:
    """Return the local variables of this code's calls on the stack, the innermost first."""
    found = list[Mapping[str, Any]]()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            found.append(frame.f_locals)
        frame = frame.f_back
    return found


def step_of(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return the step of this class, or the base class's that it calls, without what torch wraps around it."""
    return _stepping(kind)[1]  # type: ignore[arg-type]  # classes can be hashed, too


@cache
def _stepping(kind: type[torch.optim.Optimizer]) -> tuple[Any, Callable[..., Any]]:
    """Return the class that has the step of `kind`, and that step."""
    there = [(each, inspect.unwrap(vars(each)["step"])) for each in kind.__mro__ if "step" in vars(each)]
    called = (set(getattr(getattr(step, "__code__", None), "co_names", ())) for _, step in there[:-1])
    own = (found for found, names in zip(there, called, strict=False) if not names.issuperset({"super", "step"}))
    return next(own, there[-1])  # others go on to their base class's


_STEP = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__  # what torch wraps around any step
_SCALED_STEP = torch.amp.GradScaler.step.__code__


def skipped_by_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the GradScaler has told this fused optimizer to skip a step whose gradients are not finite."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


class _Alive(Generic[T]):
    """Who is told, for as long as they live. The tuple is replaced, never added to: Hogwild's threads step meanwhile.

    A WeakSet drops who is dead when one thread has gone through it, also while another one begins to.
    """

    def __init__(self) -> None:
        self._lock, self._members = RLock(), tuple[weakref.ref[T], ...]()

    @property
    def all(self) -> list[T]:
        return [member for each in self._members if (member := each()) is not None]

    def add(self, member: T) -> None:
        with self._lock:
            self._members = tuple(map(weakref.ref, [each for each in self.all if each is not member] + [member]))

    def discard(self, member: T) -> None:
        with self._lock:
            self._members = tuple(weakref.ref(each) for each in self.all if each is not member)


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
    had_gradients.pop(optimizer, None)
    evaluates = callable(_closure(args, kwargs))
    for observer in () if evaluates else _observers.all:
        observer.about_to_take(optimizer)
    before: Any = optimizer._optimizer_step_pre_hooks
    after: Any = optimizer._optimizer_step_post_hooks
    alone = type(optimizer).__module__.startswith("torch.") and not (before or after)
    if alone and not (evaluates or _participants.all):
        return
    # our hooks are the last before the step and the first after it
    if optimizer not in _hooks:
        owner, own = _stepping(type(optimizer))  # type: ignore[arg-type]
        if owner is not type(optimizer):
            owner.__new__(owner)._patch_step_function()  # torch does it only when the class is instantiated
        begin = optimizer.register_step_pre_hook(torch.compiler.disable(_begin))
        end = optimizer.register_step_post_hook(torch.compiler.disable(_end))
        _hooks[optimizer] = begin.id, end.id, own
    first, last, _ = _hooks[optimizer]
    before.move_to_end(first)
    after.move_to_end(last, last=False)


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


_hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int, Callable[..., Any]]] = (
    weakref.WeakKeyDictionary()
)
"""By optimizer, our hooks before and after its class's own step, and that step."""

had_gradients: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[Tensor]] = weakref.WeakKeyDictionary()
"""What an optimizer takes in the step that it is in: a subclass or a hook may zero gradients before that is over."""


def _is_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step whose hook calls this is its class's own, not that of a subclass which goes on to it."""
    steps = running(_STEP)
    return not steps or inspect.unwrap(steps[0]["func"]) is _hooks[optimizer][2]


def _begin(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    if not _is_own(optimizer):
        return None
    participants = _participants.all
    for participant in participants:
        participant.before_step(optimizer)
    closure = _closure(args, kwargs)
    if callable(closure):
        return args[:1], kwargs | {"closure": partial(_evaluate, closure, optimizer)}
    _apply(optimizer, participants)
    return None


def _apply(optimizer: torch.optim.Optimizer, participants: Sequence[Participant]) -> None:
    had_gradients[optimizer] = {p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    for participant in participants:
        participant.apply(optimizer)


def _end(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not _is_own(optimizer):
        return
    for participant in _participants.all:
        participant.after_step(optimizer)
    after: Any = optimizer._optimizer_step_post_hooks
    for observer in _observers.all if len(after) > 1 else ():  # a hook that comes later may raise
        observer.taken(optimizer, evaluated=True)


def _evaluate(closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Any:
    try:
        loss = closure()
        for observer in _observers.all:
            observer.about_to_take(optimizer)
    except BaseException:
        for participant in _participants.all:
            participant.give_back()
        raise
    _apply(optimizer, _participants.all)
    for observer in _observers.all:
        observer.taken(optimizer, evaluated=True)
    return loss


def _after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for observer in () if nested(optimizer) else _observers.all:
        observer.taken(optimizer)


@final
class Whole:
    """A model, and the optimizers that train it. Hooks hold it and `check`, a method, weakly.

    Parameters that come to need a gradient later are reduced by nobody; those that need one now and are not `followed`
    are somebody else's. `check` is called before the first forward pass with gradients after a state has been loaded:
    DDP does not survive an error in its backward. `optimizers`: those it follows. `before`: what there was before a
    state was loaded, until `accept`.
    """

    def __init__(self, model: nn.Module, followed: Collection[nn.Parameter], check: Callable[[], None]) -> None:
        self._model, self._parameters = weakref.ref(model), list(followed)
        self._modules = [weakref.ref(module) for module in model.modules()]
        self._known = {id(p) for p in (*followed, *(p for p in model.parameters() if p.requires_grad))}
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.before: tuple[list[torch.optim.Optimizer], Tensor] | None = None
        self._forward: Any = None
        self._check = weakref.WeakMethod(check)
        self._note = Hook(self._note_loading)
        self._handles = [module.register_load_state_dict_pre_hook(self._note) for module in model.modules()]

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at what is loaded into this optimizer, too."""
        self.optimizers.add(optimizer)
        self._handles.append(optimizer.register_load_state_dict_pre_hook(self._note))

    def end(self) -> None:
        """Let go of the model."""
        while self._handles:
            self._handles.pop().remove()
        self.accept()
        self._parameters = []

    def late(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the names of those that this optimizer has a gradient for, and that nobody reduces."""
        held: list[nn.Parameter] = []
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in self._known and p.grad is not None:
                    held.append(p)
        if not held:
            return []
        alive = [module for each in self._modules if (module := each()) is not None]
        # The whole model comes last: a parameter's name there is what counts.
        inside = {id(p): name for module in reversed(alive) for name, p in module.named_parameters()}
        self._known.update(id(p) for p in held if id(p) not in inside)  # of another model
        return [inside[id(p)] for p in held if id(p) in inside]

    @property
    def loaded(self) -> bool:
        """Whether what a state was loaded into is not what it was, since `accept`. Weights may have been put back."""
        return self.before is not None and not torch.equal(self.before[1], self._digests(self.before[0]))

    def doubt(self) -> None:
        """Take what there is for loaded, whatever is put back later."""
        self._note_loading()
        if self.before is not None:
            self.before = self.before[0], torch.empty(0, dtype=torch.int64, device="cpu")

    def accept(self) -> None:
        """Accept what has been loaded."""
        if self.before is not None:
            self.before = None
            self._forward.remove()

    def _note_loading(self, *_: object) -> None:
        """Remember what there is before the first state is loaded."""
        model = self._model()
        if self.before is None and model is not None:
            optimizers = list(self.optimizers)
            self.before = optimizers, self._digests(optimizers)
            self._forward = model.register_forward_pre_hook(Hook(self._before_forward), prepend=True)

    def _before_forward(self, model: nn.Module, inputs: object) -> None:
        check = self._check()
        if check is not None and torch.is_grad_enabled():
            check()

    def _digests(self, optimizers: Sequence[torch.optim.Optimizer]) -> Tensor:
        states = [o.state.get(p, {}) for o in optimizers for group in o.param_groups for p in group["params"]]
        held = [x for state in states for x in state.values() if isinstance(x, Tensor)]
        return torch.stack([digest(local(x)).cpu() for x in (*self._parameters, *held)])


@final
class Hook:
    """A hook that calls a method for as long as its object lives. It stays behind when the model is copied."""

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> None:
        """Call the method."""
        method = self._method and self._method()
        if method:
            method(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()
