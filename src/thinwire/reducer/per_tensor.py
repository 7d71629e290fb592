"""A reducer for each parameter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor
from torch.futures import Future

from thinwire.collectives import Group
from thinwire.memories import Memory
from thinwire.reducer.base import Bucket, Reducer, Round, Slot
from thinwire.reducer.futures import all_true


@final
@dataclass(frozen=True, kw_only=True)
class PerTensor(Reducer):
    """Use the reducer that `chosen` names for a parameter, out of `reducers`; `otherwise` for all others.

    One exchange for each reducer in use per bucket, `otherwise` last. Raises ValueError for a name without reducer.
    """

    reducers: Mapping[str, Reducer]
    chosen: Mapping[str, str]
    otherwise: Reducer

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.chosen.values()) - self.reducers.keys()):
            raise ValueError(f"chosen names {unknown[0]!r}; expected one of {', '.join(self.reducers)}")

    def prepare(self, group: Group, samples: Sequence[Tensor] = ()) -> None:
        """Prepare those in use."""
        for reducer in self._in_use():
            reducer.prepare(group, samples)

    def reduce(self, bucket: Bucket, at: Round) -> "Future[bool]":
        """Give each its share of the slots."""
        futures = []
        for name, reducer in self.reducers.items():
            mine = [slot for slot in bucket.slots if self.chosen.get(slot.name) == name]
            if mine:
                futures.append(reducer.reduce(bucket.only(mine), at))
        rest = [slot for slot in bucket.slots if slot.name not in self.chosen]
        if rest or not futures:
            futures.append(self.otherwise.reduce(bucket.only(rest), at))
        return all_true(futures)

    def reduce_rows(self, gradient: Tensor, name: str, at: Round) -> "Future[Tensor]":
        """Hand over to `otherwise`."""
        return self.otherwise.reduce_rows(gradient, name, at)

    def of(self, name: str) -> Reducer:
        """Return the reducer of a parameter."""
        return self.reducers[self.chosen[name]] if name in self.chosen else self.otherwise

    def memories(self) -> Sequence[Memory]:
        """Return those of all in use."""
        return tuple({id(memory): memory for reducer in self._in_use() for memory in reducer.memories()}.values())

    def memory_of(self, slot: Slot) -> Memory:
        """Return what the parameter's reducer says."""
        return self.of(slot.name).memory_of(slot)

    def _in_use(self) -> list[Reducer]:
        used = set(self.chosen.values())
        return [*(reducer for name, reducer in self.reducers.items() if name in used), self.otherwise]
