"""Where a model's parameters are, and that they stay there: views of flat vectors, which are read and written whole."""

from typing import final
from weakref import WeakValueDictionary

from torch import Tensor, nn

from thinwire.errors import StateError
from thinwire.wire.entries import named
from thinwire.wire.layout import Layout

_held = WeakValueDictionary[int, Tensor]()
"""The parameters of this process that are served or trained, by id."""


@final
class Places:
    """The places of the parameters in the user's model: all but rows become views of `flats`, one for each dtype."""

    def __init__(self, layout: Layout, model: nn.Module) -> None:
        own = named(model)
        self.parameters = {each.name: own[each.name] for each in layout.parameters}
        if taken := next((name for name, p in self.parameters.items() if id(p) in _held), None):
            raise ValueError(
                f"{taken} is in use by another serve or connect of this process: give each a model of its own"
            )
        self.flats, views = layout.flats(next(iter(self.parameters.values())).device)
        for name, view in views.items():
            view.copy_(self.parameters[name].detach())
            self.parameters[name].data = view
        self._storage = {name: p.detach() for name, p in self.parameters.items()}  # kept, or its address may come again

    def claim(self) -> None:
        """Reserve these parameters: no other serve or connect of this process may use them, until `release`."""
        _held.update({id(p): p for p in self.parameters.values()})

    def release(self) -> None:
        """Undo `claim`."""
        for p in self.parameters.values():
            _held.pop(id(p), None)

    def check(self, module: nn.Module) -> None:
        """Raise StateError unless the model, or this replica of it, still has its parameters where they were."""
        found = named(module)
        for name, at in self._storage.items():
            p = found.get(name)
            wrong = "is gone" if p is None else "is frozen" if not p.requires_grad else ""
            if wrong or p is None or p.data_ptr() != at.data_ptr() or p.dtype is not at.dtype:
                raise StateError(
                    f"{name} {wrong or 'has moved'} since serve or connect, so the gradients that are sent are no "
                    "longer those that are computed. Change dtype and device, freeze, and load with assign=True before "
                    "serve or connect; or load in place"
                )
