"""The one list of cases over which every law is tested. A new codec, memory, exchange or recipe adds its row here."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire import codecs, exchanges, formats, gathers, memories, recipes, schedules
from thinwire.kernels import Sum
from thinwire.kernels.sums import COLUMNS, How
from thinwire.pipeline import Boundary, LaplaceBoundary, TopKBoundary
from thinwire.reducer import Reducer

SIZES = (1, 2, 63, 1000, 5000)


@dataclass(frozen=True, kw_only=True)
class CodecCase:
    """`exact` codecs lose nothing of what they pick; `unbiased` ones are right on average over seeds.

    `linear` ones decode a sum of payloads to the sum of what they decode to. `shaped` ones see a matrix in a tensor.
    """

    codec: codecs.Codec
    exact: bool = True
    unbiased: bool = False
    linear: bool = True
    shaped: bool = False
    exchange: exchanges.Exchange = exchanges.AllGather()  # noqa: RUF009 - frozen


OFFSET_8 = formats.OffsetFloat.balanced(bits=8, mantissa=3, max=2.0, rounding="nearest")

CODECS = {
    "identity": CodecCase(codec=codecs.Identity(), exchange=exchanges.AllReduce()),
    "identity gathered": CodecCase(codec=codecs.Identity()),
    "fp16": CodecCase(codec=codecs.Cast(), exact=False, exchange=exchanges.AllReduce()),
    "bf16": CodecCase(codec=codecs.Cast(values=torch.bfloat16), exact=False, exchange=exchanges.AllReduce()),
    "topk": CodecCase(codec=codecs.TopK(density=0.05)),
    "topk all": CodecCase(codec=codecs.TopK(density=1.0)),
    "row topk": CodecCase(codec=codecs.RowTopK(density=0.05, width=50)),
    "row topk 8 bits": CodecCase(codec=codecs.RowTopK(density=0.05, width=64, values=OFFSET_8), exact=False),
    "topk bf16": CodecCase(codec=codecs.TopK(density=0.05, values=torch.bfloat16), exact=False),
    "sampled threshold": CodecCase(codec=codecs.SampledThreshold(density=0.05)),
    "sampled threshold fp16": CodecCase(codec=codecs.SampledThreshold(density=0.05, values=torch.float16), exact=False),
    "hashed slots": CodecCase(codec=codecs.HashedSlots(density=0.05)),
    "random-k": CodecCase(codec=codecs.RandomK(density=0.05), exchange=exchanges.AllReduce()),
    "random-k gathered": CodecCase(codec=codecs.RandomK(density=0.05)),
    "random-k unbiased": CodecCase(
        codec=codecs.RandomK(density=0.05, unbiased=True), exact=False, unbiased=True, exchange=exchanges.AllReduce()
    ),
    "topk 8 bits": CodecCase(codec=codecs.TopK(density=0.05, values=OFFSET_8), exact=False),
    "hashed slots 8 bits": CodecCase(codec=codecs.HashedSlots(density=0.05, values=OFFSET_8), exact=False),
    "offset float": CodecCase(codec=codecs.Cast(values=OFFSET_8), exact=False),
    "qsgd_l2": CodecCase(codec=codecs.Cast(values=formats.Levels(bits=4, group_size=64)), exact=False, unbiased=True),
    "terngrad, not clipped": CodecCase(codec=codecs.Cast(values=formats.Ternary()), exact=False, unbiased=True),
    "terngrad": CodecCase(codec=codecs.Cast(values=formats.Ternary(clip=2.5)), exact=False),
    "signsgd": CodecCase(codec=codecs.Cast(values=formats.Sign()), exact=False),
    "mstopk": CodecCase(codec=codecs.MSTopK(density=0.05)),
    "block topk": CodecCase(codec=codecs.BlockTopK(density=0.1, block=8)),
    "block topk, numbered": CodecCase(codec=codecs.BlockTopK(density=0.01, block=2)),
    "block topk 8 bits": CodecCase(codec=codecs.BlockTopK(density=0.1, block=8, values=OFFSET_8), exact=False),
    "fft": CodecCase(codec=codecs.FFT(density=0.15, block=64), exact=False),
    "fft, odd blocks": CodecCase(codec=codecs.FFT(density=0.5, block=63), exact=False),
    "fft half 8 bits": CodecCase(codec=codecs.FFT(density=0.15, block=64, half=True, values=OFFSET_8), exact=False),
    "chunk topk": CodecCase(codec=codecs.ChunkTopK(density=0.05), exact=False, shaped=True),
    "chunk topk, hadamard": CodecCase(
        codec=codecs.ChunkTopK(density=0.05, transform="hadamard"), exact=False, shaped=True
    ),
    "chunk topk, no transform": CodecCase(codec=codecs.ChunkTopK(density=0.05, chunk=7, transform=None), shaped=True),
    "chunk topk, a seventh": CodecCase(codec=codecs.ChunkTopK(density=0.14), exact=False, shaped=True),
    "chunk topk, many": CodecCase(codec=codecs.ChunkTopK(density=0.3, chunk=32), exact=False, shaped=True),
    "chunk topk, sign": CodecCase(
        codec=codecs.ChunkTopK(density=0.1, chunk=8, values=formats.Sign()), exact=False, shaped=True
    ),
    "chunk topk, two bits": CodecCase(
        codec=codecs.ChunkTopK(density=0.1, chunk=8, transform=None, values=formats.Magnitudes()),
        exact=False,
        shaped=True,
    ),
    "kept threshold": CodecCase(codec=codecs.KeptThreshold(density=0.05, refresh=0.0)),
    "steered threshold": CodecCase(codec=codecs.SteeredThreshold(density=0.05)),
    "laplace threshold": CodecCase(codec=codecs.LaplaceThreshold(density=0.05)),
    "count sketch": CodecCase(
        codec=codecs.CountSketch(), exact=False, unbiased=True, linear=False, exchange=exchanges.AllReduce()
    ),
    "count sketch of two rows": CodecCase(
        codec=codecs.CountSketch(rows=2), exact=False, unbiased=True, exchange=exchanges.AllReduce()
    ),
}

MEMORIES: dict[str, Callable[[], memories.Memory]] = {
    "none": memories.NoMemory,
    "error feedback": memories.ErrorFeedback,
    "error feedback in bf16": lambda: memories.ErrorFeedback(dtype=torch.bfloat16),
    "error feedback that fades": lambda: memories.ErrorFeedback(decay=0.9),
    "momentum correction": lambda: memories.MomentumCorrection(momentum=0.5),
    "nesterov": lambda: memories.MomentumCorrection(momentum=0.5, nesterov=True),
    "unmasked": lambda: memories.MomentumCorrection(momentum=0.5, masking=False),
    "fading momentum": lambda: memories.FadingMomentum(decay=0.9),
    "fading momentum in bf16": lambda: memories.FadingMomentum(decay=0.9, dtype=torch.bfloat16),
    "fading momentum, clipped": lambda: memories.FadingMomentum(decay=0.9, clip_norm=0.5),
    "orthogonal momentum": lambda: memories.OrthogonalMomentum(momentum=0.9),
    "noted": lambda: memories.Noted(memory=memories.ErrorFeedback()),
    "noted fading": lambda: memories.Noted(memory=memories.FadingMomentum(decay=0.9)),
    "noted momentum": lambda: memories.Noted(memory=memories.MomentumCorrection(momentum=0.5)),
}


@dataclass(frozen=True, kw_only=True)
class ExchangeCase:
    """`keyed` ones sum picks that differ by rank on the way; `exact` ones lose no pick."""

    exchange: exchanges.Exchange
    keyed: bool = True
    exact: bool = True


EXCHANGES = {
    "all-reduce": ExchangeCase(exchange=exchanges.AllReduce(), keyed=False),
    "all-gather": ExchangeCase(exchange=exchanges.AllGather()),
    "tree": ExchangeCase(exchange=exchanges.GlobalTopKTree(), exact=False),
    "tree, exact values": ExchangeCase(exchange=exchanges.GlobalTopKTree(exact_values=True), exact=False),
    "doubling": ExchangeCase(exchange=exchanges.RecursiveDoubling()),
    "owner-sharded": ExchangeCase(exchange=exchanges.OwnerSharded()),
    "union": ExchangeCase(exchange=exchanges.UnionAllReduce()),
}


GATHERS: dict[str, gathers.Gathers] = {
    **{f"{bits} bits": gathers.Differences(bits=bits) for bits in (2, 3, 4, 8, 16)},
    "lossless": gathers.Lossless(),
}


@dataclass(frozen=True, kw_only=True)
class RecipeCase:
    """A method of the catalogue, made with some options.

    `momentum` recipes take it over from the optimizer; `conserving` ones lose nothing and add nothing: as the
    catalogue says, but where options change it. Those that exchange in `rounds` use the communication thread.
    """

    method: recipes.Method
    make: Callable[[], Reducer]
    momentum: bool
    conserving: bool
    rounds: bool


def _recipe(name: str, *, conserving: bool | None = None, rounds: bool | None = None, **options: Any) -> RecipeCase:
    method = recipes.METHODS[name]
    if rounds is None:
        rounds = not isinstance(method.large().exchange, (exchanges.AllReduce, exchanges.AllGather))
    return RecipeCase(
        method=method,
        make=lambda: method.recipe(**copy.deepcopy(options)),  # a memory among them is of one recipe alone
        momentum=method.momentum,
        conserving=method.conserving if conserving is None else conserving,
        rounds=rounds,
    )


def _falling(step: int) -> float:
    return 0.2 / (1 + step)


def _small(method: recipes.Method) -> dict[str, Any]:
    """Return options that suit the laws' small tensors, of those that the recipe takes."""
    return {key: value for key, value in {"density": 0.05, "minimum_size": 64}.items() if method.takes(key)}


