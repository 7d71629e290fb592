"""Asynchronous training of DLRM on generated clicks, as in DCT's section 3.3.

    python -m thinwire_lab.studies.server_clicks runs.jsonl --updates 2000 --densities 1,0.01 --threads 1,4 --drains 0
    python -m thinwire_lab.studies.server_clicks runs.jsonl --embeddings dense --optimizer sgd --rate 0.3
    python -m thinwire_lab.studies.server_clicks runs.jsonl --trainers 4 --down 0.05 --fetch-rows --densities 0.05
    python -m thinwire_lab.studies.server_clicks runs.jsonl --only-table

One server and some trainers, by default one, each with so many Hogwild threads, in one process; the updates of all
trainers are counted together. A density of 1 is uncompressed; others keep a threshold for 1,000 updates. With sparse
embeddings, their rows are sent as they are, and the networks' eight layers are compressed, as in the paper. Each run is
a line in a file, and what the file has of this version is not run again. `looks` are taken at a few points: updates,
held-out loss (nats), the norm of the trainers' residuals, seconds of training, and bytes sent up. `joining_bytes`,
`down_bytes`: what came to all trainers when they joined, and afterwards. `drain`: updates between two drains on
average; 0 never drains.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any, cast

import torch
import typer
from torch import nn

import thinwire
from thinwire.reducer import Reducer
from thinwire.version import __version__
from thinwire_lab import machine
from thinwire_lab.inputs import append_line, prepare_file, read_lines
from thinwire_lab.problems import dlrm
from thinwire_lab.problems.base import Options, Problem, held_out_loss
from thinwire_lab.show.table import human_bytes, plain
from thinwire_lab.show.terminal import print_table, report_console

LIFE, PARTS = 1000, 8
"""How many updates a threshold is kept; at how many points of a run to look."""


def recipe(density: float) -> Reducer:
    return thinwire.recipes.dense() if density == 1 else thinwire.recipes.dct_dp(density=density, life=LIFE)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}


@dataclass(frozen=True)
class Setting:
    """What all runs of a table share."""

    embeddings: str
    optimizer: str
    rate: float
    updates: int
    trainers: int = 1
    down: float = 1.0
    fetch_rows: bool = False


def made(setting: Setting, seed: int) -> Problem:
    problem = dlrm.make(Options(seed=seed))
    cast(Any, problem.model).interaction.embedding.sparse = setting.embeddings == "sparse"
    return problem


@dataclass(frozen=True)
class Run:
    """A server at work, and its trainers. Losses are of the server's parameters, so that a look moves no bytes."""

    served: Problem
    server: thinwire.server.Server
    trainers: list[thinwire.server.Trainer]
    recipes: list[Reducer]

    def bytes_of(self, name: str) -> int:
        return sum(getattr(each.traffic(), name) for each in self.trainers)

    def look(self, done: int, seconds: float) -> tuple[int, float, float, float, int]:
        loss = float(held_out_loss(self.served, self.served.model))
        return done, loss, _waiting(self.recipes), round(seconds, 2), self.bytes_of("sent_bytes")


def run(setting: Setting, density: float, threads: int, drain: int, seed: int) -> dict[str, Any]:
    with ExitStack() as open_ones:
        at_work = _begun(open_ones, setting, density, drain, seed)
        joining, looks, seconds, done = at_work.bytes_of("received_bytes"), [], 0.0, 0
        for part in range(1, PARTS + 1):
            start, end = time.perf_counter(), part * setting.updates // PARTS
            _train(at_work, range(done, end), threads, fetch_rows=setting.fetch_rows)
            done, seconds = end, seconds + time.perf_counter() - start
            looks.append(at_work.look(done, seconds))
            print(f"density {density} threads {threads} drain {drain} seed {seed}: {looks[-1]}", flush=True)
        stale = at_work.server.status().staleness
        return {
            "looks": looks,
            "staleness": sum(k * n for k, n in stale.items()) / sum(stale.values()),
            "bytes": at_work.bytes_of("sent_bytes"),
            "joining_bytes": joining,
            "down_bytes": at_work.bytes_of("received_bytes") - joining,
            "drained": at_work.bytes_of("drained"),
        }


def _begun(open_ones: ExitStack, setting: Setting, density: float, drain: int, seed: int) -> Run:
    down = None if setting.down == 1 else thinwire.codecs.TopK(density=setting.down)
    both: dict[str, Any] = {"down": down, "fetch_rows": setting.fetch_rows}
    served, recipes = made(setting, seed), [recipe(density) for _ in range(setting.trainers)]
    server = thinwire.serve(
        served.model,
        recipe(density),
        make_optimizer=lambda p: OPTIMIZERS[setting.optimizer](p, lr=setting.rate),
        address="127.0.0.1:0",
        trainers=setting.trainers,
        **both,
    )
    open_ones.enter_context(server)
    both |= {"address": server.address, "drain": drain or None, "seed": seed}
    trainers = [thinwire.connect(made(setting, seed).model, sent, **both) for sent in recipes]
    for each in trainers:
        open_ones.enter_context(each)
    return Run(served, server, trainers, recipes)


