"""A worker of `thinwire check` in which rows break: run in place of the real one."""

import os
import time
from types import MappingProxyType
from typing import Any

import torch

from thinwire_lab.check import worker


def broken(spec: worker.Spec, row: str, device: torch.device, figures: dict[str, Any]) -> tuple[bool, str]:
    """Do what the row's name says."""
    if row == "hangs":
        time.sleep(1000)
    if row == "aborts":
        os.abort()
    if row == "raises" or row == f"raises on rank {spec.rank}":
        raise RuntimeError("it broke\nand more")
    return True, ""


def joining(spec: worker.Spec, device: torch.device) -> object:
    """Die instead, where the first row says so."""
    if spec.section.rows[spec.start] == f"rank {spec.rank} cannot join":
        os.abort()
    return join(spec, device)


if __name__ == "__main__":
    join = worker._join
    worker._join = joining  # type: ignore[assignment]  # returns what the real one does
    worker.HANDLERS = MappingProxyType(dict.fromkeys(worker.HANDLERS, broken))
    worker.main()
