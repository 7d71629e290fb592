"""Two versions of the residual, committed and staged: a bucket's tensors lie in one flat tensor each."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from thinwire.kernels.memory import empty
from thinwire.kernels.parts import Cut, Parts
from thinwire.waits import on_host

_LINE = 64
"""Bytes: in main memory, a large tensor that begins at a cache line is written past the cache."""


@final
class Staged:
    """Two versions of one flat tensor per name, in `dtype` or float32 and wider; committing all swaps them uncopied."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._at: dict[str, _Pair] = {}
        self._staged: set[str] = set()
        self._closing: set[str] = set()

    def open(self, name: str, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return (committed, staged) for `name`; a new name starts at zero. The caller overwrites the staged one."""
        if name not in self._at:
            self._at[name] = self._lay([name], [like])
        self._staged.add(name)
        committed, staged = self._at[name].committed(name), self._at[name].staged(name)
        if name in self._closing:  # what waited has been handed out in an earlier part of this step
            self._closing.discard(name)
            return torch.zeros_like(committed), staged
        return committed, staged

    def open_each(self, names: Sequence[str], likes: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """`open` several: return all that is committed, and all that is staged."""
        pair = None
        if not self._closing and self._staged.isdisjoint(names):
            pair = self._at.get(names[0])
            pair = pair if pair is not None and pair.holds(names) else self._side_by_side(names, likes)
        if pair is None:
            opened = [self.open(name, like) for name, like in zip(names, likes, strict=True)]
            return [committed for committed, _ in opened], [staged for _, staged in opened]
        self._staged.update(names)
        return pair.parts()

    def continue_any(self, names: Sequence[str]) -> bool:
        """Whether something is staged for any of these."""
        return not self._staged.isdisjoint(names)

    def close(self, name: str) -> Tensor:
        """Return the residual of `name`; `commit` will drop it."""
        self._closing.add(name)
        pair = self._at[name]
        return pair.staged(name) if name in self._staged else pair.committed(name)

    def waits(self, name: str) -> bool:
        """Whether something waits for `name` that `close` has not handed out."""
        return name in self._at and name not in self._closing

    def staged(self, name: str) -> Tensor:
        """Return the staged version."""
        return self._at[name].staged(name)

    def staged_each(self, names: Sequence[str]) -> Sequence[Tensor]:
        """Return the staged versions."""
        pair = self._at[names[0]] if names else None
        return pair.parts()[1] if pair and pair.holds(names) else [self.staged(name) for name in names]

    def commit(self, names: Collection[str] | None = None) -> None:
        """Replace committed versions with staged ones."""
        done = among(self._staged, names)
        while done:
            pair = self._at[next(iter(done))]
            pair.turn(done & pair.live)
            done -= pair.live
        gone = self._closing and among(self._closing, names)
        self.rollback(names)
        if gone:
            self.drop(gone)

    def rollback(self, names: Collection[str] | None = None) -> None:
        """Forget staged versions."""
        for held in (self._staged, self._closing):
            held.difference_update(held.copy() if names is None else names)

    def drop(self, names: Collection[str]) -> None:
        """Forget both versions of these."""
        for name in names:
            if name in self._at:
                self._at.pop(name).live.discard(name)
        self.rollback(names)

    def rescale(self, factor: float) -> None:
        """Multiply the committed versions."""
        for tensor in self.committed().values():
            tensor.mul_(factor)

    def committed(self) -> dict[str, Tensor]:
        """Return the committed versions."""
        return {name: pair.committed(name) for name, pair in self._at.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace everything with copies of `tensors`."""
        self._at = {
            name: _Pair([name], Cut([0], [tensor.numel()]), tensor.detach().clone()) for name, tensor in tensors.items()
        }
        self.rollback()

    def _side_by_side(self, names: Sequence[str], likes: Sequence[Tensor]) -> "_Pair | None":
        """Lay out anew what is scattered, and return the pair that holds just these; None if they are not alike."""
        held = {name: self._at[name].committed(name) for name in names if name in self._at}
        kinds = {(x.dtype, x.device) for x in held.values()} | {(self._held(x), x.device) for x in likes}
        if len(kinds) > 1 or any(held[n].numel() != x.numel() for n, x in zip(names, likes, strict=True) if n in held):
            return None
        made = self._lay(names, likes)
        for name in names:
            if name in held:
                made.committed(name).copy_(held[name])
                self._at[name].live.discard(name)
            self._at[name] = made
        return made

    def _lay(self, names: Sequence[str], likes: Sequence[Tensor]) -> "_Pair":
        dtype = self._held(likes[0])
        lengths = likes.cut.lengths if isinstance(likes, Parts) else [like.numel() for like in likes]
        multiple = _LINE // dtype.itemsize if on_host(likes[0]) else 1  # without gaps, a GPU takes them as one vector
        cut = Cut([0] * len(lengths), lengths).packed(multiple)
        return _Pair(names, cut, empty(cut.end, dtype, likes[0].device).zero_())

    def _held(self, like: Tensor) -> torch.dtype:
        return self._dtype or torch.promote_types(like.dtype, torch.float32)


@final
class _Pair:
    """Two flat tensors with a place for each name that is `live`; `_now` is committed, but `_turned` names."""

    def __init__(self, names: Sequence[str], cut: Cut, committed: Tensor) -> None:
        self._names, self._places = list(names), {name: i for i, name in enumerate(names)}
        self.live, self._turned, self._now = set(names), set[str](), 0
        self._flats = Parts(committed, cut), Parts(empty(committed.numel(), committed.dtype, committed.device), cut)

    def holds(self, names: Sequence[str]) -> bool:
        """Whether it holds just these, in this order."""
        return len(self.live) == len(self._names) and self._names == names

    def committed(self, name: str) -> Tensor:
        return self._flats[self._now ^ (name in self._turned)][self._places[name]]

    def staged(self, name: str) -> Tensor:
        return self._flats[1 - (self._now ^ (name in self._turned))][self._places[name]]

    def parts(self) -> tuple[Parts, Parts]:
        """Return the committed versions of all names, and the others."""
        for name in self._turned:
            committed, staged = self.committed(name), self.staged(name)
            kept = committed.clone()
            committed.copy_(staged)
            staged.copy_(kept)
        self._turned.clear()
        return self._flats[self._now], self._flats[1 - self._now]

    def turn(self, names: set[str]) -> None:
        if len(names) == len(self.live):
            self._now = 1 - self._now
        else:
            self._turned ^= names


def among(names: Iterable[str], wanted: Collection[str] | None) -> set[str]:
    """Return those of some names that are wanted: all of them with None."""
    return set(names) if wanted is None else set(wanted).intersection(names)
