"""The machine and the code that figures were taken with."""

import hashlib
import os
import platform
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from thinwire.version import __version__

TODAY = __version__
FIRST = "0.1.0"
"""The version of runs that do not name theirs."""
_PACKAGES = ("numba", "numpy", "triton")


def processor() -> str:
    """Return the processor's model, or its architecture where the system does not say more."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@cache
def code() -> str:
    """Return a digest of all our sources, of twelve digits: results of another digest may differ."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(path for name in ("thinwire", "thinwire_lab") for path in (folder / name).rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def made() -> dict[str, str]:
    """Return when a result was made: now, and by which version, sources, torch and processor."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "thinwire": __version__,
        "code": code(),
        "torch": version("torch"),
        "processor": processor(),
    }


def environment(**more: Any) -> dict[str, Any]:
    """Return what a reader needs to judge figures that were taken here, and `more`. A missing package is None."""
    here = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "python": platform.python_version()}
    return more | made() | here | {name: version_of(name) for name in _PACKAGES}


def version_of(package: str) -> str | None:
    """Return a package's version, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
