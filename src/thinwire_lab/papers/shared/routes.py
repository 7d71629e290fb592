"""How long does choosing from a tensor take, and decoding what several workers chose, by several routes?

    python -m thinwire_lab.papers.shared.routes --json papers/runs/routes.json

One thread, no network. `sent`: bytes of a payload.
"""

import json as js
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from thinwire.codecs import Codec, HashedSlots, SampledThreshold
from thinwire_lab.machine import environment
from thinwire_lab.papers.shared.material import seconds
from thinwire_lab.papers.shared.sweep import SIZES

SCHEMA = "thinwire.routes/1"
DENSITIES = (0.01, 0.001)
Picks = tuple[Tensor, Tensor]
"""Values and their indices."""
Calls = tuple[int, dict[str, Callable[[], object]]]
"""The bytes of a payload, and what to time, by name."""


def main(
    json: Annotated[Path, typer.Option(help="Write the results here.")],
    worlds: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "2,4,8",
    largest: Annotated[int, typer.Option(help="Bytes of the largest tensor.")] = SIZES[-1],
    repeats: Annotated[int, typer.Option(help="Times that each is measured.")] = 5,
) -> None:
    """Measure."""
    torch.set_num_threads(1)
    sizes = [size for size in SIZES if size <= largest]
    rows = [row for world in worlds.split(",") for row in _rows(int(world), sizes, repeats)]
    json.write_text(js.dumps({"schema": SCHEMA, "environment": environment(repeats=repeats), "routes": rows}, indent=1))


def _rows(world: int, sizes: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    for size in sizes:
        x = torch.randn(size // 4, generator=torch.Generator().manual_seed(0)) ** 3  # heavy tails, as gradients have
        for density in DENSITIES:
            for name, route in ROUTES.items():
                sent, calls = route(x, density, world)
                times = {call: seconds(act, repeats, median) for call, act in calls.items()}
                yield {"route": name, "world": world, "density": density, "bytes": size, "sent": sent} | times


def by_topk(x: Tensor, density: float) -> Picks:
    """Exact Top-k by torch."""
    indices = torch.topk(x.abs(), max(1, round(density * x.numel())), sorted=False).indices
    return x[indices], indices.int()


def by_mask(x: Tensor, density: float) -> Picks:
    """DGC's selection: a threshold from a sample of 1 %, a mask, and the places where it is set."""
    sample = x[:: min(100, max(1, x.numel() // 1000))].abs()
    least = torch.topk(sample, max(1, round(density * sample.numel())), sorted=False).values.min()
    indices = (x.abs() >= least).nonzero().view(-1)
    return x[indices], indices.int()


def one_by_one(payloads: Sequence[Picks], numel: int) -> Tensor:
    """Decode each payload to a dense tensor, and add these up."""
    total = torch.zeros(numel)
    for values, indices in payloads:
        total += torch.zeros(numel).index_copy_(0, indices.long(), values)
    return total


def together(payloads: Sequence[Picks], numel: int) -> Tensor:
    """Decode all payloads into one tensor."""
    total = torch.zeros(numel)
    for values, indices in payloads:
        total.index_add_(0, indices.long(), values)
    return total


def _ours(codec: Callable[[float], Codec]) -> Callable[[Tensor, float, int], Calls]:
    """Return the route of a codec of this library, whose decoder takes all payloads at once."""

    def route(x: Tensor, density: float, world: int) -> Calls:
        made = codec(density)
        payload = made.encode(x)
        rows = torch.stack([payload.to_buffer()] * world)
        return payload.nbytes, {
            "encode": lambda: made.encode(x).to_buffer(),
            "decode": lambda: payload.from_buffers(rows).dense(),
        }

    return route


def _torchs(pick: Callable[[Tensor, float], Picks]) -> Callable[[Tensor, float, int], Calls]:
    """Return the route of a selection in plain torch, whose values and indices take 32 bits each."""

    def route(x: Tensor, density: float, world: int) -> Calls:
        picks = pick(x, density)
        return 8 * picks[0].numel(), {
            "encode": lambda: pick(x, density),
            "decode": lambda: together([picks] * world, x.numel()),
            "decode one by one": lambda: one_by_one([picks] * world, x.numel()),
        }

    return route


ROUTES: dict[str, Callable[[Tensor, float, int], Calls]] = {
    "topk": _torchs(by_topk),
    "mask": _torchs(by_mask),
    "sampled": _ours(lambda density: SampledThreshold(density=density)),
    "hashed": _ours(lambda density: HashedSlots(density=density)),
}

if __name__ == "__main__":
    typer.run(main)
