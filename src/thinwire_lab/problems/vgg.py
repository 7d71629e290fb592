"""A small network in the manner of VGG (Simonyan and Zisserman 2015) on CIFAR-10, most of it in dense layers."""

from itertools import pairwise

from torch import nn

from thinwire_lab.problems.base import Options, Problem
from thinwire_lab.problems.cifar import CLASSES
from thinwire_lab.problems.images import classifier

CHANNELS, DENSE = (3, 16, 32, 64), (1024, 1024, 512)


def vgg() -> nn.Sequential:
    """Images (batch, 3, 32, 32) to logits (batch, 10)."""
    blocks = [part for pair in pairwise(CHANNELS) for part in _block(*pair)]
    dense = [part for pair in pairwise(DENSE) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*blocks, nn.Flatten(), *dense, nn.Linear(DENSE[-1], CLASSES))


def make(options: Options) -> Problem:
    """The problem on the CIFAR-10 file `options.data`."""
    return classifier(options, "vgg", "small VGG", vgg)


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    """Return a convolution after which height and width are halved."""
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
