"""The claims of DCT-DP about asynchronous training: DLRM on a parameter server, without and with Hogwild threads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from thinwire_lab.papers.dct.crossing import MARGIN
from thinwire_lab.papers.shared.claims import DCT
from thinwire_lab.papers.shared.judging import any_of, every, no_worse, worse
from thinwire_lab.papers.shared.ledger import FAILS, HOLDS, UNDECIDED, Outcome
from thinwire_lab.papers.shared.shelf import SERVE, Evidence, Shelf
from thinwire_lab.papers.shared.trials import Interval, Lines, by_one_version, interval

FILE = "server.jsonl"
_SETTING = {"embeddings": "sparse", "optimizer": "adagrad", "rate": 0.01, "trainers": 1, "fetch_rows": False}
_PLAIN = {"trainers": 1, "fetch_rows": False}  # what lines do not say that are older than the option


class Run(NamedTuple):
    """One training: the held-out loss at its end, and at each look the norm of the residual."""

    loss: float
    norms: Sequence[float]


Runs = Mapping[float, Sequence[Run]]


@dataclass(frozen=True, kw_only=True)
class Served(Evidence):
    """Runs of thinwire_lab.studies.server_clicks on each seed, by density, or by drain where several are given."""

    densities: tuple[float, ...]
    threads: int
    drains: tuple[int, ...] = (0,)
    updates: int = 2000
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)

    @property
    def commands(self) -> tuple[str, ...]:
        lists = {"densities": self.densities, "drains": self.drains, "seeds": self.seeds}
        options = " ".join(f"--{name} {','.join(f'{value:g}' for value in values)}" for name, values in lists.items())
        program = f"python -m {SERVE} papers/runs/{FILE}"
        return (f"{program} --updates {self.updates} --threads {self.threads} {options}",)

    def missing(self, shelf: Shelf) -> tuple[str, ...]:
        lines = [line for line in shelf.lines(FILE) if shelf.is_current(line)]
        return () if all(len(runs) == len(self.seeds) for runs in self._found(lines).values()) else self.commands

    def read(self, shelf: Shelf) -> Runs:
        return by_one_version(shelf.lines(FILE), self.seeds, self._found, FILE)

    def shrunk(self) -> Self:
        return replace(self, updates=16, seeds=(0, 1))

    def _found(self, lines: Lines) -> dict[float, dict[int, Run]]:
        if len(self.drains) > 1:
            return {drain: self._of(lines, self.densities[0], drain) for drain in self.drains}
        return {density: self._of(lines, density, self.drains[0]) for density in self.densities}

    def _of(self, lines: Lines, density: float, drain: int) -> dict[int, Run]:
        wanted = _SETTING | {
            "density": density, "drain": drain, "threads": self.threads, "updates": self.updates
        }  # fmt: skip
        fitting = [line for line in lines if (_PLAIN | dict(line)).items() >= wanted.items()]
        by_seed = {line["seed"]: line["looks"] for line in fitting if line["seed"] in self.seeds}
        return {seed: Run(looks[-1][1], [norm for _, _, norm, *_ in looks]) for seed, looks in by_seed.items()}


def _over(runs: Sequence[Run], base: Sequence[Run]) -> Interval:
    return interval([100 * (a.loss / b.loss - 1) for a, b in zip(runs, base, strict=True)])


_SPARSITIES = {0.25: "75 %", 0.1: "90 %", 0.05: "95 %", 0.02: "98 %", 0.005: "99.5 %"}
ONE_THREAD = Served(densities=(1.0, *_SPARSITIES), threads=1, seeds=tuple(range(10)))


@DCT.judge("T11", ONE_THREAD)
def data_parallel_accuracy(found: Runs) -> Outcome:
    above = {name: _over(found[density], found[1.0]) for density, name in _SPARSITIES.items()}
    *same, last = above
    parts = {name: no_worse(above[name], MARGIN) for name in same} | {last: worse(above[last], MARGIN)}
    return Outcome(*every(parts), measured=", ".join(f"{name} {each}" for name, each in above.items()))


NEVER, OFTEN = 0, 50
DRAINED = Served(densities=(0.005,), threads=4, drains=(NEVER, 500, OFTEN), seeds=tuple(range(32)))
LONG = Served(densities=(0.005,), threads=4, updates=10_000)
_GROWS = 10.0
"""Percent by which a norm that still grows does so from three quarters of a run to its end."""


@DCT.judge("T7", DRAINED, LONG)
def draining(drained: Runs, long: Runs) -> Outcome:
    growth = interval([100 * (run.norms[-1] / run.norms[len(run.norms) * 3 // 4 - 1] - 1) for run in long[0.005]])
    more = {drain: _over(drained[NEVER], runs) for drain, runs in drained.items() if drain}
    grows = HOLDS if growth.mean - growth.half > _GROWS else FAILS if growth.mean + growth.half <= _GROWS else UNDECIDED
    word = any_of([grows, *(worse(each, MARGIN) for each in more.values())])
    losses = ", ".join(f"drained every {drain} updates {each}" for drain, each in more.items())
    return Outcome(
        verdict=word,
        note=": not needed here" if word == FAILS else "",
        measured=f"norm {growth} in the last quarter of 10,000 updates; loss above that of trainers {losses}",
    )
