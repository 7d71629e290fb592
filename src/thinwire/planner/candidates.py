"""What a plan may choose among for a tensor, and what each method costs in loss, as measured.

`LOSSES` is the one table that plans, warnings and pages read.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Literal, NamedTuple, Self, final

from thinwire.checked import Multiple, Part, Share, checked
from thinwire.codecs import Codec
from thinwire.exchanges import Exchange
from thinwire.memories import Memory, NoMemory
from thinwire.recipes import METHODS, Method
from thinwire.reducer import Compressed

OptimizerName = Literal["sgd", "adamw", "muon"]
"""Optimizers by what they do to a gradient: sgd adds it up, adamw and its family divide by the root of a second moment,
muon orthogonalises a matrix of them."""
ALLOWED = 1.01
"""The loss that a plan may cost unless more is asked for, over that of uncompressed training."""
INSTEAD: Mapping[OptimizerName, str] = MappingProxyType(
    {"adamw": "recipes.orthogonal, which is made for it,", "muon": "METHODS['bf16'], which costs Muon nothing,"}
)
"""What to use instead, where error feedback starves elements that are rarely sent.

With Muon, you can also switch to AdamW and `orthogonal`, which ended where uncompressed Muon did."""


class Measured(NamedTuple):
    """The final loss of `methods`, which deliver the same sums, at a density, and of `dense` in the same measurement.

    In docs/measurements/convergence.md `dense` is at the best settings found for it, elsewhere at the bench's, as are
    the methods: so a difference of a few percent between a ratio from there and one from elsewhere does not rank two
    methods.
    """

    methods: tuple[str, ...]
    optimizer: OptimizerName
    density: float | None
    loss: float
    dense: float
    source: str
    betas: tuple[float, float] | None = None

    @property
    def ratio(self) -> float:
        """How many times dense's loss it ends at."""
        return self.loss / self.dense


_RECIPES = "[recipes](../measurements/recipes.md)"
_OPTIMIZERS = "[optimizers](../measurements/optimizers.md)"
_CONVERGENCE = "[convergence](../measurements/convergence.md)"
_TOPK = ("topk", "sampled_topk", "doubling", "sampled_doubling", "owner", "sampled_owner")
_GTOPK = ("gtopk", "sampled_gtopk")

LOSSES: tuple[Measured, ...] = (
    Measured(("terngrad",), "sgd", None, 1.976, 2.014, _RECIPES),
    Measured(("bf16",), "sgd", None, 1.889, 1.889, _OPTIMIZERS),
    Measured(("fp16",), "sgd", None, 2.014, 2.014, _RECIPES),
    Measured(("qsgd",), "sgd", None, 2.016, 2.014, _RECIPES),
    Measured(("dgc",), "sgd", 0.01, 2.066, 2.014, _RECIPES),
    Measured(("powersgd",), "sgd", None, 2.089, 2.014, _RECIPES),
    Measured(("dragonn",), "sgd", 0.01, 2.104, 2.014, _RECIPES),
    Measured(("fft",), "sgd", 0.15, 2.120, 2.014, _RECIPES),
    Measured(("dct_steered",), "sgd", 0.01, 2.202, 2.014, _RECIPES),
    Measured((*_TOPK, "mstopk"), "sgd", 0.01, 2.209, 2.014, _RECIPES),
    Measured(("dct_dp",), "sgd", 0.01, 2.211, 2.014, _RECIPES),
    Measured(("s2_union",), "sgd", 1 / 32, 2.212, 2.014, _RECIPES),
    Measured(("s2_reducer",), "sgd", 1 / 32, 2.307, 2.014, _RECIPES),
    Measured(_GTOPK, "sgd", 0.01, 2.372, 2.014, _RECIPES),
    Measured(("signsgd",), "sgd", None, 2.559, 2.014, _RECIPES),
    Measured(("randomk",), "sgd", 0.01, 2.870, 2.014, _RECIPES),
    Measured(("bf16",), "adamw", None, 1.708, 1.711, _OPTIMIZERS),
    Measured(("qsgd",), "adamw", None, 1.709, 1.711, _OPTIMIZERS),
    Measured(("terngrad",), "adamw", None, 1.747, 1.711, _OPTIMIZERS),
    Measured(("orthogonal",), "adamw", 6 / 256, 1.616, 1.669, _CONVERGENCE, (0.9, 0.9)),
    Measured(("fading",), "adamw", 6 / 256, 1.711, 1.669, _CONVERGENCE, (0.95, 0.9)),
    Measured(("demo",), "adamw", 32 / 4096, 1.788, 1.669, _CONVERGENCE),
    Measured(("powersgd",), "adamw", None, 1.919, 1.669, _CONVERGENCE),
    Measured(_TOPK, "adamw", 0.01, 2.118, 1.711, _OPTIMIZERS),
    Measured(("bf16",), "muon", None, 1.945, 1.944, _OPTIMIZERS),
    Measured(_TOPK, "muon", 0.01, 2.538, 1.944, _OPTIMIZERS),
)
"""A new method or optimizer is a new row."""


