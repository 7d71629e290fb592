"""What is it worth to keep what waits, where workers come and go?

    python -m thinwire_lab.studies.elastic runs.jsonl --recipe "topk(density=0.01)" --workers 4,2,3 --workers 4,3
    python -m thinwire_lab.studies.elastic runs.jsonl --only-table

Virtual workers, as in the study of convergence, train for so many steps. Then all states are saved, and as many
workers as come next go on from them: with what waited kept, with that of the last worker lost, or with all of it
dropped. Each run is a line in a file. `error`: how far the sum over workers of what waits is from what it was, relative
to its largest element, at the worst change.
"""

import copy
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from threading import Lock
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor

from thinwire import redistribute, replicate
from thinwire_lab.problems.base import Problem, held_out_loss
from thinwire_lab.show.terminal import print_raw
from thinwire_lab.studies.convergence.group import VirtualGroup, on_ranks
from thinwire_lab.studies.convergence.training import DATA, Settings, problem_of

State = dict[str, Any]


def _kept(states: Sequence[State], rank: int, world_size: int) -> State:
    return redistribute(states, rank=rank, world_size=world_size)


def _one_lost(states: Sequence[State], rank: int, world_size: int) -> State:
    return redistribute(states[:-1], rank=rank, world_size=world_size, partial=True)


def _dropped(states: Sequence[State], rank: int, world_size: int) -> State:
    dealt = _kept(states, rank, world_size)
    return dealt | {"memories": [{} for _ in dealt["memories"]]}


WAYS: Mapping[str, Callable[[Sequence[State], int, int], State]] = MappingProxyType(
    {"kept": _kept, "one lost": _one_lost, "dropped": _dropped}
)


class Standing(NamedTuple):
    """What one worker leaves to the next phase. Model and optimizers are alike on all."""

    model: State
    optimizers: list[State]
    waiting: State


def run(settings: Settings, problem: Problem, workers: Sequence[int], way: str) -> tuple[list[float], float]:
    """Train in phases of `settings.steps` steps. Return the held-out loss after each, and the error."""
    losses, error, standings = list[float](), 0.0, list[Standing]()
    for phase, count in enumerate(workers):
        states = [standing.waiting for standing in standings]
        dealt = [WAYS[way](states, rank, count) for rank in range(count)] if states else []
        if way == "kept" and states:
            error = max(error, distance(pending(states), pending(dealt)))
        models, turn, first = [copy.deepcopy(problem.model) for _ in range(count)], Lock(), standings[:1]

        def work(
            group: VirtualGroup,
            phase: int = phase,
            models: list[torch.nn.Module] = models,
            dealt: list[State] = dealt,
            first: list[Standing] = first,
            turn: Lock = turn,
        ) -> Standing:
            model = models[group.rank()]
            optimizers = settings.make_optimizers(model)
            replicas = replicate(model, settings.make_recipe(), group=group, optimizer=optimizers)
            if first:
                model.load_state_dict(first[0].model)
                for optimizer, state in zip(optimizers, first[0].optimizers, strict=True):
                    optimizer.load_state_dict(copy.deepcopy(state))
                replicas.load_state_dict(dealt[group.rank()])
            for step in range(phase * settings.steps, (phase + 1) * settings.steps):
                model.zero_grad(set_to_none=True)
                with turn:
                    problem.loss(model, problem.batch(step, group.rank(), group.size())).backward()
                replicas.reduce()
                _wait(group)  # an optimizer's step tells all workers' handles, which must be at rest then
                with turn:
                    for optimizer in optimizers:
                        optimizer.step()
                _wait(group)
            return Standing(model.state_dict(), [each.state_dict() for each in optimizers], replicas.state_dict())

        standings = on_ranks(count, work)
        losses.append(float(held_out_loss(problem, models[0])))
    return losses, error


def _wait(group: VirtualGroup) -> None:
    dist.all_reduce(torch.zeros(1), op=dist.ReduceOp.MAX, group=group)


