"""Asynchronous training of DLRM on generated clicks, as in DCT's section 3.3.

    python benchmarks/server_clicks.py runs.jsonl --updates 2000 --densities 1,0.05,0.01 --threads 1,4 --drains 0
    python benchmarks/server_clicks.py runs.jsonl --embeddings dense --optimizer sgd --rate 0.3
    python benchmarks/server_clicks.py runs.jsonl --only-table --plot runs.png

One server and one trainer with so many Hogwild threads, in one process. A density of 1 is uncompressed; others keep a
threshold for 1,000 updates. With sparse embeddings, their rows are sent as they are, and the networks' eight layers are
compressed, as in the paper. Each run is a line in a file, and one that the file has is not repeated. `looks` are taken
at a few points: updates, held-out loss (nats), the norm of what waits on the trainer, seconds of training, and bytes
sent up. `drain`: updates between two drains on average; 0 never drains.
"""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any, cast

import torch
import typer
from matplotlib.cm import viridis
from matplotlib.pyplot import subplots
from torch import nn

import thinwire
from thinwire.reducer import Reducer
from thinwire.tools.problems import dlrm
from thinwire.tools.problems.base import Options, Problem

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


def made(setting: Setting, seed: int) -> Problem:
    problem = dlrm.make(Options(seed=seed))
    cast(Any, problem.model).interaction.embedding.sparse = setting.embeddings == "sparse"
    return problem


def run(setting: Setting, density: float, threads: int, drain: int, seed: int) -> dict[str, Any]:
    problem, served, sent = made(setting, seed), made(setting, seed), recipe(density)
    steps_of: dict[str, Any] = {"optimizer": lambda p: OPTIMIZERS[setting.optimizer](p, lr=setting.rate)}
    looks, updates = [], setting.updates
    with (
        thinwire.serve(served.model, recipe(density), address="127.0.0.1:0", **steps_of) as server,
        thinwire.connect(problem.model, sent, address=server.address, drain=drain or None, seed=seed) as trainer,
    ):
        steps, seconds = iter(range(updates)), 0.0
        for part in range(1, PARTS + 1):
            start = time.perf_counter()
            _until(part * updates // PARTS, steps, problem, trainer, threads)
            seconds += time.perf_counter() - start
            up = trainer.traffic().sent_bytes
            looks.append((part * updates // PARTS, _held_out(problem), _waiting(sent), round(seconds, 2), up))
            print(f"density {density} threads {threads} drain {drain} seed {seed}: {looks[-1]}", flush=True)
        stale, traffic = server.status().staleness, trainer.traffic()
    return {
        "looks": looks,
        "staleness": sum(k * n for k, n in stale.items()) / sum(stale.values()),
        "bytes": traffic.sent_bytes,
        "drained": traffic.drained,
    }


def _until(end: int, steps: Iterator[int], problem: Problem, trainer: thinwire.Trainer, threads: int) -> None:
    lock, rest = threading.Lock(), [next(steps) for _ in range(end - trainer.traffic().updates)]

    def work(module: nn.Module) -> None:
        while True:
            with lock:
                if not rest:
                    return
                step = rest.pop(0)
            module.zero_grad()
            problem.loss(module, problem.batch(step, 0, 1)).backward()
            trainer.step(module)

    trainer.run(work, threads=threads)


@torch.no_grad()
def _held_out(problem: Problem) -> float:
    return mean(problem.loss(problem.model, batch).item() for batch in problem.held_out(0, 1))


def _waiting(sent: Reducer) -> float:
    parts = [x.square().sum() for memory in sent.memories() for x in memory.waiting()]
    return float(torch.stack(parts).sum().sqrt()) if parts else 0.0


def kept(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(runs: list[dict[str, Any]]) -> str:
    rows = [
        "| embeddings | density | threads | drain | held-out loss | staleness | what waits, midway, last | up |",
        "| --- | ---: | ---: | ---: | --- | ---: | --- | ---: |",
    ]
    for (embeddings, density, threads, drain), found in sorted(_rows(runs).items()):
        losses = [each["looks"][-1][1] for each in found]
        spread = f" ± {stdev(losses):.4f}" if losses[1:] else ""
        middle, end = (mean(each["looks"][i][2] for each in found) for i in (PARTS // 2 - 1, -1))
        stale, sent = mean(each["staleness"] for each in found), mean(each["bytes"] for each in found)
        cells = (embeddings, -density, threads, drain or "never", f"{mean(losses):.4f}{spread}", f"{stale:.2f}")
        rows.append(f"| {' | '.join(map(str, cells))} | {middle:.3f}, {end:.3f} | {sent / 1e6:.0f} MB |")
    return "\n".join(rows)


def _rows(runs: list[dict[str, Any]]) -> dict[tuple[str, float, int, int], list[dict[str, Any]]]:
    rows = defaultdict(list)
    for each in runs:
        rows[each["embeddings"], -each["density"], each["threads"], each["drain"]].append(each)
    return rows


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw mean losses over bytes and updates: a colour for each density, dashed for several threads."""
    figure, axes = subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    rows = {key: found for key, found in sorted(_rows(runs).items()) if not key[3]}
    densities = sorted({-key[1] for key in rows}, reverse=True)
    for (_, density, threads, _), found in rows.items():
        losses = [mean(each["looks"][i][1] for each in found) for i in range(PARTS)]
        style: dict[str, Any] = {
            "color": viridis(densities.index(-density) / len(densities)),
            "linestyle": "-" if threads == 1 else "--",
        }
        name = f"density {-density:g}, {threads} thread{'s' * (threads > 1)}"
        axes[0].plot([look[4] / 1e6 for look in found[0]["looks"]], losses, label=name, **style)
        axes[1].plot([look[0] for look in found[0]["looks"]], losses, **style)
    axes[0].set(xscale="log", xlabel="megabytes sent up", ylabel="held-out loss, nats")
    axes[1].set(xlabel="updates")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


app = typer.Typer()


@app.command()
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
    only_table: Annotated[bool, typer.Option(help="Run nothing")] = False,
    to_plot: Annotated[Path | None, typer.Option("--plot", help="Draw loss over bytes and updates here")] = None,
) -> None:
    """Run what the file does not have yet, add to it, and print the table."""
    torch.set_num_threads(1)
    setting = Setting(embeddings, optimizer, rate, updates)
    wanted = product(*(each.split(",") for each in (seeds, densities, threads, drains))) if not only_table else ()
    for seed, density, count, drain in wanted:
        row: dict[str, Any] = {"density": float(density), "threads": int(count), "drain": int(drain), "seed": int(seed)}
        if not any((asdict(setting) | row).items() <= old.items() for old in kept(path)):
            found = asdict(setting) | row | run(setting, **row)
            with path.open("a") as file:
                file.write(json.dumps(found) + "\n")
    same = [each for each in kept(path) if asdict(setting).items() <= each.items()]
    print(table(same))
    if to_plot:
        plot(same, to_plot)


if __name__ == "__main__":
    app()
