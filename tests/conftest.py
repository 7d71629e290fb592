"""Fixtures for every test."""

import os
from collections.abc import Iterator

import pytest
import torch
from ranks import Ranks

if not torch.cuda.is_available():
    # Read when triton is imported, which torch.distributed.pipelining does, in whatever test comes first.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes with a Gloo group between them."""
    ranks = Ranks()
    yield ranks
    ranks.stop()
