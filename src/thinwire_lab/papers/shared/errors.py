"""Every method's relative error, cosine and real bytes on gradients."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import FFT, BlockTopK, Cast, Codec, CountSketch, LaplaceThreshold, SampledThreshold, TopK
from thinwire.formats import OffsetFloat, Sign, Ternary
from thinwire.payloads import Payload
from thinwire.recipes import METHODS
from thinwire_lab.papers.shared.material import Gradients, Run

DENSITIES = (0.001, 0.005, 0.02, 0.1, 0.3)
QUICK_DENSITIES = (0.01, 0.1)

Restore = Callable[[Tensor, int], tuple[Tensor, float]]
"""A gradient in its shape and a seed → the gradient as received, flat, and the bytes that travelled."""


@dataclass(frozen=True, kw_only=True)
class Compressor:
    name: str
    density: float
    restore: Restore


def offset(bits: int, mantissa: int) -> OffsetFloat:
    """Return the offset float that we use everywhere: balanced, scaled to each tensor, rounded to nearest."""
    return OffsetFloat.balanced(bits=bits, mantissa=mantissa, rounding="nearest")


def _of(name: str) -> Callable[[float], Codec]:
    return lambda density: METHODS[name].large(density).codec


def _of_bits(name: str, bits: int) -> Codec:
    """Return the codec of a catalogue method with other bits."""
    method = METHODS[name]
    return replace(method, recipe=partial(method.recipe, bits=bits)).large().codec


SPARSE: tuple[tuple[str, Callable[[float], Codec]], ...] = (
    ("topk", _of("topk")),
    ("sampled_topk", lambda density: SampledThreshold(density=density)),
    *((name, _of(name)) for name in ("dragonn", "randomk", "mstopk", "dct_dp")),
    ("laplace threshold", lambda density: LaplaceThreshold(density=density)),
    ("s2_union", _of("s2_union")),
    ("fft", _of("fft")),
    ("fft, float32", lambda density: FFT(density=density)),
    ("fft, 8 bits", lambda density: FFT(density=density, values=offset(8, 3))),
    ("topk, 8 bits", lambda density: TopK(density=density, values=offset(8, 3))),
)
"""Names and codecs. One named like a catalogue method sends what that method sends."""
NARROW: tuple[tuple[str, Codec], ...] = (
    ("bf16", Cast(values=torch.bfloat16)),
    ("fp16", Cast(values=torch.float16)),
    ("offset float 8 bits", Cast(values=offset(8, 3))),
    ("offset float 10 bits", Cast(values=offset(10, 5))),
    *((f"{family} {bits} bits", _of_bits(family, bits)) for family in ("qsgd_l2", "qsgd") for bits in (2, 4, 8)),
    ("terngrad, not clipped", Cast(values=Ternary())),
    ("terngrad, not clipped, by 512", Cast(values=Ternary(group_size=512))),
    ("signsgd, a scale a tensor", Cast(values=Sign())),
)
RANKS = (1, 2, 4)


def compressors(quick: bool = False) -> Iterator[Compressor]:
    for density in QUICK_DENSITIES if quick else DENSITIES:
        for name, make in SPARSE:
            yield Compressor(name=name, density=density, restore=_plain(make(density)))
        for name, packed in (("s2_reducer", CountSketch(ratio=0.5)), ("s2_union, bf16", Cast(values=torch.bfloat16))):
            yield Compressor(name=name, density=density, restore=_packed(BlockTopK(density=density), packed))
    for name, codec in NARROW:
        yield Compressor(name=name, density=1.0, restore=_plain(codec))
    for rank in RANKS:
        yield Compressor(name=f"powersgd rank {rank}", density=1.0, restore=_low_rank(rank))


def packed_rows(x: Tensor, select: BlockTopK, packed: Codec, seed: int) -> tuple[Tensor, Payload]:
    """Return blocks whose values went through another codec, as in a union all-reduce, and the payload sent."""
    blocks = select.encode(x)
    sent = packed.encode(blocks.values, seed=seed)
    return blocks.with_values(sent.dense().to(blocks.values.dtype)).dense(), sent


def _plain(codec: Codec) -> Restore:
    def restore(x: Tensor, seed: int) -> tuple[Tensor, float]:
        payload = codec.encode(x, seed=seed)
        return payload.dense(), payload.nbytes

    return restore


def _packed(select: BlockTopK, packed: Codec) -> Restore:
    def restore(x: Tensor, seed: int) -> tuple[Tensor, float]:
        restored, sent = packed_rows(x, select, packed, seed)
        bitmap = -(-x.numel() // (8 * select.block))
        return restored, sent.nbytes + bitmap

    return restore


def _low_rank(rank: int) -> Restore:
    """PowerSGD (Vogels et al. 2019) of one worker, with the library's kernels. Vectors travel whole.

    Two rounds from a random basis replace the basis that the reducer keeps from the previous step.
    """

    def restore(x: Tensor, seed: int) -> tuple[Tensor, float]:
        matrix = x.reshape(x.shape[0], -1)
        if x.dim() < 2 or rank * sum(matrix.shape) >= x.numel():
            return x.reshape(-1), 4.0 * x.numel()
        right = torch.randn(matrix.shape[1], rank, generator=torch.Generator().manual_seed(seed))
        for _ in range(2):
            left = kernels.orthonormal(matrix @ right)
            right = matrix.T @ left
        restored = torch.empty_like(matrix)
        kernels.outer_sums(restored, left, right)
        return restored.reshape(-1), 4.0 * rank * sum(matrix.shape)

    return restore


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One method on one model at one step, tensor by tensor. `bytes` are one worker's payloads, headers included."""

    model: str
    step: int
    method: str
    density: float
    bytes: float
    bits_per_element: float
    error: float
    cosine: float


def measure(
    run: Run, compressors: Sequence[Compressor], tick: Callable[[], None], seed: int = 0, quick: bool = False
) -> Iterator[Measured]:
    """Yield a row for each snapshot, or for the last if `quick`, and each method."""
    for shot in run.snapshots[-1:] if quick else run.snapshots:
        for compressor in compressors:
            yield _one(run.model, shot.step, shot.mean, compressor, seed)
            tick()


def _one(model: str, step: int, gradients: Gradients, compressor: Compressor, seed: int) -> Measured:
    sums, nbytes, numel = np.zeros(4), 0.0, 0
    for place, x in enumerate(gradients.values()):
        restored, sent = compressor.restore(x, seed + place)
        g, r = x.reshape(-1).double(), restored.double()
        sums += [float(v) for v in ((g - r).square().sum(), g.square().sum(), r.square().sum(), torch.dot(g, r))]
        nbytes, numel = nbytes + sent, numel + x.numel()
    return Measured(
        model=model,
        step=step,
        method=compressor.name,
        density=compressor.density,
        bytes=nbytes,
        bits_per_element=8 * nbytes / numel,
        error=sums[0] / sums[1],
        cosine=sums[3] / math.sqrt(sums[1] * sums[2]) if sums[2] else 0.0,
    )
