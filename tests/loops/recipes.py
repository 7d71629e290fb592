"""The recipes that the loops run with, beside plain DDP."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.memories import MomentumCorrection
from thinwire.recipes import METHODS, Method
from thinwire.reducer import Reducer

ALL = 1 << 60
"""A `minimum_size` above the size of every tensor."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A method to attach, made with `options`, by the name of the row.

    `everything`: it sends every gradient whole, so it must do what plain DDP does.
    """

    name: str
    method: Method
    options: Mapping[str, Any]
    everything: bool = True

    @property
    def momentum(self) -> bool:
        """Whether it takes over momentum and so needs the optimizer."""
        return self.method.momentum

    def reducer(self, *, optimized: bool) -> Reducer:
        """Return a new recipe. Momentum is 0 if there is no optimizer to take it from."""
        found = self.method.recipe(**self.options)
        for memory in found.memories():
            if isinstance(memory, MomentumCorrection) and not optimized:
                memory.momentum = 0.0
        return found


def _way(method: str, how: str = "", *, everything: bool = True, **options: Any) -> Way:
    name = f"{method}, {how}" if how else method
    return Way(name=name, method=METHODS[method], options=options, everything=everything)


WAYS: tuple[Way, ...] = (
    _way("dense"),
    _way("topk", "density 1", density=1.0, minimum_size=1),
    _way("gtopk", "density 1", density=1.0, minimum_size=1),
    _way("dgc", "density 1", density=1.0, minimum_size=1),
    _way("dgc", "uncompressed", minimum_size=ALL),
    _way("topk", "density 0.01", everything=False, density=0.01, minimum_size=1),
    _way("dgc", "density 0.01", everything=False, density=0.01, minimum_size=1),
)

BY_NAME: dict[str, Way] = {way.name: way for way in WAYS}
