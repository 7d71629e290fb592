"""What the loops are run with, beside plain DDP."""

from collections.abc import Callable
from dataclasses import dataclass

import thinwire as tw
from thinwire.memories import MomentumCorrection
from thinwire.reducer import Reducer

ALL = 1 << 60
"""A `minimum_size` below which every tensor is."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A recipe to attach, by name. `everything`: it sends every gradient whole, so it must do what plain DDP does.

    `momentum`: it takes momentum over, so it is given the optimizer.
    """

    name: str
    recipe: Callable[[], Reducer]
    everything: bool = True
    momentum: bool = False

    def reducer(self, *, optimized: bool) -> Reducer:
        """Return a new recipe; momentum is 0 where there is no optimizer to take it from."""
        found = self.recipe()
        for memory in found.memories():
            if isinstance(memory, MomentumCorrection) and not optimized:
                memory.momentum = 0.0
        return found


WAYS: tuple[Way, ...] = (
    Way(name="dense", recipe=tw.recipes.dense),
    Way(name="topk, density 1", recipe=lambda: tw.recipes.topk(density=1.0, minimum_size=1)),
    Way(name="gtopk, density 1", recipe=lambda: tw.recipes.gtopk(density=1.0, minimum_size=1)),
    Way(name="dgc, density 1", recipe=lambda: tw.recipes.dgc(density=1.0, minimum_size=1), momentum=True),
    Way(name="dgc, uncompressed", recipe=lambda: tw.recipes.dgc(minimum_size=ALL), momentum=True),
    Way(name="topk, density 0.01", recipe=lambda: tw.recipes.topk(density=0.01, minimum_size=1), everything=False),
    Way(
        name="dgc, density 0.01",
        recipe=lambda: tw.recipes.dgc(density=0.01, minimum_size=1),
        everything=False,
        momentum=True,
    ),
)

BY_NAME: dict[str, Way] = {way.name: way for way in WAYS}
