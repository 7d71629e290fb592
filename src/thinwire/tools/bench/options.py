"""What the user asked of a bench run, checked."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.tools.bench.methods import METHODS
from thinwire.tools.cluster.link import Rate, parse_rate
from thinwire.tools.cluster.workers import in_group, world_size
from thinwire.tools.inputs import BadInput, names, numbers
from thinwire.tools.problems import PROBLEMS


class Line(NamedTuple):
    """What a row trains with: a recipe at a density, and the share of activations that crosses a pipeline's cuts."""

    recipe: str
    density: float
    boundary: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run. Raises BadInput where something cannot be done."""

    workers: int
    rate: Rate | None
    recipes: tuple[str, ...]
    densities: tuple[float, ...]
    steps: int
    model: str
    data: Path | None
    scale: float
    seed: int
    target: float | None
    extend: float
    pipeline: int = 1
    micro_batches: int = 4
    boundaries: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise BadInput(f"--workers is {self.workers}; an exchange takes two: give --workers 2 or more")
        if self.steps < 1:
            raise BadInput(f"--steps is {self.steps}; expected 1 or more")
        if self.target is not None and not math.isfinite(self.target):
            raise BadInput(f"--target is {self.target}; expected a loss")
        if abs(self.seed) >= 2**63:
            raise BadInput(f"--seed is {self.seed}; expected less than 2^63")
        if not 1 <= self.extend < math.inf:
            raise BadInput(f"--extend is {self.extend:g}; expected 1 (stop at --steps) or more")
        for density in self.densities:
            _check_density(density, "--density")
        for recipe in self.recipes:
            _check(*_named(recipe))
        self._check_embeddings()
        self._check_pipeline()

    @property
    def every(self) -> int:
        """Steps between two looks at the held-out loss."""
        return max(1, self.steps // 15)

    def rows(self) -> list[Line]:
        """Return what each row trains with, dense first because the others are held against it."""
        recipes = sorted(self.recipes, key=lambda name: name != "dense")
        lines = (
            Line(_named(recipe)[0], density, boundary)
            for recipe in recipes
            for density in self._densities(*_named(recipe))
            for boundary in sorted(self.boundaries, reverse=True)
        )
        return list(dict.fromkeys(lines))

    def _check_embeddings(self) -> None:
        names = [_named(recipe)[0] for recipe in self.recipes]
        unable = [name for name in names if not METHODS[name].sparse_embeddings]
        if self.model in PROBLEMS and PROBLEMS[self.model].sparse_embeddings and unable:
            able = ",".join(name for name in names if name not in unable)
            raise BadInput(
                f"{unable[0]} cannot reduce the sparse gradients of {self.model}; try --recipes {able or 'dense'}"
            )

    def _check_pipeline(self) -> None:
        if self.pipeline < 1 or self.workers % self.pipeline:
            raise BadInput(
                f"--pipeline {self.pipeline} does not divide --workers {self.workers} into replicas of stages"
            )
        if self.micro_batches < 1:
            raise BadInput(f"--micro-batches is {self.micro_batches}; expected 1 or more")
        for boundary in self.boundaries:
            _check_density(boundary, "--boundary")
        if self.pipeline == 1 and self.boundaries != (1.0,):
            raise BadInput("--boundary is about a model's cuts; give --pipeline STAGES as well")
        unable = [name for name, _ in map(_named, self.recipes) if not METHODS[name].pipelines]
        if self.pipeline > 1 and unable:
            raise BadInput(f"{unable[0]} does not follow a pipeline's steps; name a recipe instead")

    def _densities(self, name: str, own: float | None) -> tuple[float, ...]:
        """Return those asked for with the recipe, else the method's own, else the run's."""
        if not METHODS[name].sparse:
            return (1.0,)
        own = METHODS[name].density if own is None else own
        return self.densities if own is None else (own,)


def read(
    *,
    workers: int | None,
    link: str | None,
    recipes: str,
    densities: str,
    pipeline: int = 1,
    boundaries: str | None = None,
    **others: Any,
) -> Options:
    """Read options from text. Under torchrun the group decides on workers and link. Raises BadInput."""
    if in_group():
        if workers not in (None, world_size()) or link not in (None, "none"):
            raise BadInput("under torchrun the group has its size and its network: leave --workers and --link out")
        workers, link = world_size(), "none"
    return Options(
        workers=2 if workers is None else workers,
        rate=parse_rate("100mbit" if link is None else link),
        recipes=names(recipes, "--recipes", "dense,topk"),
        densities=numbers(densities, "--density"),
        pipeline=pipeline,
        boundaries=numbers(boundaries or ("1" if pipeline == 1 else "1,0.05"), "--boundary"),
        **others,
    )


def _named(recipe: str) -> tuple[str, float | None]:
    """Read ``topk`` or ``topk:0.01``."""
    name, colon, density = recipe.partition(":")
    try:
        return name, float(density) if colon else None
    except ValueError as error:
        raise BadInput(f"--recipes {recipe!r}: expected a density behind the colon, such as topk:0.01") from error


def _check(name: str, density: float | None) -> None:
    if name not in METHODS:
        raise BadInput(f"unknown recipe {name!r}; expected some of {', '.join(METHODS)}")
    if density is not None:
        if not METHODS[name].sparse:
            raise BadInput(f"--recipes {name}:{density:g}: {name} takes no density")
        _check_density(density, f"--recipes {name}:")


def _check_density(density: float, option: str) -> None:
    if not 0 < density <= 1:
        raise BadInput(f"{option} {density:g} is no share of the elements; expected above 0 and at most 1")
