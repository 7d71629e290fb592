"""Turning what goes wrong with a user's file into a message of one line."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import BadZipFile

from thinwire.bench.problems.base import BadInput


@contextmanager
def reading(path: Path, expected: str) -> Iterator[None]:
    """Raise what reading or decoding `path` may raise as a BadInput that says what was `expected` of it."""
    try:
        yield
    except BadInput:
        raise
    except (OSError, EOFError, KeyError, ValueError, BadZipFile, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        one_line = " ".join(str(reason).split())
        raise BadInput(f"{path} cannot be used ({one_line}); expected {expected}") from error


def require(condition: bool, path: Path, expected: str) -> None:
    """Raise BadInput unless `path` turned out to hold what was `expected`."""
    if not condition:
        raise BadInput(f"{path} cannot be used; expected {expected}")
