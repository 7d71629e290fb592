"""What a kernel is given to do: tensors in frames that show a write beside them, and its results, made comparable."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from thinwire.kernels import Picks, Sum

_POISON = 99
_WRITTEN, _READ = ("outs", "moving"), ("residuals", "gradients", "velocities")  # of a sum
CONTENTS = ("normal", "whole", "zeros", "odd")
"""What vectors may hold: random numbers, whole ones (so there are ties), nothing but zeros, or NaN and infinity too."""


def framed(x: Tensor) -> Tensor:
    """Return a copy in the middle of a longer tensor of 99s. A small one does not begin at a multiple of 16 bytes."""
    margin = 64 if x.numel() > 1 << 16 else 62  # even, because a complex number takes two
    frame = x.new_full((x.numel() + 2 * margin,), _POISON)
    inside = frame[margin : margin + x.numel()].view(x.shape)
    return inside.copy_(x)


def intact(x: Tensor) -> bool:
    """Whether the frame around what `framed` returned is as it was."""
    frame, start = x._base, x.storage_offset()
    assert frame is not None  # a view
    return bool((frame[:start] == _POISON).all() and (frame[start + x.numel() :] == _POISON).all())


@dataclass(frozen=True)
class Kit:
    """Makes input of one dtype and content on a device."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    content: str = "normal"

    def vector(self, numel: int, seed: int = 0) -> Tensor:
        """Return a flat tensor (numel)."""
        x = torch.randn(numel, generator=self._lots(seed), device=self.device)
        if self.content == "zeros":
            x.zero_()
        elif self.content == "whole":
            x.mul_(3).round_()
        elif self.content == "odd" and numel:
            x[numel // 2] = -torch.nan
            x[numel // 3] = torch.inf
        return framed(x.to(self.dtype))

    def whole(self, numel: int, least: int, beyond: int, dtype: torch.dtype = torch.int32, seed: int = 0) -> Tensor:
        """Return random whole numbers (numel) from `least` to below `beyond`."""
        lots = torch.randint(least, beyond, (numel,), generator=self._lots(seed), device=self.device)
        return framed(lots.to(dtype))

    def picks(self, numel: int, seed: int = 0) -> Tensor:
        """Return some 5 % of the indices below `numel`, at least one, ascending (int32)."""
        chosen = torch.rand(numel, generator=self._lots(seed), device=self.device) < 0.05
        chosen[seed % numel] = True
        return framed(chosen.nonzero().view(-1).to(torch.int32))

    def room(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an empty tensor for a result, in a frame."""
        return framed(torch.zeros(shape, dtype=dtype or self.dtype, device=self.device))

    def number(self, value: float) -> Tensor:
        """Return a 0-dim tensor."""
        return torch.tensor(value, dtype=self.dtype, device=self.device)

    def seeds(self, numbers: Sequence[int]) -> Tensor:
        """Return whole numbers, int64."""
        return torch.tensor(numbers, device=self.device)

    def _lots(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)


@dataclass(frozen=True)
class Trial:
    """A kernel's arguments. It writes to those at the places `writes`, of which each run gets copies, and no others.

    Of a `Sum` it writes to the outs.
    """

    args: tuple[Any, ...]
    writes: tuple[int, ...] = ()

    def run(self, call: Callable[..., Any], device: torch.device) -> list[Any]:
        """Return what was written and what was returned. Raises RuntimeError for a write anywhere else."""
        args = [_moved(arg, device) for arg in self.args]
        for place in self.writes:
            args[place] = _each_framed(args[place])
        written = {place: args[place] for place in self.writes}
        read = [*tensors([_columns(x, _READ, ()) if place in written else x for place, x in enumerate(args)])]
        before = [x.clone() for x in read]
        returned = call(*args)
        results = [*flat([_columns(x, _WRITTEN, x) for x in written.values()])]
        if not all(map(intact, results)):
            raise RuntimeError("wrote outside of its result")
        if not all(map(same_bits, read, before)):
            raise RuntimeError("changed an argument that it may only read")
        return [*results, *flat(returned)]


def _each_framed(arg: Any) -> Any:
    if isinstance(arg, Sum):
        return _changed(arg, _WRITTEN, _each_framed)
    return [framed(each) for each in arg] if isinstance(arg, list) else framed(arg)


def _moved(arg: Any, device: torch.device) -> Any:
    if isinstance(arg, Sum):
        return _changed(arg, _WRITTEN + _READ, lambda xs: _moved(xs, device))
    return tree_map_only(Tensor, lambda x: x.to(device), arg)  # what checks a kernel is to make, too


def _changed(sums: Sum, names: tuple[str, ...], change: Callable[[Any], Any]) -> Sum:
    columns = {name: getattr(sums, name) for name in names}
    return replace(sums, **{name: change(column) for name, column in columns.items() if column is not None})


def _columns(arg: Any, names: tuple[str, ...], otherwise: Any) -> Any:
    return [getattr(arg, name) for name in names] if isinstance(arg, Sum) else otherwise


def tensors(arg: Any) -> Iterator[Tensor]:
    """Yield the tensors in an argument, and in the tuples, lists and sums that it is made of."""
    if isinstance(arg, Tensor):
        yield arg
    elif isinstance(arg, tuple | list):
        for each in arg:
            yield from tensors(each)
    elif isinstance(arg, Sum):
        yield from tensors([getattr(arg, name) for name in _WRITTEN + _READ])


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bits, be they numbers or not."""
    return torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


def flat(found: Any) -> Iterator[Any]:
    """Yield tensors and numbers. On a GPU picks are padded to their capacity, and otherwise not: so padding goes."""
    if isinstance(found, Picks):
        there = found.indices >= 0
        yield from (found.indices[there], found.values[there], found.peak)
    elif isinstance(found, tuple | list):
        for each in found:
            yield from flat(each)
    elif found is not None:
        yield found


@dataclass(frozen=True)
class Near:
    """Floats may be off by `absolute` + `relative` × the expected one. −0 is 0, and any NaN is NaN."""

    relative: float = 0.0
    absolute: float = 0.0


def difference(found: Sequence[Any], expected: Sequence[Any], near: Near) -> str:
    """Return how the first of these tensors that differ do, in a line; empty if none does."""
    if len(found) != len(expected):
        return f"returned {len(found)} tensors, expected {len(expected)}"
    return next(filter(None, (_different(*pair, near) for pair in zip(found, expected, strict=True))), "")


def _different(found: Any, expected: Any, near: Near) -> str:
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return "" if found == expected else f"is {found}, expected {expected}"
    found, expected = found.reshape(-1), expected.to(found.device).reshape(-1)
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"is {_kind(found)}, expected {_kind(expected)}"
    near = near if found.is_floating_point() else Near()
    off = ~torch.isclose(found, expected, rtol=near.relative, atol=near.absolute, equal_nan=True)
    if not bool(off.any()):
        return ""
    first = int(off.nonzero()[0])
    return f"{int(off.sum())} of {found.numel()} differ, first at {first}: {found[first]}, expected {expected[first]}"


def _kind(x: Tensor) -> str:
    return f"{x.numel()} of {str(x.dtype).removeprefix('torch.')}"


Trials = Iterable[Trial]
SCALE, DECAY = 0.25, 0.5  # powers of two: a fused multiply-add then rounds like two operations
SEED = 2**40 + 7
FLOATS = (torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Case:
    """How one kernel is tried.

    near, near_on_gpu: how far floats may be from the reference's; by default no bit may differ. alike: compares
    instead, and returns what is wrong. nbytes: memory that the reference takes per element, roughly.
    """

    make: Callable[[Kit, int], Trials]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    contents: tuple[str, ...] = CONTENTS
    near: Near = Near()
    near_on_gpu: Near | None = None
    alike: Callable[[Trial, list[Any], list[Any]], str] | None = None
    nbytes: int = 64

    def bound(self, device: torch.device) -> Near:
        """Return how far floats may be from the reference's on this device."""
        return self.near_on_gpu if self.near_on_gpu and device.type != "cpu" else self.near


def as_read(_: Trial, found: Sequence[Any], expected: Sequence[Any]) -> str:
    """Compare what was read, and whether it was sound: if not, the numbers may differ."""
    wrong, said = bool(found[1].any()), bool(expected[1].any())
    if wrong != said:
        return f"is {'malformed' if wrong else 'sound'}, expected the opposite"
    return "" if wrong or torch.equal(found[0], expected[0]) else "differs"


def several(x: Tensor) -> list[Tensor]:
    """Return a vector as several, of which some may be empty."""
    return list(x.tensor_split([x.numel() // 9, x.numel() // 2, x.numel() // 2]))


ONLY_32 = (torch.float32,)
WHOLE: dict[str, Any] = {"dtypes": ONLY_32, "contents": ("normal",)}
"""For kernels of whole numbers."""
FINITE = ("normal", "whole", "zeros")
