"""How long does finding a threshold take on the tensors of the small VGG?

python -m thinwire_lab.papers.dct.selecting --json F
"""

import json as js
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from thinwire.codecs import SampledThreshold
from thinwire.codecs.thresholding import kth_largest
from thinwire_lab.machine import environment
from thinwire_lab.papers.shared.material import seconds
from thinwire_lab.problems.images import vgg

DENSITY = 0.05
WAYS: dict[str, Callable[[Tensor, int], object]] = {
    "sort": lambda x, k: x.abs().sort(descending=True).values[k - 1],
    "topk": lambda x, k: torch.topk(x.abs(), k).values[-1],
    "our exact one": kth_largest,
    "our single pass": lambda x, k: SampledThreshold(density=DENSITY).encode(x),
}


def main(json: Annotated[Path, typer.Option(help="Write the seconds here.")]) -> None:
    """Measure each way on every large tensor, one thread."""
    torch.set_num_threads(1)
    sizes = [p.numel() for p in vgg().parameters() if p.numel() >= 1024]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) ** 3 for size in sizes]
    found = {name: sum(_seconds(way, x) for x in tensors) for name, way in WAYS.items()}
    json.write_text(js.dumps({"environment": environment(density=DENSITY), "seconds": found}, indent=1) + "\n")


def _seconds(way: Callable[[Tensor, int], object], x: Tensor) -> float:
    return seconds(lambda: way(x, max(1, round(DENSITY * x.numel()))))


if __name__ == "__main__":
    typer.run(main)
