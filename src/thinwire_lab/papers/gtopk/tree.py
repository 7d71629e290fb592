"""The library's tree between processes of this machine: what does it lose?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import TopK
from thinwire.exchanges import GlobalTopKTree
from thinwire.exchanges.tree import Merge
from thinwire.payloads import Sparse
from thinwire.signals import Plain
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.cluster.worker import Emit
from thinwire_lab.cluster.workers import join_group

HANDLER = "thinwire_lab.papers.gtopk.tree:handle"


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
    total: Sparse
    delivered: Sequence[Sparse]

    @property
    def lost(self) -> float:
        """The share of the picked mass that is neither in the sum nor returned to a rank."""
        gap = Sparse.concat(list(self.delivered)).dense() - self.total.dense()
        return float(gap.abs().sum()) / sum(float(pick.values.abs().sum()) for pick in self.picks)


def outcomes(trials: Sequence[Trial]) -> list[Outcome]:
    """Run every trial on as many processes as it has ranks, joined by Gloo."""
    found: list[dict[int, Any]] = [{} for _ in trials]
    jobs = [{"merge": trial.merge, "picks": list(map(_plain, trial.picks))} for trial in trials]
    with Cluster(max(len(trial.picks) for trial in trials), None, HANDLER, namespaces=False) as cluster:
        for rank, event in cluster.run({"trials": jobs}):
            found[event["trial"]][rank] = event
    return [
        Outcome(
            picks=trial.picks,
            total=_payload(by_rank[0]["total"]),
            delivered=[_payload(by_rank[rank]["delivered"]) for rank in range(len(trial.picks))],
        )
        for trial, by_rank in zip(trials, found, strict=True)
    ]


def handle(job: dict[str, Any], emit: Emit) -> None:
    """Exchange this rank's picks of each trial in which it takes part."""
    join_group()
    rank, sizes = dist.get_rank(), sorted({len(trial["picks"]) for trial in job["trials"]})
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in sizes}
    for number, trial in enumerate(job["trials"]):
        if rank < len(trial["picks"]):
            tree, group = GlobalTopKTree(merge=trial["merge"]), groups[len(trial["picks"])]
            found = tree.run(_payload(trial["picks"][rank]), group, seeds=[0])
            emit({"trial": number, "total": _plain(found.total), "delivered": _plain(found.delivered)})


def _plain(payload: object) -> list[Any]:
    """Return a payload as JSON has it; a float of 32 bits is one of 64, too."""
    assert isinstance(payload, Sparse)  # Top-k's picks stay sparse in a tree
    wide = payload.values.dtype == torch.float64
    return [payload.indices.tolist(), payload.values.tolist(), payload.numel, wide]


def _payload(plain: Sequence[Any]) -> Sparse:
    indices, values, numel, wide = plain
    dtype = torch.float64 if wide else torch.float32
    return Sparse(
        indices=torch.tensor(indices, dtype=torch.int32), values=torch.tensor(values, dtype=dtype), numel=numel
    )
