"""Contiguous windows of a token stream, as language models train on them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.tools.inputs import BadInput
from thinwire.tools.problems.base import Batch
from thinwire.tools.problems.sampling import Indices


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Every window of `length` tokens in the stream `tokens` (any integer type) that has a token after it.

    Raises BadInput, naming the `source`, where there is none.
    """

    tokens: NDArray[Any]
    length: int
    source: str

    def __post_init__(self) -> None:
        """Refuse a stream too short to hold a single window."""
        if len(self.tokens) <= self.length:
            raise BadInput(f"{self.source} is too short ({len(self.tokens)} tokens); use a longer text")

    def __len__(self) -> int:
        """How many windows there are; they overlap."""
        return len(self.tokens) - self.length

    def take(self, starts: Indices) -> Batch:
        """The windows that begin at `starts` (n,) and the tokens that follow each: two int64 (n, length)."""
        rows = torch.from_numpy(np.asarray(self.tokens[starts[:, None] + np.arange(self.length + 1)], np.int64))
        return rows[:, :-1], rows[:, 1:]

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        """`count` windows chosen at random, as `take` gives them."""
        return self.take(generator.integers(len(self), size=count))
