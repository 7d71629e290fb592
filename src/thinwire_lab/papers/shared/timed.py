"""How long do single tensors and layers take, on one thread and without a network?

    python -m thinwire_lab.papers.shared.timed routes --json papers/runs/routes.json

`routes`: choosing from a tensor, and decoding what several workers chose; `sent`: bytes of a payload. `selecting`:
finding a threshold on the tensors of the small VGG. `layers`: computing each convolution, and the bytes that it has.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from thinwire.codecs import Codec, HashedSlots, SampledThreshold
from thinwire.codecs.thresholding import kth_largest
from thinwire_lab.inputs import prepare_file, write_document
from thinwire_lab.machine import environment
from thinwire_lab.papers.shared.material import seconds
from thinwire_lab.papers.shared.sweep import SIZES
from thinwire_lab.problems.images import resnet20, vgg

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
Json = Annotated[Path, typer.Option(help="Write the results here.")]


@app.callback()
def one_thread() -> None:
    torch.set_num_threads(1)


DENSITIES = (0.01, 0.001)
Picks = tuple[Tensor, Tensor]
"""Values and their indices."""
Calls = tuple[int, dict[str, Callable[[], object]]]
"""The bytes of a payload, and what to time, by name."""


@app.command()
def routes(
    json: Json,
    worlds: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "2,4,8",
    largest: Annotated[int, typer.Option(help="Bytes of the largest tensor.")] = SIZES[-1],
    repeats: Annotated[int, typer.Option(help="Times that each is measured.")] = 5,
) -> None:
    """Time each route on tensors of each size."""
    prepare_file(json)
    sizes = [size for size in SIZES if size <= largest]
    rows = [row for world in worlds.split(",") for row in _rows(int(world), sizes, repeats)]
    write_document(json, "thinwire.routes/1", environment=environment(repeats=repeats), routes=rows)


def _rows(world: int, sizes: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    for size in sizes:
        x = torch.randn(size // 4, generator=torch.Generator().manual_seed(0)) ** 3  # heavy tails, as gradients have
        for density in DENSITIES:
            for name, route in ROUTES.items():
                sent, calls = route(x, density, world)
                times = {call: seconds(act, repeats, median) for call, act in calls.items()}
                yield {"route": name, "world": world, "density": density, "bytes": size, "sent": sent} | times


def by_topk(x: Tensor, density: float) -> Picks:
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

DENSITY, BATCH = 0.05, 32
WAYS: dict[str, Callable[[Tensor, int], object]] = {
    "sort": lambda x, k: x.abs().sort(descending=True).values[k - 1],
    "topk": lambda x, k: torch.topk(x.abs(), k).values[-1],
    "our exact one": kth_largest,
    "our single pass": lambda x, k: SampledThreshold(density=DENSITY).encode(x),
}


@app.command()
def selecting(json: Json) -> None:
    """Time each way on every large tensor."""
    prepare_file(json)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(p.numel(), generator=generator) ** 3 for p in vgg().parameters() if p.numel() >= 1024]
    found = dict.fromkeys(WAYS, 0.0)
    for name, way in WAYS.items():
        for x in tensors:
            found[name] += seconds(lambda: way(x, max(1, round(DENSITY * x.numel()))))  # noqa: B023 - called at once
    write_document(json, "thinwire.selecting/1", environment=environment(density=DENSITY), seconds=found)


@app.command()
def layers(json: Json) -> None:
    """Time forward and backward of every convolution alone, on inputs of its size."""
    prepare_file(json)
    found = {name: list(_layers(make())) for name, make in (("small VGG", vgg), ("ResNet-20", resnet20))}
    write_document(json, "thinwire.layers/1", environment=environment(batch=BATCH), layers=found)


def _layers(model: nn.Module) -> Iterator[dict[str, Any]]:
    inputs, hooks = dict[nn.Module, Tensor](), []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            noted = module.register_forward_pre_hook(lambda each, given: inputs.__setitem__(each, given[0].detach()))
            hooks.append(noted)
    model(torch.randn(BATCH, 3, 32, 32))
    for hook in hooks:
        hook.remove()
    for layer, x in inputs.items():
        took = seconds(lambda: layer(x.requires_grad_()).sum().backward())  # noqa: B023 - called at once
        yield {"weights": sum(4 * p.numel() for p in layer.parameters()), "seconds": took}


if __name__ == "__main__":
    app()
