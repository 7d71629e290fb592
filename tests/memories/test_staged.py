"""Two versions of what waits, side by side in flat tensors, against a plain dictionary of each."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from thinwire.kernels.parts import Cut, Parts
from thinwire.memories.staged import Staged

LENGTHS = {"a": 5, "b": 1, "c": 70, "d": 16, "e": 33}


class _Plain:
    """What `Staged` promises, name by name."""

    def __init__(self) -> None:
        self.committed: dict[str, Tensor] = {}
        self.staged: dict[str, Tensor] = {}

    def write(self, name: str, x: Tensor) -> Tensor:
        before = self.committed.setdefault(name, torch.zeros(LENGTHS[name]))
        self.staged[name] = before * 0.5 + x
        return before

    def commit(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.staged:
                self.committed[name] = self.staged.pop(name)

    def rollback(self, names: Sequence[str]) -> None:
        for name in names:
            self.staged.pop(name, None)


def _bucket(names: Sequence[str]) -> Parts:
    cut = Cut([100 * i for i in range(len(names))], [LENGTHS[name] for name in names])
    return Parts(torch.randn(100 * len(names)), cut)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_held_is_what_a_dictionary_holds(seed: int) -> None:
    """In buckets that change, committed and rolled back in part, dropped, rescaled and restored."""
    torch.manual_seed(seed)
    choose, staged, plain = random.Random(seed), Staged(), _Plain()
    for _ in range(60):
        names = choose.sample(list(LENGTHS), choose.randint(1, len(LENGTHS)))
        act = choose.choice(["bucket", "bucket", "bucket", "one", "commit", "commit", "rollback", "rare"])
        if act == "bucket" and not staged.continue_any(names):
            gradients = _bucket(names)
            for before, out, x, name in zip(*staged.open_each(names, gradients), gradients, names, strict=True):
                assert torch.equal(before, plain.write(name, x))
                torch.add(x, before, alpha=0.5, out=out)
            for name, x in zip(names, staged.staged_each(names), strict=True):
                assert torch.equal(x, plain.staged[name])
        elif act == "one" and not staged.continue_any(names[:1]):
            (x,) = _bucket(names[:1])
            before, out = staged.open(names[0], x)
            assert torch.equal(before, plain.write(names[0], x))
            torch.add(x, before, alpha=0.5, out=out)
        elif act == "commit":
            staged.commit(names)
            plain.commit(names)
        elif act == "rollback":
            staged.rollback(names)
            plain.rollback(names)
        elif act == "rare":
            _rarely(choose.randrange(3), names, staged, plain)
        assert staged.committed().keys() == plain.committed.keys()
        assert all(torch.equal(x, plain.committed[name]) for name, x in staged.committed().items())
        assert {name for name in LENGTHS if staged.continue_any([name])} == plain.staged.keys()


def _rarely(act: int, names: Sequence[str], staged: Staged, plain: _Plain) -> None:
    if act == 0:
        staged.drop(names)
        plain.rollback(names)
        for name in names:
            plain.committed.pop(name, None)
    elif act == 1:
        staged.rescale(2.0)
        plain.committed = {name: 2.0 * x for name, x in plain.committed.items()}
    else:
        staged.restore(dict(plain.committed))
        plain.staged.clear()


def test_a_bucket_that_stays_lies_in_one_tensor() -> None:
    staged, names = Staged(), list(LENGTHS)
    for _ in range(3):
        committed, out = staged.open_each(names, _bucket(names))
        assert isinstance(committed, Parts)
        assert isinstance(out, Parts)
        out.flat.normal_()
        staged.commit()
    (first, *_), (before, *_) = staged.open_each(names, _bucket(names))
    places = {x.untyped_storage().data_ptr() for x in staged.committed().values()}
    assert places == {first.untyped_storage().data_ptr()} != {before.untyped_storage().data_ptr()}
    assert all(x.data_ptr() % 64 == first.data_ptr() % 64 for x in committed), "each from a cache line on"
