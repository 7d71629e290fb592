"""The library's tree between processes of this machine: what does it lose?"""

import multiprocessing
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import TopK
from thinwire.exchanges import GlobalTopKTree
from thinwire.exchanges.tree import Merge
from thinwire.payloads import Sparse
from thinwire.signals import Plain

Rows = tuple[np.ndarray, np.ndarray]
"""Indices and values, in the form that passes between processes."""


def pick(x: Tensor, density: float) -> Sparse:
    """Return the largest magnitudes, a share `density` of all."""
    return TopK(density=density).encode_signal(Plain(x.reshape(-1)))


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The picks of several ranks, and the rule for what counts as delivered: exact or paper."""

    picks: Sequence[Sparse]
    merge: Merge = "exact"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The sum at the root, and which of each rank's picks the exchange reports as delivered."""

    picks: Sequence[Sparse]
    total: Rows
    delivered: Sequence[Rows]

    @property
    def lost(self) -> float:
        """The share of the picked mass that is neither in the sum nor returned to a rank."""
        gap = self._dense(*self.delivered) - self._dense(self.total)
        return float(gap.abs().sum()) / sum(float(pick.values.abs().sum()) for pick in self.picks)

    def _dense(self, *parts: Rows) -> Tensor:
        out = torch.zeros(self.picks[0].numel, dtype=self.picks[0].values.dtype)
        for indices, values in parts:
            out.index_add_(0, torch.from_numpy(indices).long(), torch.from_numpy(values))
        return out


def outcomes(trials: Sequence[Trial]) -> list[Outcome]:
    """Run every trial on as many processes as it has ranks, joined by Gloo."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    world, pipes = max(len(trial.picks) for trial in trials), []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world):
            mine, theirs = context.Pipe()
            place = (str(Path(folder) / "store"), rank, world)
            context.Process(target=_rank, args=(theirs, place, _jobs(trials, rank)), daemon=True).start()
            theirs.close()
            pipes.append(mine)
        found = [pipe.recv() for pipe in pipes]
    return [_outcome(trial, [rows[place] for rows in found]) for place, trial in enumerate(trials)]


Job = tuple[int, Merge, Rows | None, int]
"""Ranks, rule, this rank's picks where it takes part, and the length of the vector."""


def _jobs(trials: Sequence[Trial], rank: int) -> list[Job]:
    return [
        (
            len(trial.picks),
            trial.merge,
            _rows(trial.picks[rank]) if rank < len(trial.picks) else None,
            trial.picks[0].numel,
        )
        for trial in trials
    ]


def _rank(answer: Connection, place: tuple[str, int, int], jobs: Sequence[Job]) -> None:
    store, rank, world = place
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in sorted({job[0] for job in jobs})}
    found: list[tuple[Rows, Rows] | None] = []
    for ranks, merge, rows, numel in jobs:
        if rows is None:
            found.append(None)
            continue
        payload = Sparse(indices=torch.from_numpy(rows[0]), values=torch.from_numpy(rows[1]), numel=numel)
        exchanged = GlobalTopKTree(merge=merge).run(payload, groups[ranks], seeds=[0])
        found.append((_rows(exchanged.total), _rows(exchanged.delivered)))
    answer.send(found)
    dist.barrier()
    dist.destroy_process_group()


def _rows(payload: object) -> Rows:
    assert isinstance(payload, Sparse)  # Top-k's picks stay sparse in a tree
    return payload.indices.numpy(), payload.values.numpy()


def _outcome(trial: Trial, found: Sequence[tuple[Rows, Rows] | None]) -> Outcome:
    taken = [rows for rows in found if rows is not None]
    return Outcome(picks=trial.picks, total=taken[0][0], delivered=[delivered for _, delivered in taken])
