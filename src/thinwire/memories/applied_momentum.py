"""Memories that apply momentum in the optimizer's place."""

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import ClassVar

from torch import Tensor

from thinwire.memories.base import Memory
from thinwire.memories.staged import Staged


class AppliedMomentum(Memory):
    """Applies the optimizer's momentum, before anything is chosen; it is "momentum" in `state`.

    `attach(..., optimizer=optimizer)` moves momentum out of the optimizer into it, and back. On each rank it is that
    rank's share: the sum over ranks is the momentum of the mean gradient.
    """

    own: ClassVar[str] = "decay"
    """The setting that is `own_decay`."""

    _adopted: dict[str, float]

    @property
    @abstractmethod
    def own_decay(self) -> float | None:
        """The decay β of momentum; None if it is the optimizer's, set by `adopt`."""

    @abstractmethod
    def momenta(self) -> Staged:
        """Return where momentum is held."""

    def adopt(self, decays: Mapping[str, float]) -> None:
        """Use these decays, by parameter, where the memory has none of its own."""
        self._adopted = dict(decays)

    def receive(self, name: str, momentum: Tensor) -> None:
        """Add an optimizer's momentum (flat) to that of parameter `name`.

        If a step has begun, it decays as the momentum already there did.
        """
        continues = self.begun(name)
        committed, staged = self.momenta().open(name, momentum)
        committed.add_(momentum)
        if continues:
            staged.add_(momentum, alpha=self._decay(name))
        else:
            self.rollback([name])

    def begun(self, name: str) -> bool:
        """Whether a step has begun for parameter `name`: something is staged."""
        return self.momenta().continue_any([name])

    def drop(self, names: Collection[str]) -> None:
        """Forget the momentum of `names`, which is held elsewhere now. No step may have begun for them."""
        self.momenta().drop(names)

    def _decay(self, name: str) -> float:
        found = self._adopted.get(name) if self.own_decay is None else self.own_decay
        if found is None:
            raise RuntimeError(
                f"the decay of {name!r} is not known: attach with optimizer=, or give the recipe's memory its own"
            )
        return found
