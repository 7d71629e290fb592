"""What a method is."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Literal, final

from thinwire.checked import checked
from thinwire.memories import AppliedMomentum, MomentumCorrection
from thinwire.reducer import Compressed, MinimumSize, Reducer, WarmUp, WithRows
from thinwire.schedules import Density

RecipeFactory = Callable[..., Reducer]


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to exchange gradients, under the one name used everywhere.

    Args:
        name: The one name used everywhere.
        recipe: Returns a new reducer.
        summary: What it is, in a line.
        sends: What travels each step.
        paper: Where it comes from; empty if it is ours.
        share_of: What a density is a share of. Only densities of the same thing can be compared.
        warms_up: Whether its paper starts at a higher density.
        conserving: Whether what is not delivered stays in the residual, so that no gradient is lost.
        benched: Whether it is a row of `thinwire bench`, where `dense` is plain DDP itself.
        planned: Whether the planner may choose it.
    """

    name: str
    recipe: RecipeFactory
    summary: str
    sends: str
    paper: str = ""
    share_of: Literal["elements", "blocks", "frequencies"] = "elements"
    warms_up: bool = False
    conserving: bool = True
    benched: bool = True
    planned: bool = False

    @property
    def density(self) -> float | None:
        """The recipe's default density, or None if it takes none."""
        return float(signature(self.recipe).parameters["density"].default) if self.takes("density") else None

    @property
    def momentum(self) -> bool:
        """Whether it applies the optimizer's momentum itself, so that `attach` needs `optimizer=`."""
        parts = (part for memory in self.make().memories() for part in memory.parts)
        return any(isinstance(part, MomentumCorrection | AppliedMomentum) for part in parts)

    @property
    def summed(self) -> bool:
        """Whether partial sums travel. Otherwise every rank gets what every other rank sent."""
        recipe = self.make()
        return isinstance(recipe, WarmUp) or _large(recipe).exchange.transport != "all_gather"

    @property
    def rows(self) -> bool:
        """Whether it also sums the rows of sparse embeddings. Otherwise DDP sends them."""
        return isinstance(self.make(), WithRows)

    def takes(self, option: str) -> bool:
        """Return whether the recipe has an option of that name."""
        return option in signature(self.recipe).parameters

    def make(self, density: Density | None = None) -> Reducer:
        """Return a new reducer, of that density where the method takes one."""
        return self.recipe() if density is None or self.density is None else self.recipe(density=density)

    def large(self, density: Density | None = None) -> Compressed:
        """Return the codec and exchange that large tensors take at `density`.

        Raises:
            TypeError: If there is not one of each.
        """
        return _large(self.make(density))


def _large(reducer: Reducer) -> Compressed:
    match reducer:
        case Compressed():
            return reducer
        case MinimumSize(large=inner) | WithRows(dense=inner):
            return _large(inner)
    raise TypeError(f"{type(reducer).__name__} is not one codec and one exchange; expected Compressed")
