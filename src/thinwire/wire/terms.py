"""What a server and its trainers must have in common. A refused trainer is told which setting differs, and not the
server's value: the server logs that.
"""

from collections.abc import Mapping

from torch import nn

from thinwire.codecs import Codec
from thinwire.errors import MomentumError
from thinwire.memories import FadingMomentum, MomentumCorrection, OrthogonalMomentum
from thinwire.reducer import Reducer
from thinwire.reducer.base import words
from thinwire.wire.entries import entries, frozen, shards
from thinwire.wire.layout import Layout

_SHOWN = 400  # characters of a difference, at most


def difference(server: Mapping[str, str], trainer: Mapping[str, str]) -> tuple[str, str] | None:
    """Return in what the two differ first: as the trainer is told, and as the server logs it; None if they agree."""
    for key in {**server, **trainer}:
        mine, theirs = server.get(key, "absent"), trainer.get(key, "absent")
        if mine != theirs:
            same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), 0)
            start = max(0, same - _SHOWN // 2)
            it = f"{key} differs: this trainer has {_cut(theirs)}" if key in trainer else "this trainer lacks something"
            return (
                f"{it}; use the server's, which is in its log",
                f"{key} differs: the server has {_cut(mine, start)}, this trainer has {_cut(theirs, start)}",
            )
    return None


def _cut(text: str, start: int = 0) -> str:
    return f"{'… ' * bool(start)}{text[start : start + _SHOWN]}{' …' * (len(text) > start + _SHOWN)}"


def layouts(model: nn.Module, recipe: Reducer, down: Codec | None, *, servers: int, fetch_rows: bool) -> list[Layout]:
    """Return the layout of each server's parameters.

    Raises ValueError without rows to fetch and for too many servers, TypeError for a recipe without a codec, and
    MomentumError for one that needs the trainer's optimizer.
    """
    check_memories(recipe)
    parameters = entries(model)
    if fetch_rows and not any(each.rows for each in parameters):
        raise ValueError(
            "fetch_rows=True, and the model has no rows to fetch: make its embeddings with sparse=True, or drop it"
        )
    same = {"recipe": words(recipe), "down": words(down), "fetch_rows": str(fetch_rows)}
    same["what is frozen (its hash)"] = frozen(model)
    found = []
    for i, mine in enumerate(shards(parameters, servers)):
        place = {"the place among the servers": f"{i} of {servers}"}
        agreed = same | place | {f"parameter {each.name}": str(each) for each in mine}
        found.append(Layout(mine, recipe, down, fetch_rows=fetch_rows, agreed=agreed))
    return found


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
