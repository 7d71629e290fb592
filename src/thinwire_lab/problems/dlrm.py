"""A click predictor of embeddings and two small networks, on generated clicks or on Criteo's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire_lab.problems import clicks
from thinwire_lab.problems.base import Batch, Chain, Draw, Options, Parts, Problem, chosen, held_out, made, spaced
from thinwire_lab.problems.clicks import CATEGORIES, DENSE

WIDTH, BOTTOM, TOP = 16, (512, 256, 64, 16), (512, 256, 128, 1)
BATCH, HELD_OUT, EVALUATED = 128, 24_576, 512


class Interaction(nn.Module):
    """From a vector (batch, 16) and ids (batch, features) int64 to the vector and the dot products of all pairs.

    The output is (batch, 16 + pairs). rows: how many ids each feature has; all embeddings are in one table.
    """

    offsets: Tensor
    pairs: Tensor

    def __init__(self, rows: Sequence[int]) -> None:
        """Embeddings uniform within ±1 / sqrt(rows of the feature)."""
        super().__init__()
        self.embedding = nn.Embedding(sum(rows), WIDTH)
        ends, count = np.cumsum(rows), len(rows) + 1
        first, second = torch.tril_indices(count, count, -1)
        self.register_buffer("offsets", torch.tensor(ends - rows), persistent=False)
        self.register_buffer("pairs", first * count + second, persistent=False)
        for table, own in zip(self.embedding.weight.detach().split(list(rows)), rows, strict=True):
            nn.init.uniform_(table, -(own**-0.5), own**-0.5)

    def forward(self, vector: Tensor, ids: Tensor) -> Tensor:
        """See the class."""
        vectors = torch.cat([vector[:, None], self.embedding(ids + self.offsets)], 1)
        products = torch.bmm(vectors, vectors.mT).flatten(1)
        return torch.cat([vector, products.index_select(1, self.pairs)], 1)


class DLRM(nn.Module):
    """Dense features (batch, 13) and ids (batch, 26) int64 to logits (batch, 1) (Naumov et al. 2019).

    With only parts of `bottom` and `top`, it is the pipeline stage that has the embeddings.
    """

    def __init__(self, bottom: nn.Module, interaction: nn.Module, top: nn.Module) -> None:
        """Networks before and after the features meet."""
        super().__init__()
        self.bottom, self.interaction, self.top = bottom, interaction, top

    def forward(self, x: Tensor, *, ids: Tensor, **_: Any) -> Tensor:
        """See the class."""
        return self.top(self.interaction(self.bottom(x), ids))


def make(options: Options) -> Problem:
    """The problem on the file `options.data` of Criteo's clicks, or on generated ones."""
    source = _generated() if options.data is None else _criteo(options.data)
    parts = Parts(
        split=_split,
        feed=lambda batch: ((batch[0],), {"ids": batch[1]}, batch[2]),
        criterion=lambda logits, labels: F.binary_cross_entropy_with_logits(logits.flatten(), labels.float()),
    )
    return made(
        "dlrm",
        "DLRM",
        source.title,
        options=options,
        network=lambda: _network(source.rows),
        draw=source.draw,
        rest=source.held_out,
        loss=lambda model, batch: parts.loss([model], batch),
        parts=parts,
    )


@dataclass(frozen=True, kw_only=True)
class Source:
    """Clicks to train on; `rows`: how many ids each categorical feature has."""

    title: str
    rows: Sequence[int]
    draw: Draw
    held_out: Callable[[int, int], list[Batch]]


def _generated() -> Source:
    # The same for every seed, like a data set on disk; the seed draws the batches.
    nature = np.random.default_rng(0)
    teacher = clicks.teacher(nature)
    rest = teacher.show(nature, HELD_OUT)
    best = clicks.entropy(teacher.chances(rest))
    return Source(
        title=f"generated clicks, best possible loss {best:.3f}",
        rows=clicks.ROWS.tolist(),
        draw=partial(teacher.draw, count=BATCH),
        held_out=held_out(np.arange(HELD_OUT), EVALUATED, rest.take),
    )


def _criteo(path: Path) -> Source:
    found = clicks.load(path)
    cut = len(found.labels) - len(found.labels) // clicks.DAYS
    return Source(
        title=f"the first {len(found.labels):,} lines of {path}",
        rows=[clicks.CRITEO_ROWS] * CATEGORIES,
        draw=lambda generator: found.take(generator.integers(cut, size=BATCH)),
        held_out=held_out(cut + spaced(len(found.labels) - cut, HELD_OUT), EVALUATED, found.take),
    )


def _network(rows: Sequence[int]) -> DLRM:
    """The network with its initial weights, drawn from torch's generator."""
    vectors = len(rows) + 1
    bottom = [*_layers(DENSE, BOTTOM), nn.ReLU()]
    top = _layers(WIDTH + vectors * (vectors - 1) // 2, TOP)
    return DLRM(Chain(*bottom), Interaction(rows), Chain(*top))


def _layers(width: int, widths: Sequence[int]) -> list[nn.Module]:
    """Linear layers with ReLUs between, initialised as in Naumov's DLRM."""
    layers: list[nn.Module] = []
    for before, after in pairwise((width, *widths)):
        linear = nn.Linear(before, after)
        nn.init.normal_(linear.weight, std=(2 / (before + after)) ** 0.5)
        nn.init.normal_(linear.bias, std=after**-0.5)
        layers += [linear, nn.ReLU()]
    return layers[:-1]


def _split(model: nn.Module, stages: int) -> list[nn.Module]:
    """Cut after two layers of the bottom network, and after two of the top one."""
    whole = cast(DLRM, model)
    bottom, top = cast(Chain, whole.bottom), cast(Chain, whole.top)
    start, rest = bottom[:4], bottom[4:]
    two = [start, DLRM(rest, whole.interaction, top)]
    three = [start, DLRM(rest, whole.interaction, top[:4]), top[4:]]
    return chosen("dlrm", {2: two, 3: three}, stages)
