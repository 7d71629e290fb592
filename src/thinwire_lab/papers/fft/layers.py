"""How long does each convolution compute, and how many bytes has it?

python -m thinwire_lab.papers.fft.layers --json F
"""

import json as js
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from thinwire_lab.machine import environment
from thinwire_lab.papers.shared.material import seconds
from thinwire_lab.problems.images import resnet20, vgg

BATCH = 32
NETWORKS = {"small VGG": vgg, "ResNet-20": resnet20}


def main(json: Annotated[Path, typer.Option(help="Write the seconds and bytes here.")]) -> None:
    """Measure forward and backward of every convolution alone, on inputs of its size, one thread."""
    torch.set_num_threads(1)
    found = {name: list(_layers(make())) for name, make in NETWORKS.items()}
    json.write_text(js.dumps({"environment": environment(batch=BATCH), "layers": found}, indent=1) + "\n")


def _layers(model: nn.Module) -> Iterator[dict[str, Any]]:
    inputs: dict[nn.Module, Tensor] = {}
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(lambda each, arguments: inputs.__setitem__(each, arguments[0].detach()))
    model(torch.randn(BATCH, 3, 32, 32))
    for layer, x in inputs.items():
        yield {"weights": sum(4 * p.numel() for p in layer.parameters()), "seconds": _timed(layer, x.requires_grad_())}


def _timed(layer: nn.Module, x: Tensor) -> float:
    hooks, layer._forward_pre_hooks = layer._forward_pre_hooks, type(layer._forward_pre_hooks)()
    found = seconds(lambda: layer(x).sum().backward())
    layer._forward_pre_hooks = hooks
    return found


if __name__ == "__main__":
    typer.run(main)
