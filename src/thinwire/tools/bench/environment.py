"""Where and with what a run was taken."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from thinwire.tools.bench.options import Options

_PACKAGES = ("torch", "thinwire", "numba")


def describe(options: Options) -> dict[str, Any]:
    """Return what a reader needs to judge the figures by."""
    return {
        "model": options.model,
        "workers": options.workers,
        "pipeline": options.pipeline,
        "micro_batches": options.micro_batches if options.pipeline > 1 else None,
        "steps": options.steps,
        "seed": options.seed,
        "scale": options.scale,
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
