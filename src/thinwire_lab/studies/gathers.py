"""What does it cost in loss to gather a sharded model's parameters in a few bits? Trained beside FSDP2 itself.

    python -m thinwire_lab.studies.gathers run runs.jsonl --data wikitext2/train.txt
    python -m thinwire_lab.studies.gathers table runs.jsonl

Four workers hold a byte GPT of 12 million parameters together. They train it with AdamW, a warm-up of a tenth of the
steps and a cosine to zero, each on two windows of 64 bytes a step. They are virtual: one process computes each one's
gradient in turn, and rounds what FSDP2 and thinwire would send. Runs that the file has already are left out. Bytes and
step times are those of `thinwire bench --gathers`.
"""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor, nn

from thinwire import kernels
from thinwire.formats import Levels
from thinwire.gathers import Differences, Gathers, Lossless
from thinwire.payloads import exponents
from thinwire.payloads.numbers import narrowed_each
from thinwire_lab import problems
from thinwire_lab.check import speed
from thinwire_lab.inputs import append_line, read_lines
from thinwire_lab.problems.base import Batch, Problem, classes
from thinwire_lab.problems.optimizers import BETAS

WORKERS, WINDOWS, CONTEXT, RATE = 4, 2, 64, 1e-3


class Way(NamedTuple):
    """The dtypes in which FSDP2 gathers and reduces, and what thinwire has travel instead, if anything."""

    gathered: torch.dtype = torch.bfloat16
    reduced: torch.dtype = torch.float32
    recipe: str = ""
    gathers: Gathers | None = None


WAYS = {
    "fp32": Way(gathered=torch.float32),
    "bf16": Way(reduced=torch.bfloat16),
    "bf16, none": Way(recipe="bf16"),
    "bf16, lossless": Way(recipe="bf16", gathers=Lossless()),
    "bf16, differences 4": Way(recipe="bf16", gathers=Differences(bits=4)),
    "bf16, differences 2": Way(recipe="bf16", gathers=Differences(bits=2)),
    "qsgd, lossless": Way(recipe="qsgd", gathers=Lossless()),
    "qsgd, differences 4": Way(recipe="qsgd", gathers=Differences(bits=4)),
    "qsgd, differences 2": Way(recipe="qsgd", gathers=Differences(bits=2)),
}
"""What is trained: FSDP2 itself; then the recipe of gradients, and how parameters travel."""