def measured(name: str, optimizer: OptimizerName | None) -> Measured | None:
    """Return what was measured of a candidate such as ``bf16`` or ``topk:0.01``, or None."""
    method, _, density = name.partition(":")
    share = float(density) if density else None
    return next(
        (row for row in LOSSES if row.optimizer == optimizer and method in row.methods and row.density == share), None
    )


def within(limit: float, optimizer: OptimizerName, names: Iterable[str]) -> list[str]:
    """Return those of the candidates that were measured at `limit` times dense's loss or less, least harm first."""
    rows = {name: measured(name, optimizer) for name in names}
    harm = {name: max(1.0, row.ratio) for name, row in rows.items() if row is not None}  # below 1 is luck
    return sorted((name for name in harm if harm[name] <= limit), key=harm.__getitem__)


def in_words(names: Iterable[str], optimizer: OptimizerName | None) -> str:
    """Return in a sentence what these candidates are expected to cost; empty without any, or without an optimizer."""
    if optimizer is None:
        return ""
    told = []
    for name in dict.fromkeys(names):
        row = measured(name, optimizer)
        if row is None:
            told.append(f"that of {name} was not measured")
        else:
            betas = f", with betas {row.betas}" if row.betas else ""
            told.append(
                f"{name} ended at {row.ratio:.2f} times dense's ({row.loss:.3f} against {row.dense:.3f}{betas})"
            )
    return f"Expected loss under {optimizer}: {'; '.join(told)}." if told else ""


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A method of the catalogue at one density: a codec and its exchange.

    Args:
        name: Such as `topk:0.01`.
        codec: Encodes large tensors.
        exchange: Adds up what the codec sends.
        memory: An empty memory of the kind that this method needs.
        density: Share of the elements that are sent in the gradient's own dtype; 0 if all are sent in another format.
        momentum: Whether it applies the optimizer's momentum itself, and so needs the optimizer.
    """

    name: str
    codec: Codec
    exchange: Exchange
    memory: Memory = field(default_factory=NoMemory)
    density: Part = 0.0
    momentum: bool = False

    @property
    def feedback(self) -> bool:
        """Whether it keeps a residual."""
        return self.memory.stateful

    def reducer(self, *memories: Memory) -> Compressed:
        """Return a reducer of this method, with the memory of its kind in `memories`, or else a new one."""
        same = (memory for memory in memories if memory.fields == self.memory.fields)
        return Compressed(memory=next(same, self.memory.blank()), codec=self.codec, exchange=self.exchange)


def shared(candidates: Iterable[Candidate], *given: Memory) -> tuple[Memory, ...]:
    """Return the memories that these candidates share, one of each kind: those `given`, and new ones for the rest."""
    kinds = {memory.fields: memory for memory in given}
    for each in candidates:
        if each.feedback:
            kinds.setdefault(each.memory.fields, each.memory.fresh())
    return tuple(kinds.values())


def _sampled(row: Method) -> Method:
    return replace(row, name=f"sampled_{row.name}", recipe=partial(row.recipe, sampled=True))


_ROWS = [[row, _sampled(row)] if row.takes("sampled") else [row] for row in METHODS.values() if row.planned]
PLANNED: Mapping[str, Method] = MappingProxyType({row.name: row for rows in _ROWS for row in rows})
"""The methods of the catalogue that a plan may choose. `sampled_topk` is `topk` with `sampled=True`, and so on."""
NAMES = tuple(name if row.density is None else f"{name}:DENSITY" for name, row in PLANNED.items())
_BARRED = frozenset({"dense", "fp16"})  # chosen anyway; overflows beyond 65504


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a plan may choose: which methods, how sparse, with or without error feedback. So it limits the cost in loss.

    Args:
        densities: The densities to consider for names without one of their own. `fading` and `orthogonal` keep their
            recipes' densities, which are shares of frequencies.
        error_feedback: Whether methods with a residual may be chosen.
        names: Methods to consider, the least harmful to the loss first: of two equally fast ones, the first wins. A
            name may have a density of its own, as in `topk:0.05`. The default selects by a sampled threshold, which is
            faster than exact Top-k (`topk`). It leaves out `s2_union`, `s2_reducer` and `sampled_owner`, which pay for
            block-sparse gradients, and `fp16`, which overflows beyond 65504. `attach` leaves out `fading` and
            `orthogonal` without an optimizer to take momentum from, and always leaves out `orthogonal` when it plans
            during training: see `switchable`.
        optimizer: The optimizer that will train. The plan then gives its expected cost in loss. `under` chooses `names`
            by it.
    """

    densities: Sequence[Share] = (0.01,)
    error_feedback: bool = True
    names: Sequence[str] = ("bf16", "qsgd_l2", "sampled_topk", "sampled_doubling", "sampled_gtopk")
    optimizer: OptimizerName | None = None

    def __post_init__(self) -> None:
        if unknown := [name for name in self.names if name.partition(":")[0] not in PLANNED]:
            raise ValueError(f"no candidate is called {unknown[0]!r}; expected some of {', '.join(PLANNED)}")
        for name in self.names:
            if ":" in name:
                candidate(name)

    @classmethod
    @checked
    def under(
        cls,
        optimizer: OptimizerName | None,
        *,
        densities: Sequence[Share] = (0.01,),
        error_feedback: bool = True,
        loss: Multiple = ALLOWED,
    ) -> Self:
        """Return the budget of the methods whose measured loss is close to uncompressed training's.

        Methods that were not measured are left out, and so is `fp16`.

        Args:
            optimizer: The optimizer that will train. Without one, the default budget is returned.
            densities: As in `Budget`.
            error_feedback: As in `Budget`.
            loss: How close: the highest loss to accept, as a multiple of uncompressed training's.
        """
        if optimizer is None:
            return cls(densities=densities, error_feedback=error_feedback)
        # what leaves the optimizer's momentum alone comes before what does not
        known = sorted(PLANNED, key=lambda name: PLANNED[name].momentum)
        every = cls(densities=densities, names=[name for name in known if name not in _BARRED])
        names = within(loss, optimizer, [each.name for each in every.candidates()])
        return cls(densities=densities, error_feedback=error_feedback, names=tuple(names), optimizer=optimizer)

    def without_momentum(self) -> Self:
        """Return the budget without the methods that take momentum out of the optimizer."""
        return self._only(lambda method: not method.momentum)

    def switchable(self) -> Self:
        """Return the budget without methods that cannot be switched on and off during training, as "auto" does.

        `orthogonal` delivers updates of a different norm than gradients. A second moment built up from one would make
        the optimizer's steps with the other far too large or too small.
        """
        return self._only(lambda method: method.large().memory.keeps_length)

    def _only(self, fits: Callable[[Method], bool]) -> Self:
        return replace(self, names=tuple(name for name in self.names if fits(PLANNED[name.partition(":")[0]])))

    def candidates(self) -> list[Candidate]:
        """Return what may be chosen, uncompressed first."""
        found: list[str] = []
        for name in ("dense", *self.names):
            method = PLANNED[name.partition(":")[0]]
            if method.density is None or (":" in name and self.error_feedback):
                found.append(name)
            elif self.error_feedback:
                densities = (method.density,) if method.share_of == "frequencies" else self.densities
                found += [f"{name}:{density:g}" for density in densities]
        return [candidate(name) for name in dict.fromkeys(found)]


@checked
@cache  # a search asks for the same few again and again
def candidate(name: str) -> Candidate:
    """Return the candidate by its name, `qsgd` or `topk:0.01`.

    Raises:
        ValueError: If no candidate has this name.
    """
    family, colon, share = name.partition(":")
    try:
        method, density = PLANNED[family], float(share) if colon else None
        if (method.density is None) != (density is None):
            raise ValueError("give a density, as in topk:0.01; candidates such as qsgd take none")
        large = method.large(density)
    except (KeyError, ValueError) as error:
        raise ValueError(f"no candidate is called {name!r}; expected one of {', '.join(NAMES)}") from error
    return Candidate(
        name=name,
        codec=large.codec,
        exchange=large.exchange,
        memory=large.memory.fresh(),
        density=0.0 if method.momentum else float(family == "dense") if density is None else density,
        momentum=method.momentum,
    )


DENSE = candidate("dense")
