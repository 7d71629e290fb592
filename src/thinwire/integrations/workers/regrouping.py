"""Workers that come and go: what becomes of exchanges that were under way, as all who are left decide alike.

A worker may die within an exchange. Then some of the others may have all of it, and some not. Elastic workers apply a
mean only once they know that all of them have it. So if anybody has applied it, everybody has it: those who did not
hear so in time apply it, too. Else it is repeated.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from thinwire.collectives import Group, all_gather, all_gather_plain
from thinwire.integrations.workers.fragments import Fragment
from thinwire.outer_steps import OuterSteps

Verdict = Literal["nothing", "keep", "repeat"]


class Part(NamedTuple):
    """Where a fragment stands: exchanges started and finished, and whether the latest has landed but is in doubt."""

    started: int
    finished: int
    landed: bool

    def verdict(self, others: Sequence["Part"]) -> Verdict:
        """Return what becomes of the latest exchange, given where all workers stand who have taken part in it."""
        if self.finished >= self.started:
            return "nothing"
        known = all(other.finished > self.finished or other.landed for other in others)
        return "keep" if self.landed and known else "repeat"


def standing(fragments: Sequence[Fragment], steps: OuterSteps, ticks: int) -> list[Part]:
    """Return where this worker's fragments stand, after waiting for what is under way, if that still comes."""
    for fragment in fragments:
        fragment.land_if_possible()
    return [Part(steps.done(i, ticks), each.finished, each.landed) for i, each in enumerate(fragments)]


def verdicts(mine: Sequence[Part] | None, group: Group) -> tuple[list[Verdict], int]:
    """Return what becomes of each fragment's latest exchange, and the first rank that was here before; a collective."""
    everyone = all_gather_plain(mine, group)
    old = [[Part(*part) for part in each] for each in everyone if each is not None]
    if not old:
        raise RuntimeError("all workers of this group are joining; expected at least one that is not")
    first = next(rank for rank, each in enumerate(everyone) if each is not None)
    found = [[part.verdict([each[i] for each in old]) for i, part in enumerate(parts)] for parts in (mine or (), *old)]
    if len(old) < len(everyone) and any("repeat" in each for each in found):
        raise RuntimeError(
            "an exchange has failed and must be repeated by the workers that took part in it, before another one "
            "joins: regroup with the remaining workers first, then with the one that joins"
        )
    return found[0], first


def confirm(group: Group, device: torch.device) -> None:
    """Return once all workers of the group are here. Raises what torch raises if one never comes."""
    all_gather(torch.zeros(group.size(), device=device), torch.zeros(1, device=device), group).wait()
