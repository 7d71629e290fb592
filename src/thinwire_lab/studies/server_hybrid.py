"""Trainers that are pipelines, on parameter servers: what do DCT-MP inside, DCT-DP up, and both cost and save?

    python -m thinwire_lab.studies.server_hybrid --link 100mbit --steps 60 --rounds 3 --json hybrid.json

Two trainers of two stages, and a server for each stage: six processes, each with a link of its own. Servers take SGD
with momentum, and damp what is stale. Prints the median step of the first trainer and the held-out loss of its
parameters, boundaries included, after so many of its steps.
"""

import copy
import functools
import math
import os
import time
from pathlib import Path
from statistics import mean, median, stdev
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import thinwire
from thinwire.codecs import Codec, TopK
from thinwire.pipeline import sparsify
from thinwire.recipes import METHODS
from thinwire_lab.bench.hybrid import collect
from thinwire_lab.cluster.link import parse_rate
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.cluster.worker import Emit
from thinwire_lab.cluster.workers import free_ports, host, join_group
from thinwire_lab.inputs import prepare_file, write_document
from thinwire_lab.problems import Problem, build
from thinwire_lab.problems.base import parts_of

SCHEMA = "thinwire.server_hybrid/1"
STAGES, TRAINERS, MICRO_BATCHES = 2, 2, 4
LINES = {
    "neither": ("dense", 1.0, False),
    "DCT-MP": ("dense", 1.0, True),
    "DCT-DP": ("dct_dp", 0.01, False),
    "both": ("dct_dp", 0.01, True),
}
"""Recipe, its density, and whether boundaries are sparsified."""


def handle(job: dict[str, Any], emit: Emit) -> None:
    join_group()
    _pipelines()  # all ranks make all groups
    torch.set_num_threads(1)
    problem = build(job["problem"], seed=job["seed"], data=None, scale=1.0)
    rank = int(os.environ["RANK"])
    stages = parts_of(problem).split(copy.deepcopy(problem.model), STAGES)
    if rank < STAGES:
        serve(job, problem, stages[rank], rank)
    else:
        train(job, problem, stages, emit, *divmod(rank - STAGES, STAGES))


def serve(job: dict[str, Any], problem: Problem, module: nn.Module, stage: int) -> None:
    rate, recipe = job["rate"] * problem.learning_rate / TRAINERS, METHODS[job["recipe"]].make(job["density"])
    told: dict[str, Any] = {"address": _address(job, stage), "index": 0, "trainers": TRAINERS, "down": _down(job)}
    told["make_optimizer"] = lambda p: torch.optim.SGD(p, lr=rate, momentum=problem.momentum)
    with thinwire.serve(module, recipe, damped=True, **told) as server:
        server.wait()


