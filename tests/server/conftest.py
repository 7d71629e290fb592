"""Whatever a test opens is closed after it."""

from collections.abc import Iterator

import pytest
from served import close_all


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_all()
