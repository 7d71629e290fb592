"""User input, read or refused with one line that names the fix; and the files that a command writes."""

import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from zipfile import BadZipFile

from thinwire.exchanges import Link
from thinwire.files import write_atomically

_PREFIXES = "kMGT"
_MOST = 10**9  # steps
# a lone capital B would mean bytes
_RATE = r"(\d+(?:\.\d+)?) *([kmgKMG])(?:(?i:bit(?:/s|ps)?)|b(?:ps|/s))"
_LINK = re.compile(rf"{_RATE}(?: */ *(\d+(?:\.\d+)?) *(us|µs|ms|s))?", re.ASCII)
_UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


class BadInput(ValueError):  # noqa: N818 - it reads better where it is raised and caught
    """User input cannot be used. The message is one line; it says what was expected and names the fix."""


@contextmanager
def reading(path: Path, expected: str) -> Iterator[None]:
    """If reading or decoding `path` raises, raise BadInput instead; it says what was `expected`."""
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


def names(text: str, option: str, example: str) -> tuple[str, ...]:
    """Read names separated by commas. Raises BadInput where there are none."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise BadInput(f"{option} {text!r} names nothing; expected e.g. {example}")
    return found


def numbers(text: str, option: str) -> tuple[float, ...]:
    """Read densities separated by commas. Raises BadInput for anything else."""
    try:
        found = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise BadInput(f"{option} {text!r} is not a list of numbers; expected e.g. 0.01 or 0.01,0.001") from error
    if not found:
        raise BadInput(f"{option} {text!r} is empty; expected e.g. 0.01")
    for density in found:
        check_density(density, option)
    return found


def counts(text: str, option: str) -> tuple[int, ...]:
    """Read numbers of steps, 1 or more, separated by commas. Raises BadInput for anything else."""
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise BadInput(f"{option} {text!r}: expected whole numbers, such as 10,30") from error
    if not 1 <= min(found) <= max(found) <= _MOST:
        raise BadInput(f"{option} {text!r:.200}: expected numbers of 1 or more, up to {_MOST:,}, such as 10,30")
    return found


def check_density(density: float, option: str) -> None:
    """Raise BadInput unless the density that `option` gives is a share."""
    if not 0 < density <= 1:
        raise BadInput(f"{option} {density:g} is not a share of the elements; expected above 0 and at most 1")


def check_writable(paths: Iterable[Path | None]) -> None:
    """Raise BadInput if a file cannot be written, or two are the same. Call it before measuring."""
    given = [path for path in paths if path is not None]
    for path in given:
        if not _can_be_written(path):
            raise BadInput(f"cannot write {path}; expected a file in a directory that exists and may be written to")
    if len({path.resolve() for path in given}) < len(given):
        raise BadInput(f"cannot write two things to one file; expected other names than {', '.join(map(str, given))}")


def prepare_file(path: Path | None) -> None:
    """Make the folder of a file that a program is going to write. Raises BadInput if it cannot be written."""
    if path is not None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        check_writable([path])


def _can_be_written(path: Path) -> bool:
    try:
        there = path.resolve()  # RuntimeError for links in a circle; from Python 3.13 on, one of these links
        if there.is_symlink() or (there.exists() and not there.is_file()):  # root would replace /dev/null
            return False
        with TemporaryFile(dir=there.parent):  # permissions are not all: /proc says yes, and takes none
            return True
    except (OSError, RuntimeError):
        return False


def check_apart(read: Iterable[str | Path | None], written: Iterable[Path | None]) -> None:
    """Raise BadInput if a file that a command reads would be replaced by what it writes."""
    kept = {os.path.realpath(path) for path in read if path is not None}
    for path in written:
        if path is not None and os.path.realpath(path) in kept:
            raise BadInput(f"cannot write {path}, which is read; expected another name")


def write_document(path: Path | None, schema: str, **found: Any) -> None:
    """Write what was found as a JSON document, if a path is given."""
    if path is not None:
        write_atomically(path, json.dumps({"schema": schema, **found}, indent=1) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return a file of JSON lines, in its order; nothing if there is no file. Raises BadInput for a line cut off."""
    found = list[dict[str, Any]]()
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), 1):
        with reading(path, f"JSON in line {number}; restore it, or remove that line and run again"):
            found.append(json.loads(line))
    return found


def append_line(path: Path, document: Mapping[str, Any]) -> None:
    """Add a line to a file of JSON lines."""
    with path.open("a") as file:
        print(json.dumps(document), file=file, flush=True)


def rate_text(bits: float, form: str = ".3g") -> str:
    """Return bits per second in the unit of links: ``6.2 Gbit/s``."""
    unit = 0
    while bits >= 999.5 and unit < len(_PREFIXES):
        bits, unit = bits / 1000, unit + 1
    return f"{bits:{form}} {_PREFIXES[unit - 1] if unit else ''}bit/s"


def parse_link(text: str) -> Link:
    """Read ``1gbit`` (without latency) or ``100mbit/0.4ms``. Raises ValueError for anything else or a rate of 0."""
    match = _LINK.fullmatch(text.strip())
    bits = float(match[1]) * 1000 ** (1 + _PREFIXES.lower().index(match[2].lower())) if match else 0.0
    if not match or not 0 < bits < float("inf"):
        raise ValueError(
            f"link {text!r}: expected a rate above 0 and, if wanted, a latency, such as 1gbit or 1gbit/5ms"
        )
    latency = float(match[3]) * _UNITS[match[4]] if match[3] else 0.0
    return Link(latency=latency, bandwidth=bits / 8)