OPTIONS: dict[str, dict[str, Any]] = {
    "s2_reducer": {"density": 0.1, "block": 8},
    "s2_union": {"density": 0.1, "block": 8},
    "fft": {"density": 0.3, "block": 64},
    "dct_dp": {"life": 3},
    "powersgd": {"rounds": True, "rank": 2, "start": 0},
}
"""What methods of the catalogue are tested with beyond what suits all of them."""

RECIPES = {
    **{name: _recipe(name, **_small(method) | OPTIONS.get(name, {})) for name, method in recipes.METHODS.items()},
    **{
        f"sampled_{name}": _recipe(name, **_small(method), sampled=True)
        for name, method in recipes.METHODS.items()
        if method.takes("sampled")
    },
    "gtopk, exact values": _recipe("gtopk", density=0.05, exact_values=True, minimum_size=64),
    "gtopk, the paper's merge": _recipe("gtopk", conserving=False, density=0.05, merge="paper", minimum_size=64),
    "fft, error feedback": _recipe(
        "fft", conserving=True, density=0.3, block=64, memory=memories.ErrorFeedback(), minimum_size=64
    ),
    "fft, scheduled": _recipe(
        "fft",
        density=schedules.FollowLearningRate(learning_rate=_falling, smoothness=1.0),
        block=64,
        minimum_size=64,
    ),
    "powersgd bf16": _recipe("powersgd", rounds=True, conserving=False, rank=2, values=torch.bfloat16, start=1),
    "powersgd 8 bits": _recipe("powersgd", rounds=True, rank=2, values=OFFSET_8, start=0),
}
"""Every method of the catalogue, and some with other options."""

