"""Which samples does a rank train on at a step, and which held-out ones are its share?"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from thinwire_lab.inputs import BadInput
from thinwire_lab.problems.base import Batch

Indices = NDArray[np.int64]
Draw = Callable[[np.random.Generator], Batch]
Take = Callable[[Indices], Batch]


def batches(seed: int, draw: Draw) -> Callable[[int, int, int], Batch]:
    """A `Problem.batch` that draws every batch with its own generator; no batch depends on another."""
    return lambda step, rank, world: draw(np.random.default_rng((seed, step, rank, world)))


def held_out(samples: Indices, batch_size: int, take: Take) -> Callable[[int, int], list[Batch]]:
    """A `Problem.held_out` over the samples of these indices, in batches of at most `batch_size`."""
    return lambda rank, world: [take(chunk) for chunk in share(samples, rank, world, batch_size)]


def share(samples: Indices, rank: int, world: int, batch_size: int) -> list[Indices]:
    """Every world-th sample from number `rank` on, in equal batches of up to `batch_size`; all ranks get as many.

    A remainder is left out: less than one sample per batch and rank. Raises BadInput if there are fewer samples than
    ranks.
    """
    each = len(samples) // world
    if each == 0:
        raise BadInput(f"{len(samples)} held-out samples cannot be shared by {world} workers; use fewer workers")
    count = -(-each // batch_size)
    return np.split(samples[rank::world][: each // count * count], count)


def spaced(count: int, limit: int) -> Indices:
    """At most `limit` of the indices below `count`, evenly spaced."""
    return np.linspace(0, count, min(count, limit), endpoint=False).astype(np.int64)
