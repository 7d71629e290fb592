"""Fixtures for every test."""

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes with a Gloo group between them."""
    ranks = Ranks()
    yield ranks
    ranks.stop()