VARIANTS = {name for name, case in RECIPES.items() if not case.method.benched or case.method.name != name} - {"dense"}
VARIANTS |= {"demo"}
"""Recipes that differ from another in its codec, its values, its settings or its exchange alone."""

OTHERS = sorted(set(RECIPES) - VARIANTS - {"topk", "dgc"})
"""Every test of any recipe trains with `topk` and `dgc`; with these, tests take turns."""

BOUNDARIES: dict[str, Callable[[], Boundary]] = {
    "topk 2%": lambda: TopKBoundary(0.02),
    "topk": lambda: TopKBoundary(0.25),
    "topk most": lambda: TopKBoundary(0.8),
    "topk all": lambda: TopKBoundary(1.0),
    "topk of samples": lambda: TopKBoundary(0.1, start_dim=1),
    "topk of batches": lambda: TopKBoundary(0.1, start_dim=0),
    "topk bf16": lambda: TopKBoundary(0.25, values=torch.bfloat16),
    "topk fp16 of samples": lambda: TopKBoundary(0.1, values=torch.float16, start_dim=1),
    "topk 8 bits": lambda: TopKBoundary(0.25, values=OFFSET_8),
    "topk half 8 bits": lambda: TopKBoundary(0.5, values=OFFSET_8),
    "topk all bf16": lambda: TopKBoundary(1.0, values=torch.bfloat16),
    "topk all 8 bits": lambda: TopKBoundary(1.0, values=OFFSET_8),
    "laplace 2%": lambda: LaplaceBoundary(0.02),
    "laplace": lambda: LaplaceBoundary(0.25),
    "laplace most": lambda: LaplaceBoundary(0.8),
    "laplace all": lambda: LaplaceBoundary(1.0),
    "laplace tight": lambda: LaplaceBoundary(0.25, bound=1.0),
    "laplace of samples": lambda: LaplaceBoundary(0.1, start_dim=1),
    "laplace bf16": lambda: LaplaceBoundary(0.25, values=torch.bfloat16),
    "laplace 8 bits": lambda: LaplaceBoundary(0.1, values=OFFSET_8),
}


MOMENTA: tuple[How, ...] = ("momentum", "nesterov")
SUMS: tuple[How, ...] = ("sum", "fading", *MOMENTA, "rounded")


def vector(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a heavy-tailed vector, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator) ** 4
    return x.to(dtype)


def summed(how: How, gradient: Tensor, scale: float = 1 / 3, frame: Callable[[Tensor], Tensor] = torch.clone) -> Sum:
    """Return a sum of one vector, of a kind. The outs hold NaN; `frame` makes room for each."""
    rounded = how == "rounded"
    residual, velocity = (vector(gradient.numel(), seed, gradient.dtype) for seed in (1, 2))
    residual = residual.bfloat16() if rounded else residual
    out = torch.full_like(residual, torch.nan)
    return Sum(
        [frame(out)],
        [frame(residual)],
        [frame(gradient)],
        [scale],
        decays=[0.9] if how in ("fading", "rounded") else None,
        moving=[frame(out)] if how in MOMENTA else None,
        velocities=[frame(velocity)] if how in MOMENTA else None,
        momentum=0.9,
        nesterov=how == "nesterov",
        seeds=[7] if rounded else None,
    )


def joined(sums: list[Sum]) -> Sum:
    """Return several sums of one kind as one, with rooms of its own."""
    columns: dict[str, Any] = {name: [x for one in sums for x in getattr(one, name) or ()] for name in COLUMNS}
    rooms = {name: list(map(torch.clone, columns[name])) for name in ("outs", "moving")}
    given: dict[str, Any] = {name: column or None for name, column in (columns | rooms).items()}
    return replace(sums[0], **given)
