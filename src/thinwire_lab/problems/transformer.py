"""A byte-level GPT on the source of Python's standard library, or on any text."""

import math
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from thinwire_lab.inputs import reading
from thinwire_lab.problems.base import Chain, Options, Parts, Problem, chosen, held_out, made, spaced
from thinwire_lab.problems.text import Windows, source_texts

BATCH, HELD_OUT = 12, 144


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large a ByteGPT is. `context`: how many bytes it sees at once."""

    context: int
    width: int
    heads: int
    layers: int

    @classmethod
    def of(cls, scale: float) -> Self:
        """The shape of about `scale` times 0.83 M parameters, and of at least 0.13 M; layers grow as the width does."""
        if scale == 1:
            return cls(context=64, width=176, heads=4, layers=2)
        layers = max(2, round(2 * scale ** (1 / 3)))
        heads = max(1, round(math.sqrt(834_416 * scale / (12 * layers)) / 64))  # a layer has 12 · width² elements
        return cls(context=max(64, 32 * round(0.8 * scale**0.6)), width=64 * heads, heads=heads, layers=layers)


class Block(nn.Module):
    """Self-attention and a GELU network, each added to the stream (batch, time, width) it reads."""

    def __init__(self, width: int, heads: int) -> None:
        """Both branches start as zero. Plain SGD is then stable at learning rates that would otherwise diverge."""
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_network = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        for linear in (self.qkv, self.up):
            nn.init.normal_(linear.weight, std=width**-0.5)
        for linear in (self.out, self.down):
            nn.init.zeros_(linear.weight)

    def forward(self, stream: Tensor, bias: Tensor) -> Tensor:
        """Return the stream with both branches added. Attention adds `bias` (heads, time, time) to its scores."""
        stream = stream + self._attend(self.before_attention(stream), bias)
        return stream + self.down(F.gelu(self.up(self.before_network(stream))))

    def _attend(self, stream: Tensor, bias: Tensor) -> Tensor:
        query, key, value = self.qkv(stream).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).flatten(2))


class ByteGPT(nn.Module):
    """Bytes (batch, time) int64 to logits of the byte after each, (batch, time, 256)."""

    def __init__(self, shape: Shape) -> None:
        """An embedding of unit variance and a small output layer: at the start every byte is about as likely."""
        super().__init__()
        self.bytes = nn.Embedding(256, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm, self.head = nn.RMSNorm(shape.width), nn.Linear(shape.width, 256, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        return self.head(self.norm(_through(self.blocks, self.bytes(tokens))))


class Stage(nn.Module):
    """Some blocks of a ByteGPT. `before` embeds bytes, or does nothing; `after` gives logits, or does nothing."""

    def __init__(self, before: nn.Module, blocks: nn.ModuleList, after: nn.Module) -> None:
        """Take modules of the model itself."""
        super().__init__()
        self.before, self.blocks, self.after = before, blocks, after

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        """Bytes or the stream (batch, time, width) to the stream or logits; keyword arguments are ignored."""
        return self.after(_through(self.blocks, self.before(x)))


def _through(blocks: nn.ModuleList, stream: Tensor) -> Tensor:
    # Not a buffer: DistributedDataParallel would send it at every step.
    for block in cast("list[Block]", blocks):
        stream = block(stream, recency(stream.shape[1], block.heads, stream.device))
    return stream


@cache
def recency(time: int, heads: int, device: torch.device) -> Tensor:
    """The bias (heads, time, time) of linear distance (ALiBi, Press et al. 2022), minus infinity for later tokens.

    The heads' slopes are 2, 1, 1/2, 1/4: steeper than for words, as the last few bytes say most about the next. More
    heads go on so, and from eleven on in smaller steps, down to 1/256.
    """
    distance = torch.arange(time, device=device)[:, None] - torch.arange(time, device=device)
    slopes = 2.0 ** (1 - min(1.0, 9 / max(1, heads - 1)) * torch.arange(heads, device=device))
    return (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)


def make(options: Options) -> Problem:
    """The problem on the text file `options.data`, its last twentieth held out, or on the standard library."""
    shape = Shape.of(options.scale)
    text, held_text = _texts(options.data)
    source = str(options.data or "Python's standard library")
    train = Windows(tokens=text, length=shape.context, source=source)
    rest = Windows(tokens=held_text, length=shape.context, source=f"the held-out part of {source}")
    return made(
        "transformer",
        "byte-level GPT",
        f"{len(text):,} bytes of {source}",
        options=options,
        network=lambda: ByteGPT(shape),
        draw=partial(train.draw, count=BATCH),
        rest=held_out(spaced(len(rest), HELD_OUT), BATCH, rest.take),
        parts=Parts(split=_split),
    )


def _split(model: nn.Module, stages: int) -> list[nn.Module]:
    """Cut after the first block, and before the logits."""
    whole, nothing = cast(ByteGPT, model), nn.Identity()
    logits, rest = Chain(whole.norm, whole.head), whole.blocks[1:]
    start = Stage(whole.bytes, whole.blocks[:1], nothing)
    three: list[nn.Module] = [start, Stage(nothing, rest, nothing), logits]
    return chosen("transformer", {2: [start, Stage(nothing, rest, logits)], 3: three}, stages)


def _texts(path: Path | None) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    if path is None:
        return source_texts()
    with reading(path, "a text file that is not empty"):
        text = np.memmap(path, np.uint8, mode="r")
    cut = len(text) - len(text) // 20
    return text[:cut], text[cut:]
