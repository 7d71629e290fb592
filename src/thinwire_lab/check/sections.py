"""What is checked, in sections: each has rows that one process, or all ranks together, work through."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from thinwire_lab.check import about, exchanges, speed, training
from thinwire_lab.check.kernels import KERNELS, QUICK, SIZES


@dataclass(frozen=True, kw_only=True)
class Section:
    """Rows of one kind.

    kind: which function of worker.py does them. limit: seconds that a row may take before it counts as hung. backend:
    of the group that does them together, or empty if each device does them on its own. world: how many ranks.
    lanes: how many processes a device's rows are dealt to.
    """

    title: str
    kind: str
    rows: Sequence[str]
    limit: float
    backend: str = ""
    world: int = 1
    lanes: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user asked for. only: parts of the names of rows, or nothing for all of them."""

    device: str
    quick: bool = False
    only: Sequence[str] = ()

    def sections(self, launched: int | None) -> list[Section]:
        """Return what there is to do; `launched` is the size of the group that torchrun made, if it did."""
        return [found for section in self._all(launched) if (found := self._chosen(section)).rows]

    def _chosen(self, section: Section) -> Section:
        if not self.only or section.kind == "machine":
            return section
        rows = [row for row in section.rows if any(part in row for part in self.only)]
        return Section(**{**vars(section), "rows": rows})

    def _all(self, launched: int | None) -> Iterator[Section]:
        yield Section(title="machine", kind="machine", rows=list(about.ROWS), limit=120)
        lanes = 1 if self.device == "cpu" else max(1, min(4, (os.cpu_count() or 1) // 4))  # compiling takes cores
        fully = {"sizes": QUICK if self.quick else SIZES, "share": 1 / lanes}
        yield Section(title="kernels", kind="kernels", rows=sorted(KERNELS), limit=300, lanes=lanes, options=fully)
        exponents = ((24,), (22,)) if self.device == "cpu" else ((20, 24, 27), (24,))
        for exponent in exponents[self.quick]:
            title, options = f"speed, 2^{exponent} elements", {"size": 1 << exponent}
            yield Section(title=title, kind="speed", rows=list(speed.ROWS), limit=120, options=options)
        for backend, world in self._groups(launched):
            group: dict[str, Any] = {"backend": backend, "world": world}
            where = f"{backend} of {world}"
            yield Section(title=f"exchanges, {where}", kind="exchanges", rows=exchanges.ROWS, limit=60, **group)
            limit, options = 120 if self.quick else 240, {"steps": 6 if self.quick else 100}
            kind: dict[str, Any] = {"kind": "recipes", "rows": training.NAMES, "limit": limit, "options": options}
            yield Section(title=f"recipes, {where}", **kind, **group)

    def _groups(self, launched: int | None) -> Iterator[tuple[str, int]]:
        """Yield backends and sizes. NCCL takes one rank a GPU, so alone it gets a group of one."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if launched else 1
        if self.device != "cpu" and dist.is_nccl_available() and local <= torch.cuda.device_count():
            yield "nccl", launched or 1
        yield "gloo", launched or (2 if self.quick or self.device != "cpu" else 3)
