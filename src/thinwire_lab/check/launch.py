"""Where a check runs: alone on this machine, or as one of the processes that torchrun started."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from thinwire_lab.check.findings import Finding, merged
from thinwire_lab.check.sections import Section
from thinwire_lab.check.supervision import Found, Place, run
from thinwire_lab.check.worker import connect

_PATIENCE = 4 * 3600.0  # seconds that ranks wait for one that is busy with a section of its own


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process among `world`, and the store that they share."""

    rank: int
    world: int
    local_rank: int
    address: tuple[str, int]
    store: Store
    prefix: str
    alone: bool

    @classmethod
    def found(cls) -> Launch:
        """Return where this process stands. Raises RuntimeError if torchrun's store cannot be reached."""
        if not is_launched():
            store = connect("127.0.0.1", 0, serve=True, patience=_PATIENCE)
            address = ("127.0.0.1", store.port)
            return cls(rank=0, world=1, local_rank=0, address=address, store=store, prefix="", alone=True)
        rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        serve = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return cls(
            rank=rank,
            world=int(os.environ["WORLD_SIZE"]),
            local_rank=int(os.environ.get("LOCAL_RANK", rank)),
            address=address,
            store=connect(*address, serve=serve, patience=_PATIENCE),
            prefix=f"thinwire check/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            alone=False,
        )

    def work(self, section: Section, device: str, tell: Callable[[Finding], None]) -> list[Finding]:
        """Do a section together with the other processes. Return, on rank 0, what came of each row."""
        mine: Found = {}
        devices = 1 if device == "cpu" else torch.cuda.device_count()
        if section.backend or self.local_rank < devices:  # each has one of its own, or they meet in a group
            place = Place(
                ranks=range(section.world) if self.alone else [self.rank],
                device=device if device == "cpu" else f"cuda:{self.local_rank % devices}",
                threads=self._threads(section),
                address=self.address,
                store=self.store,
                prefix=self.prefix,
                alone=self.alone,
            )
            mine = run(section, place, tell)
        every = self._gathered(section, mine)
        none = Finding(section=section.title, name="", ok=None, said="not run, as there was no group")
        return [merged(every[i]) if every.get(i) else replace(none, name=row) for i, row in enumerate(section.rows)]

    def verdict(self, code: int) -> int:
        """Return rank 0's exit code on every rank."""
        key = f"{self.prefix}/verdict"
        if self.rank == 0:
            self.store.set(key, str(code))
        code = int(self.store.get(key))
        self._meet("end")
        return code

    def _threads(self, section: Section) -> int:
        near = section.world if self.alone else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return max(1, (os.cpu_count() or 1) // near) if section.backend else max(1, os.cpu_count() or 1)

    def _gathered(self, section: Section, mine: Found) -> Found:
        """Return all ranks' findings on rank 0; elsewhere only wait until all have done the section."""
        if self.alone:
            return mine
        plain = {row: {rank: asdict(found) for rank, found in by_rank.items()} for row, by_rank in mine.items()}
        self.store.set(self._key(section, self.rank), json.dumps(plain))
        every: Found = {}
        for rank in range(self.world):
            for row, by_rank in json.loads(self.store.get(self._key(section, rank))).items():
                found = {int(rank): Finding(**each) for rank, each in by_rank.items()}
                every.setdefault(int(row), {}).update(found)
        self._meet(section.title)
        return every

    def _key(self, section: Section, rank: int) -> str:
        return f"{self.prefix}/{section.title}/findings of {rank}"

    def _meet(self, where: str) -> None:
        """Wait for all processes, so that the one that serves the store ends last."""
        if self.alone:
            return
        key = f"{self.prefix}/{where}/met"
        if self.store.add(key, 1) == self.world:
            self.store.set(f"{key} all", "yes")
        self.store.wait([f"{key} all"], timedelta(seconds=_PATIENCE))


def is_launched() -> bool:
    """Whether torchrun started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