class Virtual:
    """All workers in one process."""

    def __init__(self, problem: Problem, way: Way) -> None:
        self._way, self._model = way, deepcopy(problem.model).to(way.gathered)
        self._own: list[Tensor] = list(problem.model.parameters())
        for block in self._model.blocks:  # type: ignore[union-attr]  # a ModuleList
            block.register_forward_pre_hook(lambda _, given: tuple(x.to(way.gathered) for x in given))  # as FSDP2 does
        self._runs = [part.numel() for p in self._own for part in p.chunk(WORKERS)]
        self.optimizer = torch.optim.AdamW(self._own, lr=RATE, betas=BETAS, fused=True)
        self._gathered = False

    @property
    def weights(self) -> dict[str, Tensor]:
        """The owners' parameters."""
        return {name: p.detach() for (name, _), p in zip(self._model.named_parameters(), self._own, strict=True)}

    @torch.no_grad()
    def gather(self) -> None:
        """Have all workers compute with the owners' parameters, as they arrive."""
        copies: list[Tensor] = list(self._model.parameters())
        gathers = self._way.gathers
        if isinstance(gathers, Differences) and self._gathered:
            moved = _flat([own - copy.float() for own, copy in zip(self._own, copies, strict=True)])
            values = gathers.encode(moved, self._runs).values
            torch._foreach_add_(copies, _parts(values, copies))
        else:
            torch._foreach_copy_(copies, self._own)
        self._gathered = True

    def step(self, batches: Sequence[Batch]) -> None:
        """Take a step, with a batch for each worker."""
        self.gather()
        total = torch.zeros((), dtype=self._way.reduced)
        for batch in batches:
            loss_of(self._model, batch).backward()
            total = total + self._sent([p.grad for p in self._model.parameters() if p.grad is not None])
            self._model.zero_grad()
        for p, gradient in zip(self._own, _parts(total / WORKERS, self._own), strict=True):
            p.grad = gradient.float()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _sent(self, gradients: list[Tensor]) -> Tensor:
        """Return one worker's gradient as it arrives."""
        flat = _flat(gradients)
        if self._way.recipe == "bf16":
            return flat.bfloat16()
        flat = flat.to(self._way.reduced)
        if self._way.recipe != "qsgd":
            return flat
        seeds = torch.randint(2**62, (len(self._runs),)).tolist()
        values, _ = narrowed_each(flat, self._runs, Levels(bits=4, norm="max"), torch.float32, seeds)
        parts = zip(gradients, _parts(values, gradients), strict=True)
        return _flat([x if x.numel() < 1024 else sent for x, sent in parts])

    def loss(self, batches: Sequence[Batch]) -> float:
        """Return the mean loss."""
        self.gather()
        with torch.no_grad():
            return float(torch.stack([loss_of(self._model, batch) for batch in batches]).mean())


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train one way with one seed, on virtual workers."""
    torch.manual_seed(job["seed"])
    problem = problem_of(job)
    found, start = Virtual(problem, WAYS[job["way"]]), time.perf_counter()
    schedule = schedule_of(found.optimizer, job["steps"])
    looks = []
    for step in range(1, job["steps"] + 1):
        found.step([batch_of(problem, step, rank) for rank in range(WORKERS)])
        schedule.step()
        if step % job["every"] == 0 or step == job["steps"]:
            looks.append([step, round(found.loss(problem.held_out(0, 1)), 5)])
    if job["weights"] is not None:
        torch.save(found.weights, job["weights"])
    return {"seconds": round((time.perf_counter() - start) / job["steps"], 3), "looks": looks}


def problem_of(job: dict[str, Any]) -> Problem:
    return problems.build("transformer", seed=job["seed"], data=Path(job["data"]), scale=job["scale"])


def batch_of(problem: Problem, step: int, rank: int) -> Batch:
    return tuple(x[:WINDOWS, :CONTEXT] for x in problem.batch(step, rank, WORKERS))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return classes(model(inputs).float(), targets)  # bfloat16 would leave a loss three digits


def schedule_of(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    warm = max(1, steps // 10)
    share = lambda step: (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2  # noqa: E731
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warm, share(max(step, warm))))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.view(-1) for x in tensors])


def _parts(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    return [part.view_as(x) for part, x in zip(flat.split([x.numel() for x in like]), like, strict=True)]


app = typer.Typer()


@app.command()
def run(
    file: Path,
    data: Annotated[Path, typer.Option(help="The text, the last twentieth of which is held out.")],
    ways: Annotated[str, typer.Option(help="What to train, separated by semicolons.")] = ";".join(WAYS),
    seeds: str = "0,1,2",
    steps: int = 300,
    every: int = 50,
    scale: Annotated[float, typer.Option(help="Of the model, as in the bench.")] = 13.5,
    weights: Annotated[Path | None, typer.Option(help="A folder for what has been trained.")] = None,
) -> None:
    """Train each way with each seed, and append the held-out losses to the file."""
    torch.set_num_threads(1)
    for seed, way in product(map(int, seeds.split(",")), ways.split(";")):
        names = {"way": way, "seed": seed, "steps": steps, "link": None}
        if any(each.items() >= names.items() for each in read_lines(file)):
            continue
        job = names | {"data": str(data.resolve()), "every": every, "scale": scale}
        job["weights"] = None if weights is None else str(weights / f"{way}, {seed}.pt")
        found = train(job)
        append_line(file, names | found)
        print(way, seed, found["looks"][-1], found["seconds"], flush=True)


@app.command()
def table(file: Path, beside: str = "bf16") -> None:
    """Print losses at the end, over FSDP2's of the same seed, and a step's bytes and time, as Markdown."""
    losses = defaultdict[tuple[int, str | None, str], dict[int, float]](dict)
    last = dict[tuple[int, str | None, str], dict[str, Any]]()
    for each in read_lines(file):
        key = each["steps"], each["link"], each["way"]
        losses[key][each["seed"]], last[key] = each["looks"][-1][1], each
    print("| | link | steps | loss | of bf16's, by seed | MB | ms |", "| --- " * 7 + "|", sep="\n")
    for key, each in last.items():
        native = losses.get((*key[:2], beside), {})
        ratios = [f"{loss / native[seed]:.4f}" for seed, loss in losses[key].items() if seed in native]
        cells = [each["way"], each["link"] or "virtual", str(each["steps"]), f"{mean(losses[key].values()):.4f}"]
        sent = [
            f"{each[name] * times:.1f}" if name in each else "" for name, times in (("bytes", 1e-6), ("seconds", 1e3))
        ]
        print("|", " | ".join([*cells, ", ".join(ratios), *sent]), "|")


@app.command()
def coder(files: list[Path], repeats: int = 9) -> None:
    """Print what coding weights without loss gains and costs on one core, for files that torch has saved, as Markdown.

    The entropy is that of bfloat16's exponents, and 8 bits for the rest. Times are over those of a copy.
    """
    torch.set_num_threads(1)
    print("| weights | number | dtype | bits | entropy | encode | decode |", "| --- " * 7 + "|", sep="\n")
    for file in files:
        whole = torch.cat([x.float().flatten() for x in _floats(torch.load(file, map_location="cpu"))])
        for x in (whole.bfloat16(), whole):
            packed, out = exponents.pack(x), torch.empty_like(x)
            share = kernels.exponents_count(whole.bfloat16().view(torch.int16)).double() / x.numel()
            entropy = 8 * x.itemsize - 8 - float(torch.special.xlogy(share, share).sum()) / math.log(2)
            works = (partial(exponents.pack, x), partial(exponents.unpack, out, packed))
            times = [
                median(a / b for a, b in speed.beside_copy(work, 2 * x.nbytes, x.device, repeats)) for work in works
            ]
            cells = [
                file.stem,
                f"{x.numel():,}",
                str(x.dtype),
                f"{8 * packed.numel() / x.numel():.2f}",
                f"{entropy:.2f}",
            ]
            print("|", " | ".join([*cells, *(f"{each:.1f}" for each in times)]), "|", flush=True)


def _floats(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found] * found.is_floating_point()
    return [x for each in found.values() for x in _floats(each)] if isinstance(found, dict) else []


if __name__ == "__main__":
    app()
