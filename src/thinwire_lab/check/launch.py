"""Where a check runs: alone on this machine, or as one of the processes that torchrun started."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store

from thinwire_lab.check.findings import Finding, Found
from thinwire_lab.check.sections import Section
from thinwire_lab.check.worker import connect

_PATIENCE = 4 * 3600.0  # seconds that ranks wait for one that is busy with a section of its own


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process among `world`, and the store that they share, at `address`. Without torchrun it is `alone`."""

    address: tuple[str, int]
    store: Store
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    prefix: str = ""
    alone: bool = True

    @classmethod
    def found(cls) -> Launch:
        """Return where this process stands. Raises RuntimeError if torchrun's store cannot be reached."""
        if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
            store = connect("127.0.0.1", 0, serve=True, patience=_PATIENCE)
            return cls(address=("127.0.0.1", store.port), store=store)
        rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        serve = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return cls(
            address=address,
            store=connect(*address, serve=serve, patience=_PATIENCE),
            rank=rank,
            world=int(os.environ["WORLD_SIZE"]),
            local_rank=int(os.environ.get("LOCAL_RANK", rank)),
            prefix=f"thinwire check/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            alone=False,
        )

    def verdict(self, code: int) -> int:
        """Return rank 0's exit code on every rank."""
        key = f"{self.prefix}/verdict"
        if self.rank == 0:
            self.store.set(key, str(code))
        code = int(self.store.get(key))
        self._meet("end")
        return code

    def threads(self, section: Section) -> int:
        """Return how many threads each process of a section may take."""
        near = section.world if self.alone else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return max(1, (os.cpu_count() or 1) // near) if section.backend else max(1, os.cpu_count() or 1)

    def gathered(self, section: Section, mine: Found) -> Found:
        """Return all ranks' findings on rank 0; elsewhere only wait until all have done the section."""
        if self.alone:
            return mine
        plain = {row: asdict(by_rank[self.rank]) for row, by_rank in mine.items()}
        self.store.set(self._key(section, self.rank), json.dumps(plain))
        every: Found = {}
        for rank in range(self.world):
            for row, found in json.loads(self.store.get(self._key(section, rank))).items():
                every.setdefault(int(row), {})[rank] = Finding(**found)
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