def _train(at_work: Run, steps: range, threads: int, *, fetch_rows: bool) -> None:
    lock, rest, problem = threading.Lock(), list(steps), at_work.served

    def work(trainer: thinwire.server.Trainer, module: nn.Module) -> None:
        while True:
            with lock:
                if not rest:
                    return
                step = rest.pop(0)
            batch = problem.batch(step, 0, 1)
            if fetch_rows:
                embedding = cast(Any, module).interaction
                trainer.fetch({"interaction.embedding.weight": batch[1] + embedding.offsets})
            module.zero_grad()
            problem.loss(module, batch).backward()
            trainer.step(module)

    with ThreadPoolExecutor(len(at_work.trainers)) as pool:
        for done in [pool.submit(each.run, partial(work, each), threads=threads) for each in at_work.trainers]:
            done.result()


def _waiting(recipes: list[Reducer]) -> float:
    parts = [x.square().sum() for each in recipes for memory in each.memories() for x in memory.waiting()]
    return float(torch.stack(parts).sum().sqrt()) if parts else 0.0


def kept(path: Path) -> list[dict[str, Any]]:
    usual = {"trainers": 1, "down": 1.0, "fetch_rows": False}  # of runs before there were these
    return [usual | line for line in read_lines(path)]


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each density, number of threads and drain, of the newest run of each seed."""
    groups = defaultdict[Any, dict[int, dict[str, Any]]](dict)
    for each in runs:
        groups[-each["density"], each["threads"], each["drain"]][each["seed"]] = each
    return [_row(list(by_seed.values()), *setting) for setting, by_seed in sorted(groups.items())]


def _row(found: list[dict[str, Any]], density: float, threads: int, drain: int) -> dict[str, Any]:
    losses = [each["looks"][-1][1] for each in found]
    spread = f" ± {stdev(losses):.4f}" if losses[1:] else ""
    middle, end = (mean(each["looks"][at][2] for each in found) for at in (PARTS // 2 - 1, -1))
    down = [each["down_bytes"] for each in found if "down_bytes" in each]
    row = {"density": -density, "threads": threads, "drain": drain or "never", "loss": f"{mean(losses):.4f}{spread}"}
    row |= {"staleness": mean(each["staleness"] for each in found), "residual_midway": middle, "residual_last": end}
    up = human_bytes(mean(each["bytes"] for each in found))
    return row | {"up": up, "down": human_bytes(mean(down) if down else None)}


def main(
    path: Annotated[Path, typer.Argument(help="Where runs are kept, a line each")],
    updates: Annotated[int, typer.Option(help="How many updates each run has")] = 2000,
    densities: Annotated[str, typer.Option(help="1 is uncompressed")] = "1,0.05,0.01",
    threads: Annotated[str, typer.Option(help="Hogwild threads")] = "1,4",
    drains: Annotated[str, typer.Option(help="Updates between drains, on average; 0 for never")] = "0",
    seeds: Annotated[str, typer.Option(help="Of the batches and the weights")] = "0",
    embeddings: Annotated[str, typer.Option(help="sparse: rows travel as they are; or dense")] = "sparse",
    optimizer: Annotated[str, typer.Option(help="The server's: adagrad or sgd")] = "adagrad",
    rate: Annotated[float, typer.Option(help="Its learning rate")] = 0.01,
    trainers: Annotated[int, typer.Option(help="How many, each with so many threads")] = 1,
    down: Annotated[float, typer.Option(help="Density of what comes down; 1 sends all parameters")] = 1.0,
    fetch_rows: Annotated[bool, typer.Option("--fetch-rows", help="Fetch the rows that a batch looks up")] = False,
    only_table: Annotated[bool, typer.Option(help="Run nothing")] = False,
    anew: Annotated[bool, typer.Option("--anew", help="Run what other sources wrote, too")] = False,
) -> None:
    """Run what the file does not have yet, add to it, and print the table."""
    prepare_file(path)
    torch.set_num_threads(1)
    setting = Setting(embeddings, optimizer, rate, updates, trainers, down, fetch_rows)
    wanted = product(*(each.split(",") for each in (seeds, densities, threads, drains))) if not only_table else ()
    for seed, density, count, drain in wanted:
        row: dict[str, Any] = {"density": float(density), "threads": int(count), "drain": int(drain), "seed": int(seed)}
        same = {"thinwire": __version__} | ({"code": machine.code()} if anew else {})
        if not any((asdict(setting) | row | same).items() <= old.items() for old in kept(path)):
            append_line(path, asdict(setting) | row | run(setting, **row) | machine.made())
    if rows := table([each for each in kept(path) if asdict(setting).items() <= each.items()]):
        print_table(report_console(), plain(rows))


if __name__ == "__main__":
    typer.run(main)