def pending(states: Sequence[State]) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    for state in states:
        for i, memory in enumerate(state["memories"]):
            for name, fields in memory.items():
                for field in fields.keys() - {"note"}:
                    key = f"{i} {name} {field}"
                    sums[key] = sums.get(key, torch.zeros(())) + fields[field].double()
    return sums


def distance(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    return max((float((after[key] - x).abs().max() / x.abs().max()) for key, x in before.items() if x.any()), default=0)


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the losses as a Markdown table: means and standard deviations over seeds."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for each in runs:
        groups[each["recipe"], each["optimizer"], each["workers"], each["way"]].append(each)
    rows = ["| recipe | optimizer | workers | what waits | held-out loss after each phase | seeds | error |"]
    rows.append("| --- | --- | --- | --- | --- | ---: | ---: |")
    for (recipe, optimizer, workers, way), found in groups.items():
        losses = " → ".join(map(_spread, zip(*(each["losses"] for each in found), strict=True)))
        error = max(each["error"] for each in found)
        shown = f"{error:.0e}" if way == "kept" and "," in workers else ""
        counts = workers.replace(",", " → ")
        rows.append(f"| `{recipe}` | `{optimizer}` | {counts} | {way} | {losses} | {len(found)} | {shown} |")
    return "\n".join(rows)


def _spread(losses: Sequence[float]) -> str:
    if not all(map(math.isfinite, losses)):
        return "diverged"
    return f"{mean(losses):.3f}" + (f" ± {stdev(losses):.3f}" if len(losses) > 1 else "")


def main(
    file: Annotated[Path, typer.Argument(help="The runs, as JSON lines.")],
    recipe: Annotated[list[str] | None, typer.Option(help="A recipe; may be repeated.")] = None,
    optimizer: Annotated[str, typer.Option(help="The optimizer.")] = "sgd(momentum=0.9)",
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 0.1,
    workers: Annotated[list[str] | None, typer.Option(help="Workers of each phase; may be repeated.")] = None,
    ways: Annotated[str, typer.Option(help="What becomes of what waits.")] = ",".join(WAYS),
    seeds: Annotated[str, typer.Option(help="Seeds, of initial weights and of batches.")] = "0",
    model: Annotated[
        str, typer.Option(help=f"transformer, {', '.join(DATA)}, or another of `thinwire bench`.")
    ] = "transformer",
    steps: Annotated[int, typer.Option(help="Steps of each phase.")] = 60,
    data: Annotated[Path | None, typer.Option(help="Folder that holds cifar10/ and wikitext2/.")] = None,
    only_table: Annotated[bool, typer.Option("--only-table", help="Train nothing.")] = False,
) -> None:
    """Train with every combination that the file does not have, add each to it, and print the table."""
    torch.set_num_threads(1)
    runs = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    every = product(recipe or ["topk(density=0.01)"], workers or ["4,2,3"], ways.split(","), map(int, seeds.split(",")))
    for each, counts, way, seed in () if only_table else every:
        known = {"model": model, "recipe": each, "optimizer": optimizer, "rate": rate, "workers": counts, "way": way}
        known |= {"steps": steps, "seed": seed}
        if any(known.items() <= done.items() for done in runs):
            continue
        settings = Settings(
            model=model,
            recipe=each,
            optimizer=optimizer,
            rate=rate,
            schedule="constant",
            steps=steps,
            workers=0,
            seed=seed,
        )
        losses, error = run(settings, problem_of(model, seed, data), [int(n) for n in counts.split(",")], way)
        runs.append(known | {"losses": losses, "error": error})
        with file.open("a") as lines:
            lines.write(json.dumps(runs[-1]) + "\n")
        print_raw(Console(), f"{each}, {counts}, {way}, seed {seed}: {losses}, error {error:.1e}")
    print_raw(Console(), table(runs))


if __name__ == "__main__":
    typer.run(main)
