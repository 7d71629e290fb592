"""What a server and its trainers must have in common. A refused trainer is told which setting differs, and not the
server's value: the server logs that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, final

from torch import nn

from thinwire.codecs import Codec
from thinwire.errors import MomentumError
from thinwire.memories import FadingMomentum, MomentumCorrection, OrthogonalMomentum
from thinwire.reducer import Reducer
from thinwire.reducer.base import words
from thinwire.wire.layout import Entry, Layout, entries, frozen, shards

_SHOWN = 400  # characters of a difference, at most


class Difference(NamedTuple):
    """In what a server and a trainer differ: as the trainer is told, and as the server logs it."""

    told: str
    logged: str


def difference(server: Mapping[str, str], trainer: Mapping[str, str]) -> Difference | None:
    """Return the first thing in which the two differ, and what to do; None if they agree."""
    for key in {**server, **trainer}:
        mine, theirs = server.get(key, "absent"), trainer.get(key, "absent")
        if mine != theirs:
            same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), 0)
            start = max(0, same - _SHOWN // 2)
            it = f"{key} differs: this trainer has {_cut(theirs)}" if key in trainer else "this trainer lacks something"
            return Difference(
                f"{it}; use the server's, which is in its log",
                f"{key} differs: the server has {_cut(mine, start)}, this trainer has {_cut(theirs, start)}",
            )
    return None


def _cut(text: str, start: int = 0) -> str:
    return f"{'… ' * bool(start)}{text[start : start + _SHOWN]}{' …' * (len(text) > start + _SHOWN)}"


@final
@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a server and its trainers must have in common: of which model, and how updates and answers are encoded.

    `parameters` are those of each server. `frozen` is a hash of what is not trained.
    """

    recipe: Reducer
    down: Codec | None
    fetch_rows: bool
    parameters: Sequence[Sequence[Entry]]
    frozen: str = "none"

    @classmethod
    def of(cls, model: nn.Module, recipe: Reducer, down: Codec | None, *, servers: int, fetch_rows: bool) -> Self:
        """Return those of this model. Raises ValueError for rows to fetch of one without, and for too many servers."""
        parameters = entries(model)
        if fetch_rows and not any(each.rows for each in parameters):
            raise ValueError(
                "fetch_rows=True, and the model has no rows to fetch: make its embeddings with sparse=True, or drop it"
            )
        parts = shards(parameters, servers)
        return cls(recipe=recipe, down=down, fetch_rows=fetch_rows, parameters=parts, frozen=frozen(model))

    def layout(self, index: int) -> Layout:
        """Return the layout of a server's parameters, ready for use. Raises TypeError for a recipe without codec."""
        made = Layout(self.parameters[index], fetch_rows=self.fetch_rows)
        made.check(self.recipe)
        made.compile(self.recipe, self.down)
        return made

    def agreed(self, index: int) -> dict[str, str]:
        """Return them in words, for the server of this number."""
        return {
            "recipe": words(self.recipe),
            "down": words(self.down),
            "fetch_rows": str(self.fetch_rows),
            "what is frozen (its hash)": self.frozen,
            "the place among the servers": f"{index} of {len(self.parameters)}",
        } | {f"parameter {each.name}": str(each) for each in self.parameters[index]}


def check_memories(recipe: Reducer) -> None:
    """Raise MomentumError for a recipe whose momentum needs the trainer's optimizer, which a server's trainer lacks."""
    for memory in (part for each in recipe.memories() for part in each.parts):
        if isinstance(memory, (FadingMomentum, OrthogonalMomentum)):
            raise MomentumError(
                f"this recipe's momentum fades ({type(memory).__name__}), which needs an optimizer on every worker: "
                "use a recipe with error feedback or with momentum correction"
            )
        if isinstance(memory, MomentumCorrection) and memory.momentum is None:
            raise MomentumError("this recipe corrects momentum: give it momentum=, and the server's optimizer none")
