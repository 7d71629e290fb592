"""gTop-k's tree over P workers in one process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from thinwire.codecs import TopK
from thinwire.exchanges.merging import merged
from thinwire.payloads import Keyed, Sparse
from thinwire.signals import Plain


def pick(x: torch.Tensor, density: float) -> Sparse:
    """Return the share of largest magnitudes."""
    return TopK(density=density).encode_signal(Plain(x.reshape(-1)))


@dataclass(frozen=True, kw_only=True)
class Tree:
    """What each worker picked, what the merges on each worker dropped, and the k rows at the root."""

    picks: list[Keyed]
    dropped: list[list[Keyed]]
    outcome: Keyed

    @classmethod
    def of(cls, payloads: Sequence[Sparse]) -> Self:
        """Merge the payloads pairwise, then pairs of pairs; any number of them."""
        current: list[Keyed] = [merged([payload]) for payload in payloads]
        dropped: list[list[Keyed]] = [[] for _ in payloads]
        reach, k = 1, payloads[0].values.numel()
        while reach < len(payloads):
            for rank in range(0, len(payloads) - reach, 2 * reach):
                both = merged([current[rank], current[rank + reach]])
                current[rank], rest = _largest(both, k)
                dropped[rank].append(rest)
            reach *= 2
        return cls(picks=[merged([payload]) for payload in payloads], dropped=dropped, outcome=current[0])

    def lost(self, rule: str) -> float:
        """Return the share of the picked mass that is neither in the outcome nor back with a worker."""
        delivered = {"paper": self._inside, "exact": self._less_dropped}[rule]()
        picked = sum(float(pick.values.abs().sum()) for pick in self.picks)
        return float((delivered - self.outcome.dense()).abs().sum()) / picked

    def _inside(self) -> torch.Tensor:
        """The sum of what workers take for delivered: their picks at indices of the outcome."""
        chosen = [torch.isin(pick.keys, self.outcome.keys) for pick in self.picks]
        kept = [pick.rekeyed(pick.keys[c], pick.rows[c]) for pick, c in zip(self.picks, chosen, strict=True)]
        return torch.stack([part.dense() for part in kept]).sum(dim=0)

    def _less_dropped(self) -> torch.Tensor:
        """The same, where a merge's rest is taken back by the worker that merged."""
        picked = torch.stack([pick.dense() for pick in self.picks]).sum(dim=0)
        rest = [part.dense() for parts in self.dropped for part in parts]
        return picked - torch.stack(rest).sum(dim=0) if rest else picked


def _largest(rows: Keyed, k: int) -> tuple[Keyed, Keyed]:
    best = torch.zeros(rows.keys.numel(), dtype=torch.bool)
    best[rows.values.abs().topk(min(k, rows.keys.numel())).indices] = True
    return rows.rekeyed(rows.keys[best], rows.rows[best]), rows.rekeyed(rows.keys[~best], rows.rows[~best])
