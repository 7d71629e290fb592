"""What a plan may choose among for a tensor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

import torch

from thinwire.codecs import BlockTopK, Cast, Codec, CountSketch, Identity, SampledThreshold
from thinwire.codecs.base import check_density
from thinwire.exchanges import (
    AllGather,
    AllReduce,
    Exchange,
    GlobalTopKTree,
    OwnerSharded,
    RecursiveDoubling,
    UnionAllReduce,
)
from thinwire.formats import Levels, Ternary
from thinwire.memories import Memory, NoMemory
from thinwire.reducer import Compressed

_BLOCK = 32


@final
@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A codec and its exchange; with `feedback`, what is not delivered waits for the next step.

    density: share of the elements whose values travel in the gradient's own dtype; 0 where all are recoded.
    """

    name: str
    codec: Codec
    exchange: Exchange
    feedback: bool = False
    density: float = 0.0

    def reducer(self, memory: Memory) -> Compressed:
        """Return it at work, with `memory` where it needs one."""
        return Compressed(memory=memory if self.feedback else NoMemory(), codec=self.codec, exchange=self.exchange)


DENSE = Candidate(name="dense", codec=Identity(), exchange=AllReduce(), density=1.0)

_WHOLE: Mapping[str, Callable[[str], Candidate]] = MappingProxyType(
    {
        "dense": lambda name: DENSE,
        "bf16": lambda name: Candidate(name=name, codec=Cast(values=torch.bfloat16), exchange=AllReduce()),
        "fp16": lambda name: Candidate(name=name, codec=Cast(), exchange=AllReduce()),
        "qsgd": lambda name: Candidate(name=name, codec=Cast(values=Levels(bits=4)), exchange=AllGather()),
        "terngrad": lambda name: Candidate(name=name, codec=Cast(values=Ternary(clip=2.5)), exchange=AllGather()),
    }
)
_SPARSE: Mapping[str, Callable[[float], tuple[Codec, Exchange]]] = MappingProxyType(
    {
        "topk": lambda density: (SampledThreshold(density=density), AllGather()),
        "gtopk": lambda density: (SampledThreshold(density=density), GlobalTopKTree()),
        "doubling": lambda density: (SampledThreshold(density=density), RecursiveDoubling()),
        "owner": lambda density: (SampledThreshold(density=density), OwnerSharded()),
        "union": lambda density: (BlockTopK(density=density, block=_BLOCK), UnionAllReduce()),
        "sketch": lambda density: (
            BlockTopK(density=density, block=_BLOCK),
            UnionAllReduce(packed=CountSketch(rows=3, ratio=0.5)),
        ),
    }
)
NAMES = (*_WHOLE, *(f"{name}:DENSITY" for name in _SPARSE))


@final
@dataclass(frozen=True, kw_only=True)
class Budget:
    """What the loss allows: how sparse, and whether what is not sent may wait for later steps (error feedback).

    `names` are of the families to consider, those dearest to the loss first: of two that are as fast, the first
    is taken. The default leaves out `owner`, `union` and `sketch`, which pay for block-sparse gradients, and
    `fp16`, which overflows beyond 65504.
    """

    densities: Sequence[float] = (0.01,)
    error_feedback: bool = True
    names: Sequence[str] = ("bf16", "qsgd", "topk", "doubling", "gtopk")

    def __post_init__(self) -> None:
        for density in self.densities:
            check_density(density)
        if unknown := [name for name in self.names if name not in _WHOLE and name not in _SPARSE]:
            raise ValueError(
                f"no candidate is called {unknown[0]!r}; expected some of {', '.join((*_WHOLE, *_SPARSE))}"
            )

    def candidates(self) -> list[Candidate]:
        """Return what may be chosen, uncompressed first."""
        dense_first = ["dense", *(name for name in self.names if name != "dense")]
        every = (full for name in dense_first for full in self._in_full(name))
        return [candidate(full) for full in every]

    def _in_full(self, name: str) -> list[str]:
        if name in _WHOLE:
            return [name]
        return [f"{name}:{density:g}" for density in self.densities] if self.error_feedback else []


def candidate(name: str) -> Candidate:
    """Return the candidate called ``qsgd`` or ``topk:0.01``. Raises ValueError where there is none."""
    family, _, density = name.partition(":")
    try:
        if name in _WHOLE:
            return _WHOLE[name](name)
        codec, exchange = _SPARSE[family](float(density))
    except (KeyError, ValueError) as error:
        raise ValueError(f"no candidate is called {name!r}; expected one of {', '.join(NAMES)}") from error
    return Candidate(name=name, codec=codec, exchange=exchange, feedback=True, density=float(density))
