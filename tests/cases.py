"""The one list of cases over which every law is tested. A new codec, memory, exchange or recipe adds its row here."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import codecs, exchanges, memories, recipes
from thinwire.reducer import Reducer

SIZES = (1, 2, 63, 1000, 5000)


@dataclass(frozen=True, kw_only=True)
class CodecCase:
    """`exact` codecs lose nothing of what they pick; `unbiased` ones are right on average over seeds."""

    codec: codecs.Codec
    exact: bool = True
    unbiased: bool = False
    exchange: exchanges.Exchange = exchanges.AllGather()  # noqa: RUF009 - frozen


CODECS = {
    "identity": CodecCase(codec=codecs.Identity(), exchange=exchanges.AllReduce()),
    "identity gathered": CodecCase(codec=codecs.Identity()),
    "fp16": CodecCase(codec=codecs.Cast(), exact=False, exchange=exchanges.AllReduce()),
    "bf16": CodecCase(codec=codecs.Cast(values=torch.bfloat16), exact=False, exchange=exchanges.AllReduce()),
    "topk": CodecCase(codec=codecs.TopK(density=0.05)),
    "topk all": CodecCase(codec=codecs.TopK(density=1.0)),
    "topk bf16": CodecCase(codec=codecs.TopK(density=0.05, values=torch.bfloat16), exact=False),
    "sampled threshold": CodecCase(codec=codecs.SampledThreshold(density=0.05)),
    "sampled threshold fp16": CodecCase(codec=codecs.SampledThreshold(density=0.05, values=torch.float16), exact=False),
    "hashed slots": CodecCase(codec=codecs.HashedSlots(density=0.05)),
    "random-k": CodecCase(codec=codecs.RandomK(density=0.05), exchange=exchanges.AllReduce()),
    "random-k gathered": CodecCase(codec=codecs.RandomK(density=0.05)),
    "random-k unbiased": CodecCase(
        codec=codecs.RandomK(density=0.05, unbiased=True), exact=False, unbiased=True, exchange=exchanges.AllReduce()
    ),
}

MEMORIES: dict[str, Callable[[], memories.Memory]] = {
    "none": memories.NoMemory,
    "error feedback": memories.ErrorFeedback,
    "momentum correction": lambda: memories.MomentumCorrection(momentum=0.5),
    "nesterov": lambda: memories.MomentumCorrection(momentum=0.5, nesterov=True),
    "unmasked": lambda: memories.MomentumCorrection(momentum=0.5, masking=False),
}

EXCHANGES: dict[str, exchanges.Exchange] = {
    "all-reduce": exchanges.AllReduce(),
    "all-gather": exchanges.AllGather(),
}


@dataclass(frozen=True, kw_only=True)
class RecipeCase:
    """`momentum` recipes take it over from the optimizer."""

    make: Callable[[], Reducer]
    momentum: bool = False


RECIPES = {
    "dense": RecipeCase(make=recipes.dense),
    "topk": RecipeCase(make=lambda: recipes.topk(density=0.05, minimum_size=64)),
    "dgc": RecipeCase(make=lambda: recipes.dgc(density=0.05, minimum_size=64), momentum=True),
    "dragonn": RecipeCase(make=lambda: recipes.dragonn(density=0.05, minimum_size=64), momentum=True),
    "randomk": RecipeCase(make=lambda: recipes.randomk(density=0.05, minimum_size=64)),
}


def vector(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a heavy-tailed vector, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator) ** 4
    return x.to(dtype)