def train(job: dict[str, Any], problem: Problem, stages: list[nn.Module], emit: Emit, trainer: int, stage: int) -> None:
    parts, module, group = parts_of(problem), stages[stage], _pipelines()[trainer]
    pipelined = PipelineStage(module, stage, STAGES, torch.device("cpu"), group=group)
    if job["boundary"] < 1:
        sparsify([pipelined], job["boundary"], values=torch.bfloat16)
    schedule = Schedule1F1B(pipelined, MICRO_BATCHES, loss_fn=parts.criterion)
    recipe, seconds = METHODS[job["recipe"]].make(job["density"]), []
    with thinwire.connect(module, recipe, address=_address(job, stage), down=_down(job), reconnect=60) as connected:
        for step in range(job["steps"]):
            args, kwargs, target = parts.feed(problem.batch(step, trainer, TRAINERS))
            fed: dict[str, Any] = {**kwargs, "target": target if stage else None}
            module.zero_grad()
            start = time.perf_counter()
            schedule.step(*(args if stage == 0 else ()), **fed)
            connected.step()
            seconds.append(time.perf_counter() - start)
        sent = connected.traffic().sent_bytes
    if trainer == 0:
        loss = held_out_loss(job, problem, module, stage, group)
        if stage == 0:
            emit({"seconds": median(seconds[len(seconds) // 3 :]), "loss": loss, "bytes": sent / job["steps"]})


@torch.no_grad()
def held_out_loss(job: dict[str, Any], problem: Problem, module: nn.Module, stage: int, group: Any) -> float:
    """Collect the stages of a trainer, and return the loss of the whole."""
    parts = parts_of(problem)
    whole = parts.split(copy.deepcopy(problem.model), STAGES)
    collect(whole, module, stage, group)
    for part in whole:
        part.eval()
    if job["boundary"] < 1:
        sparsify(whole, job["boundary"], values=torch.bfloat16)
    return mean(parts.loss(whole, batch).item() for batch in problem.held_out(0, 1))


@functools.cache
def _pipelines() -> list[Any]:
    return [dist.new_group([STAGES * (1 + i) + stage for stage in range(STAGES)]) for i in range(TRAINERS)]


def _address(job: dict[str, Any], stage: int) -> str:
    return f"{host(stage)}:{job['ports'][stage]}"


def _down(job: dict[str, Any]) -> Codec | None:
    return None if job["density"] == 1 else TopK(density=TRAINERS * job["density"])


def main(
    link: Annotated[str, typer.Option(help="Rate of each process's link")] = "100mbit",
    problem: Annotated[str, typer.Option(help="transformer or dlrm")] = "transformer",
    steps: Annotated[int, typer.Option(help="Steps of each trainer")] = 60,
    rounds: Annotated[int, typer.Option(help="In each, all train in turn, with a seed of its own")] = 3,
    rate: Annotated[float, typer.Option(help="Learning rate, over the model's over the number of trainers")] = 1.0,
    boundary: Annotated[float, typer.Option(help="Share of activations that crosses a sparsified boundary")] = 0.1,
    lines: Annotated[str, typer.Option(help="What to train: neither, and others of these")] = ",".join(LINES),
    json: Annotated[Path | None, typer.Option(help="Write every run here, after each round")] = None,
) -> None:
    """Train neither, each and both, round by round, and print a line for each run; then means."""
    prepare_file(json)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in _asked(lines)}
    with Cluster(STAGES * (1 + TRAINERS), parse_rate(link), "thinwire_lab.studies.server_hybrid:handle") as cluster:
        print(f"{problem}, {steps} steps, {cluster.label}", flush=True)
        for seed in range(rounds):
            for name in found:
                recipe, density, sparsified = LINES[name]
                share = boundary if sparsified else 1.0
                job = {"recipe": recipe, "density": density, "boundary": share, "steps": steps, "problem": problem}
                ((_, event),) = cluster.run(job | {"rate": rate, "seed": seed, "ports": free_ports(STAGES)})
                found[name].append(event)
                print(f"seed {seed} {name}: {event}", flush=True)
            write_document(json, SCHEMA, link=cluster.label, runs=found)
    for name, events in found.items():
        losses = [event["loss"] for event in events]
        spread = f" ± {stdev(losses):.4f}" if losses[1:] and math.isfinite(sum(losses)) else ""
        times = [event["seconds"] / other["seconds"] for event, other in zip(events, found["neither"], strict=True)]
        print(f"| {name} | {mean(losses):.4f}{spread} | {median(times):.2f} | {events[0]['bytes'] / 1e3:.0f} kB |")


def _asked(lines: str) -> list[str]:
    """Return the lines by name. Raises BadParameter for one that there is not, or without the one to compare with."""
    asked = lines.split(",")
    if asked[0] != "neither" or not {*asked} <= LINES.keys():
        raise typer.BadParameter(f"--lines is {lines!r}; expected neither, and then some of {', '.join(LINES)}")
    return asked


if __name__ == "__main__":
    typer.run(main)
