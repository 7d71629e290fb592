"""What a parameter's .grad is made of: a mean that was reduced before, and what this rank has added since.

Gradients that accumulate over several reductions hold both, and only the second is to be sent again.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn


@final
class Gradients:
    """Looks at every .grad before backward adds to it.

    `before` is called first. `thrown_away` is called with the name of a parameter whose reduced mean is found to be
    gone: set to None, or to zeros in place.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], before: Callable[[], None], thrown_away: Callable[[str], None]
    ) -> None:
        self._parameters, self._before, self._thrown_away = parameters, before, thrown_away
        self._added: set[str] = set()
        self._reduced: set[str] = set()
        self._empty: set[str] = set()
        self._means: dict[str, Tensor] = {}
        self.accumulates = False
        """Whether a mean has ever been found in place when backward added to it."""
        me = weakref.ref(self)  # or the parameters would keep what they are reduced by alive
        self._nodes = [_accumulator(p) for p in parameters.values()]
        self._handles = [
            node.register_prehook(partial(_before_adding, me, name))
            for name, node in zip(parameters, self._nodes, strict=True)
        ]

    def close(self) -> None:
        """Look no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    @property
    def added(self) -> bool:
        """Whether this rank has added anything since the last reduction."""
        return bool(self._added)

    def adds_to_all(self, names: Iterable[str]) -> bool:
        """Whether this rank has added to each of these since the last reduction."""
        return self._added.issuperset(names)

    def adds_to(self, name: str) -> bool:
        """Whether this rank has added to this .grad since the last reduction, so that it has been looked at."""
        return name in self._added

    def forget(self, names: Iterable[str]) -> None:
        """Remember these means no longer: an optimizer has taken them, and what is in place may be anybody's."""
        self._reduced.difference_update(names)
        self._drop_means(names)

    def note_replaced(self, name: str) -> None:
        """Remember that this rank's gradient has come in the place of a mean, past autograd's node."""
        if name in self._reduced:
            self._reduced.discard(name)
            self._means.pop(name, None)
            self._thrown_away(name)
        self._added.add(name)

    def look_at_rest(self) -> None:
        """Look at what this rank has not added to."""
        for name in self._reduced - self._added:
            self.look(name)

    def look(self, name: str) -> None:
        """See what has become of the mean in this .grad."""
        if name not in self._reduced:
            return
        held = self._parameters[name].grad
        self.accumulates |= held is not None
        if held is None or not (name in self._empty or _nonzero(held)):
            self._reduced.discard(name)
            self._means.pop(name, None)
            self._thrown_away(name)
        elif name not in self._means and not held.is_sparse:
            self._means[name] = in_memory_order(held, self._parameters[name]).clone()

    def take_out(self, names: Sequence[str], gradients: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Subtract the means from these flat gradients, and return what to add again, each with its mean."""
        if not self._means:
            return []
        found = [(g, self._means[name]) for name, g in zip(names, gradients, strict=True) if name in self._means]
        for gradient, mean in found:
            gradient.sub_(mean)
        return found

    def note_reduced(self, names: Iterable[str], empty: Collection[str] = ()) -> None:
        """Remember that these .grad hold a mean now, whole and alone; some a mean of nothing but zeros."""
        self._reduced.update(names)
        self._added.difference_update(names)
        self._drop_means(names)
        self._empty.difference_update(names)
        self._empty.update(empty)

    def _drop_means(self, names: Iterable[str]) -> None:
        for name in names if self._means else ():
            self._means.pop(name, None)


def in_memory_order(x: Tensor, p: nn.Parameter) -> Tensor:
    """Return `x`, shaped like `p`, flat and in the order in which `p`, and its gradient in a bucket, lies in memory."""
    x, like = x.detach(), torch.empty_like(p, dtype=x.dtype, device="meta")
    if x.stride() != like.stride():
        x = torch.empty_like(p, dtype=x.dtype).detach().copy_(x)
    return x.as_strided((p.numel(),), (1,), x.storage_offset())


def shaped_like(p: nn.Parameter, flat: Tensor) -> Tensor:
    """Undo `in_memory_order`, as a view."""
    return flat.as_strided(p.shape, torch.empty_like(p, device="meta").stride(), flat.storage_offset())


def _accumulator(p: nn.Parameter) -> Any:
    """Return autograd's node that adds to `p.grad`. Unlike hooks on `p`, it is not run by torch.autograd.grad."""
    with torch.enable_grad():
        node = p.view_as(p).grad_fn
    assert node is not None
    return node.next_functions[0][0]


def _before_adding(gradients: "weakref.ref[Gradients]", name: str, grads: object) -> None:
    me = gradients()
    if me is not None:
        me._before()
        me.look(name)
        me._added.add(name)


def _nonzero(x: Tensor) -> bool:
    values = x._values() if x.is_sparse else x
    return bool(values.any())
