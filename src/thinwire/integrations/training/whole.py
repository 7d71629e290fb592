"""The whole model around the parameters that are followed: what joins it later, and states that are loaded into it."""

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from thinwire.integrations.training.drift import digest
from thinwire.integrations.training.gradients import local


@final
class Whole:
    """A model, and the optimizers that train it. Hooks hold it and `check`, a method, weakly.

    Parameters that come to need a gradient later are reduced by nobody; those that need one now and are not `followed`
    are somebody else's. `check` is called before the first forward pass with gradients after a state has been loaded:
    DDP does not survive an error in its backward. `before`: what there was before a state was loaded, until `accept`.
    """

    def __init__(self, model: nn.Module, followed: Collection[nn.Parameter], check: Callable[[], None]) -> None:
        self._model, self._parameters = weakref.ref(model), list(followed)
        self._modules = [weakref.ref(module) for module in model.modules()]
        self._known = {id(p) for p in (*followed, *(p for p in model.parameters() if p.requires_grad))}
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.before: tuple[list[torch.optim.Optimizer], Tensor] | None = None
        self._forward: Any = None
        self._check = weakref.WeakMethod(check)
        self._note = Hook(self._note_loading)
        self._handles = [module.register_load_state_dict_pre_hook(self._note) for module in model.modules()]

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at what is loaded into this optimizer, too."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._handles.append(optimizer.register_load_state_dict_pre_hook(self._note))

    def end(self) -> None:
        """Let go of the model."""
        while self._handles:
            self._handles.pop().remove()
        self.accept()
        self._parameters = []

    def late(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the names of those that this optimizer has a gradient for, and that nobody reduces."""
        held = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in self._known]
        new = {id(p) for p in held if p.grad is not None} if held else set()
        if not new:
            return []
        alive = [module for each in self._modules if (module := each()) is not None]
        # The whole model comes last: a parameter's name there is what counts.
        inside = {id(p): name for module in reversed(alive) for name, p in module.named_parameters()}
        self._known |= new - inside.keys()  # of another model
        return [inside[id(p)] for p in held if id(p) in new and id(p) in inside]

    @property
    def loaded(self) -> bool:
        """Whether what a state was loaded into is not what it was, since `accept`. Weights may have been put back."""
        return self.before is not None and not torch.equal(self.before[1], self._digests(self.before[0]))

    def accept(self) -> None:
        """Accept what has been loaded."""
        if self.before is not None:
            self.before = None
            self._forward.remove()

    def _note_loading(self, *_: object) -> None:
        """Remember what there is before the first state is loaded."""
        model = self._model()
        if self.before is None and model is not None:
            optimizers = list(self._optimizers)
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
