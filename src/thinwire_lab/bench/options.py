"""What the user asked of a bench run, checked."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from thinwire.schedules import Schedule, exponential_warmup
from thinwire_lab.bench.methods import BENCHED, GATHERS, Benched
from thinwire_lab.bench.results import Setting
from thinwire_lab.cluster.link import Rate, parse_rate
from thinwire_lab.cluster.workers import in_group, world_size
from thinwire_lab.inputs import BadInput, check_density, counts, names, numbers
from thinwire_lab.problems import PROBLEMS
from thinwire_lab.problems.optimizers import check_optimizer

DEFAULT = ("dense", "torch_bf16", "bf16", "torch_powersgd", "topk", "dgc", "dragonn")
"""The rows of a run for which the user names none."""
_ON_SHARDS = ("dense", "topk", "dgc", "powersgd", "fading")
"""The same with --shard; `fading` only where momentum is Adam's."""
_WITH_OUTER: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        name: ("dense", best, "diloco", "streaming_diloco", "muloco", "sparseloco")
        for name, best in (("sgd", "dgc"), ("adamw", "orthogonal"), ("muon", "bf16"))
    }
)
"""The same with --outer, by optimizer: the best of the methods that exchange at each step, and all others."""
_SERVED = ("dense", "topk", "dct_dp")
"""The same with --servers."""
_WITHOUT_REPLICAS = ("dense", "topk", "qsgd", "signsgd")
"""The same where the only island has all workers."""
_NATIVE = ("dense", "fsdp_bf16")
"""What rows with --gathers are beside."""
_SECOND_ACT: dict[str, Any] = {
    "recipes": ("dense", "bf16", "torch_powersgd", "topk", "fading"),
    "steps": 120,
    "optimizer": "adamw",
}
"""What the default run goes on with. The whole takes some ten minutes on 2 cores."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run. Raises BadInput for options that cannot work.

    left_out: recipes of the default list that this optimizer cannot train with. seeds: how often each row is trained,
    with `seed` and those after it. shard: how many neighbours hold a model together, None where each holds a whole one.
    outer: after how many inner steps workers meet, each a row of every method that takes outer steps.
    servers: parameter servers, on processes of their own; then each recipe has a second row that trains on them. slow:
    how many times as long the last worker computes. kill: whether that one vanishes midway, if a row can bear it.
    gathers: how parameters travel where a model is sharded without replicas, each a row of every recipe.
    then: the second act, if there is one.
    """

    workers: int
    rate: Rate | None
    recipes: tuple[str, ...]
    densities: tuple[float, ...]
    steps: int = 300
    model: str = "transformer"
    data: Path | None = None
    scale: float = 1.0
    seed: int = 0
    target: float | None = None
    extend: float = 1.5
    pipeline: int = 1
    micro_batches: int = 4
    boundaries: tuple[float, ...] = (1.0,)
    optimizer: str = "sgd"
    left_out: tuple[str, ...] = ()
    seeds: int = 1
    shard: int | None = None
    outer: tuple[int, ...] = ()
    servers: int = 0
    slow: float = 1.0
    kill: bool = False
    gathers: tuple[str, ...] = ()
    then: "Options | None" = None

    def __post_init__(self) -> None:
        if self.workers < (1 if self.servers > 0 else 2):
            raise BadInput(
                f"--workers is {self.workers}; an exchange takes two: give --workers 2 or more, or --servers 1 as well"
            )
        for name, least in (("steps", 1), ("seeds", 1), ("micro_batches", 1), ("servers", 0)):
            if (given := getattr(self, name)) < least:
                raise BadInput(f"--{name.replace('_', '-')} is {given}; expected {least} or more")
        if self.target is not None and not math.isfinite(self.target):
            raise BadInput(f"--target is {self.target}; expected a loss")
        if not 1 <= self.extend < math.inf:
            raise BadInput(f"--extend is {self.extend:g}; expected 1 (stop at --steps) or more")
        for density in self.densities:
            check_density(density, "--density")
        for recipe in self.recipes:
            _check(*_named(recipe))
        self._check_optimizer()
        self._check_embeddings()
        self._check_outer()
        self._check_pipeline()
        if self.shard is not None:
            self._check_shard(self.shard)
        self._check_gathers()
        self._check_servers()

    @property
    def processes(self) -> int:
        """How many processes that takes."""
        return self.workers + self.servers

    @property
    def island(self) -> int:
        """How many workers share a link. Where one island has all of them, each has its own."""
        return 1 if self.shard == self.workers else self.shard or 1

    @property
    def every(self) -> int:
        """Every how many steps is the held-out loss taken? After an outer step of all rows, if there are any."""
        meeting = math.lcm(*self.outer)
        return max(1, self.steps // (15 * meeting)) * meeting

    @property
    def every_seed(self) -> range:
        """The seeds that each row is trained with."""
        return range(self.seed, self.seed + self.seeds)

    @property
    def acts(self) -> list["Options"]:
        """This run, and what follows on the same workers."""
        return [self] if self.then is None else [self, *self.then.acts]

    def rows(self) -> list[Setting]:
        """Return what each row trains with; dense comes first because the others are compared with it."""
        settings = (
            Setting(name, density, boundary, outer, served, gathers)
            for name, own in sorted(map(_named, self.recipes), key=lambda named: named[0] != "dense")
            for density in self._densities(name, own)
            for boundary in sorted(self.boundaries, reverse=True)
            for outer in (self.outer if BENCHED[name].outer_steps else (0,))
            for served in self._ways(name)
            for gathers in (self.gathers if self.gathers and not BENCHED[name].shards_natively else ("",))
        )
        return list(dict.fromkeys(settings))

    def _ways(self, name: str) -> tuple[bool, ...]:
        """Return whether a method's rows are served: one worker alone has nobody to exchange with."""
        if self.workers == 1:
            return (True,)
        return (False, True) if self.servers and BENCHED[name].served else (False,)

    def _first(self, fits: Callable[[Benched], bool]) -> str:
        """Return the first method that fits; "" if none does."""
        return next((name for name, _ in map(_named, self.recipes) if fits(BENCHED[name])), "")

    def _check_optimizer(self) -> None:
        check_optimizer(self.optimizer)
        if self.optimizer != "sgd" and (name := self._first(lambda method: method.needs_sgd)):
            raise BadInput(
                f"{name} takes over SGD's momentum, and --optimizer is {self.optimizer}: leave {name} out of "
                "--recipes, or train with --optimizer sgd"
            )

    def _check_embeddings(self) -> None:
        unable = self._first(lambda method: not method.sparse_embeddings)
        if self.model in PROBLEMS and PROBLEMS[self.model].sparse_embeddings and unable:
            able = ",".join(name for name, _ in map(_named, self.recipes) if BENCHED[name].sparse_embeddings)
            raise BadInput(
                f"{unable} cannot reduce the sparse gradients of {self.model}; try --recipes {able or 'dense'}"
            )

    def _check_pipeline(self) -> None:
        if self.pipeline < 1 or self.workers % self.pipeline:
            raise BadInput(
                f"--pipeline {self.pipeline} does not divide --workers {self.workers} into replicas of stages"
            )
        for boundary in self.boundaries:
            check_density(boundary, "--boundary")
        if self.pipeline == 1 and self.boundaries != (1.0,):
            raise BadInput("--boundary is about a model's cuts; give --pipeline STAGES as well")
        if self.pipeline == 1 and self.micro_batches != Options.micro_batches:
            raise BadInput("--micro-batches are what a pipeline takes; give --pipeline STAGES as well")
        if self.pipeline > 1 and (name := self._first(lambda method: not method.pipelines)):
            raise BadInput(f"{name} does not follow a pipeline's steps; name a recipe instead")

    def _check_shard(self, shards: int) -> None:
        if shards < 2:
            raise BadInput(
                f"--shard is {shards}; expected 2 or more: so many workers of an island hold a model together"
            )
        if self.workers % shards:
            raise BadInput(
                f"--shard {shards} does not divide --workers {self.workers} into islands: give --workers {2 * shards}, "
                f"another multiple of {shards}, or {shards} for one island without replicas"
            )
        if self.pipeline > 1:
            raise BadInput("--shard and --pipeline both split the model: give one of the two")
        if name := self._first(lambda method: method.install_sharded is None):
            raise BadInput(f"{name} works in DistributedDataParallel alone: leave it out of --recipes with --shard")
        if self.workers == shards and (name := self._first(lambda method: not method.scatters)):
            raise BadInput(
                f"{name} needs replicas of the shards: leave it out of --recipes, or give --workers {2 * shards}"
            )
        if self.model in PROBLEMS and PROBLEMS[self.model].sparse_embeddings:
            raise BadInput(f"FSDP2 cannot shard the sparse embeddings of {self.model}; try --model transformer")

    def _check_gathers(self) -> None:
        if self.gathers and self.shard != self.workers:
            raise BadInput(f"--gathers is about models sharded over all workers: give --shard {self.workers} as well")
        if "fsdp_bf16" in self.recipes and self.shard != self.workers:
            raise BadInput(f"fsdp_bf16 shards over all workers: give --shard {self.workers} as well")
        if unknown := [name for name in self.gathers if name not in GATHERS]:
            raise BadInput(f"--gathers {unknown[0]!r}; expected some of {', '.join(GATHERS)}")

    def _check_outer(self) -> None:
        if apart := self._first(lambda method: method.outer_steps is not None):
            if not self.outer:
                raise BadInput(f"{apart} takes outer steps: say after how many inner steps, as in --outer 10,30")
            if self.shard is not None or self.pipeline > 1:
                raise BadInput("--outer is about workers with whole models: leave --shard and --pipeline out")
        elif self.outer:
            raise BadInput("--outer, and no method of --recipes takes outer steps; add diloco or sparseloco")
        if unable := [each for each in self.outer if each < 1 or self.steps % each]:
            raise BadInput(
                f"--outer {unable[0]} does not divide --steps {self.steps}, so what was learnt last would not count: "
                "give a multiple of it as --steps"
            )

    def _check_servers(self) -> None:
        if not 1 <= self.slow < math.inf:
            raise BadInput(f"--slow is {self.slow:g}; expected 1 (as fast as the others) or more")
        if not (self.servers or self.outer) and (self.slow > 1 or self.kill):
            raise BadInput("--slow and --kill are about servers or outer steps: give --servers 1 or --outer 30 as well")
        if self.servers and (self.pipeline > 1 or self.shard is not None):
            raise BadInput("on parameter servers each worker has the whole model: leave --pipeline and --shard out")
        if self.workers == 1:
            self._check_one_worker()
        if self.servers and self.optimizer == "muon":
            raise BadInput("a parameter server has one optimizer for all matrices: give --optimizer sgd or adamw")

    def _check_one_worker(self) -> None:
        if self.slow > 1 or self.kill:
            raise BadInput("--slow and --kill are about the last of several workers: give --workers 2 or more")
        if name := self._first(lambda method: not method.served):
            raise BadInput(
                f"--workers is 1, so all rows are served, and {name} cannot be: leave {name} out of --recipes, or give "
                "--workers 2"
            )

    def _densities(self, name: str, own: float | None) -> tuple[float, ...]:
        """Return the densities given with the recipe, else the method's own, else the run's."""
        if not BENCHED[name].sparse:
            return (1.0,)
        own = BENCHED[name].density if own is None else own
        return self.densities if own is None else (own,)


@dataclass(frozen=True, kw_only=True)
class RowJob(Setting):
    """What a worker trains. `most_steps` bounds the search for `target` after `steps`; the loss is taken every `every`.

    Steps before `skip` do not count. With `stages` above 1 the model is split into that many, each on its own worker,
    and a batch into `micro_batches`. With `shards` above 1, so many neighbours hold the model together. With
    `trainers`, only so many ranks train, and the `servers` after them serve if the row is `served`; `ports` are those
    of the trainers' store and of each server. The last trainer is `slow`, and if `kill` it vanishes midway.
    """

    steps: int
    most_steps: int
    every: int
    skip: int = 0
    target: float | None = None
    warmup: int = 0
    stages: int = 1
    micro_batches: int = 1
    optimizer: str = "sgd"
    shards: int = 1
    trainers: int = 0
    servers: int = 0
    ports: Sequence[int] = ()
    slow: float = 1.0
    kill: bool = False

    def slowness(self, rank: int) -> float:
        """Return how many times as long this rank computes."""
        return self.slow if rank == self.trainers - 1 else 1.0

    def own_steps(self, rank: int) -> float:
        """Return after how many steps of its own this rank vanishes."""
        return self.steps // 2 if self.kill and rank == self.trainers - 1 else math.inf

    @property
    def uneven(self) -> bool:
        """Whether workers take outer steps, and not all at the same pace."""
        return self.outer > 0 and (self.slow > 1 or self.kill)

    @property
    def scheduled_density(self) -> float | Schedule:
        """The density. If the method warms up, it falls from 1/4 to that density over `warmup` steps."""
        stages = 4
        if not BENCHED[self.recipe].warms_up or self.warmup < stages:
            return self.density
        return exponential_warmup(self.density, steps_each=self.warmup // stages, stages=stages)


def read(
    *,
    workers: int | None,
    link: str | None,
    recipes: str | None,
    densities: str,
    pipeline: int = 1,
    boundaries: str | None = None,
    optimizer: str = "sgd",
    shard: int | None = None,
    outer: str | None = None,
    servers: int = 0,
    gathers: str | None = None,
    **others: Any,
) -> Options:
    """Read options from text. Under torchrun the group decides on workers and link. Raises BadInput.

    The default run, for which the user asks nothing in particular, has a second act: the same model with AdamW.
    """
    if in_group():
        if workers not in (None, world_size()) or link not in (None, "none"):
            raise BadInput("under torchrun the group has its size and its network: leave --workers and --link out")
        if servers:
            raise BadInput("--servers starts its own processes: leave torchrun out")
        if others.get("kill") or others.get("slow", 1) > 1:
            raise BadInput("--slow and --kill take processes of their own: leave torchrun out")
        workers, link = world_size(), "none"
    usual = _SERVED if servers else DEFAULT if shard is None else _ON_SHARDS[: None if optimizer == "adamw" else -1]
    usual = _WITHOUT_REPLICAS if shard is not None and workers == shard else usual
    if outer is not None:
        usual = _WITH_OUTER.get(optimizer, usual)
    asked = usual if recipes is None else names(recipes, "--recipes", "dense,topk")
    if gathers is not None:
        asked = tuple(dict.fromkeys([*_NATIVE, *asked]))
    unable = recipes is None and optimizer != "sgd"
    left_out = tuple(name for name in asked if unable and BENCHED[name].needs_sgd)
    found = Options(
        workers=2 * max(shard or 1, 1) if workers is None else workers,
        rate=parse_rate("100mbit" if link is None else link),
        recipes=tuple(name for name in asked if name not in left_out),
        densities=numbers(densities, "--density"),
        pipeline=pipeline,
        boundaries=numbers(("1" if pipeline == 1 else "1,0.05") if boundaries is None else boundaries, "--boundary"),
        optimizer=optimizer,
        left_out=left_out,
        shard=shard,
        outer=() if outer is None else counts(outer, "--outer"),
        servers=servers,
        gathers=() if gathers is None else names(gathers, "--gathers", "none,differences"),
        **others,
    )
    return replace(found, then=replace(found, **_SECOND_ACT)) if found == _USUAL else found


def _named(recipe: str) -> tuple[str, float | None]:
    """Read ``topk`` or ``topk:0.01``."""
    name, colon, density = recipe.partition(":")
    try:
        return name, float(density) if colon else None
    except ValueError as error:
        raise BadInput(f"--recipes {recipe!r}: expected a density behind the colon, such as topk:0.01") from error


def _check(name: str, density: float | None) -> None:
    if name not in BENCHED:
        raise BadInput(f"unknown recipe {name!r}; expected some of {', '.join(BENCHED)}")
    if density is not None:
        if not BENCHED[name].sparse:
            raise BadInput(f"--recipes {name}:{density:g}: {name} takes no density")
        check_density(density, f"--recipes {name}:")


_USUAL = Options(workers=2, rate=parse_rate("100mbit"), recipes=DEFAULT, densities=(0.01,))
"""What a user gets who asks for nothing in particular."""
