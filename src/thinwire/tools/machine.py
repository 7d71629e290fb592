"""The machine that figures were taken on."""

import platform
from pathlib import Path


def processor() -> str:
    """Return the processor's model, or its architecture where the system does not say more."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
