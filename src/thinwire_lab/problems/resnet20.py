"""ResNet-20 of He et al. (2016, section 4.2) on CIFAR-10."""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from thinwire_lab.problems.base import Options, Problem
from thinwire_lab.problems.cifar import CLASSES
from thinwire_lab.problems.images import classifier


class Residual(nn.Module):
    """Two 3 x 3 convolutions, and a shortcut that only subsamples the image and pads it with zero channels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        """From `inputs` to `outputs` channels; if they differ, height and width are halved."""
        super().__init__()
        self.stride, self.added = (1 if inputs == outputs else 2), outputs - inputs
        self.body = nn.Sequential(
            *_convolution(inputs, outputs, self.stride), nn.ReLU(), *_convolution(outputs, outputs, 1)
        )

    def forward(self, images: Tensor) -> Tensor:
        """(batch, inputs, height, width) to (batch, outputs, height / stride, width / stride)."""
        around = F.pad(images[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        return F.relu(around + self.body(images))


def resnet20() -> nn.Sequential:
    """Images (batch, 3, 32, 32) to logits (batch, 10)."""
    widths = [16] * 4 + [32] * 3 + [64] * 3
    blocks = [Residual(*pair) for pair in pairwise(widths)]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)]
    model = nn.Sequential(*_convolution(3, 16, 1), nn.ReLU(), *blocks, *tail)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def make(options: Options) -> Problem:
    """The problem on the CIFAR-10 file `options.data`."""
    return classifier(options, "resnet20", "ResNet-20", resnet20)


def _convolution(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs)]
