"""Every method at every density, as one table of rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import (
    FFT,
    BlockTopK,
    Cast,
    Codec,
    CountSketch,
    HashedSlots,
    KeptThreshold,
    LaplaceThreshold,
    MSTopK,
    RandomK,
    SampledThreshold,
    TopK,
)
from thinwire.formats import Levels, OffsetFloat, Sign, Ternary
from thinwire.payloads import Payload

DENSITIES = (0.001, 0.005, 0.02, 0.1, 0.3)
QUICK_DENSITIES = (0.01, 0.1)

Restore = Callable[[Tensor, int], tuple[Tensor, float]]
"""A gradient in its shape and a seed → the gradient as received, flat, and the bytes that travelled."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to send a gradient. Methods of one family differ in density, bits or rank, and make one curve."""

    group: str
    family: str
    name: str
    density: float
    restore: Restore


def offset(bits: int, mantissa: int) -> OffsetFloat:
    """Return the offset float that is used throughout: balanced, scaled to each tensor, rounded to nearest."""
    return OffsetFloat.balanced(bits=bits, mantissa=mantissa, rounding="nearest")


SPARSE: tuple[tuple[str, str, Callable[[float], Codec]], ...] = (
    ("elements", "topk", lambda density: TopK(density=density)),
    ("elements", "sampled threshold", lambda density: SampledThreshold(density=density)),
    ("elements", "hashed slots", lambda density: HashedSlots(density=density)),
    ("elements", "random-k", lambda density: RandomK(density=density)),
    ("elements", "mstopk", lambda density: MSTopK(density=density)),
    ("elements", "dct kept threshold", lambda density: KeptThreshold(density=density)),
    ("elements", "dct laplace threshold", lambda density: LaplaceThreshold(density=density)),
    ("blocks and spectra", "block topk", lambda density: BlockTopK(density=density)),
    ("blocks and spectra", "fft", lambda density: FFT(density=density)),
    ("blocks and spectra", "fft + offset 8 bits", lambda density: FFT(density=density, values=offset(8, 3))),
    ("blocks and spectra", "fft + offset 10 bits", lambda density: FFT(density=density, values=offset(10, 5))),
    ("blocks and spectra", "topk + offset 8 bits", lambda density: TopK(density=density, values=offset(8, 3))),
)
NARROW: tuple[tuple[str, str, Codec], ...] = (
    ("bf16 and fp16", "bf16", Cast(values=torch.bfloat16)),
    ("bf16 and fp16", "fp16", Cast(values=torch.float16)),
    ("offset float", "offset float 8 bits", Cast(values=offset(8, 3))),
    ("offset float", "offset float 10 bits", Cast(values=offset(10, 5))),
    ("qsgd", "qsgd 2 bits", Cast(values=Levels(bits=2))),
    ("qsgd", "qsgd 4 bits", Cast(values=Levels(bits=4))),
    ("qsgd", "qsgd 8 bits", Cast(values=Levels(bits=8))),
    ("qsgd, largest as norm", "qsgd max 2 bits", Cast(values=Levels(bits=2, norm="max"))),
    ("qsgd, largest as norm", "qsgd max 4 bits", Cast(values=Levels(bits=4, norm="max"))),
    ("qsgd, largest as norm", "qsgd max 8 bits", Cast(values=Levels(bits=8, norm="max"))),
    ("terngrad", "terngrad", Cast(values=Ternary())),
    ("terngrad", "terngrad by 512", Cast(values=Ternary(group=512))),
    ("sign", "sign", Cast(values=Sign())),
)
RANKS = (1, 2, 4)


def methods(quick: bool = False) -> Iterator[Method]:
    """Yield the table."""
    for density in QUICK_DENSITIES if quick else DENSITIES:
        for group, family, make in SPARSE:
            yield Method(group=group, family=family, name=family, density=density, restore=_plain(make(density)))
        for family, packed in (
            ("sketch of blocks", CountSketch(ratio=0.5)),
            ("union bf16", Cast(values=torch.bfloat16)),
        ):
            restore = _packed(BlockTopK(density=density), packed)
            yield Method(group="blocks and spectra", family=family, name=family, density=density, restore=restore)
    for family, name, codec in NARROW:
        yield Method(group="few bits and low rank", family=family, name=name, density=1.0, restore=_plain(codec))
    for rank in RANKS:
        name = f"powersgd rank {rank}"
        yield Method(group="few bits and low rank", family="powersgd", name=name, density=1.0, restore=_low_rank(rank))


def packed_rows(x: Tensor, select: BlockTopK, packed: Codec, seed: int) -> tuple[Tensor, Payload]:
    """Return blocks whose values went through another codec, as in an all-reduce of their union, and what was sent."""
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
    """PowerSGD (Vogels et al. 2019) with two power iterations instead of its warm start. Vectors travel whole."""

    def restore(x: Tensor, seed: int) -> tuple[Tensor, float]:
        matrix = x.reshape(x.shape[0], -1)
        if x.dim() < 2 or rank * sum(matrix.shape) >= x.numel():
            return x.reshape(-1), 4.0 * x.numel()
        right = torch.randn(matrix.shape[1], rank, generator=torch.Generator().manual_seed(seed))
        for _ in range(2):
            left = torch.linalg.qr(matrix @ right).Q
            right = matrix.T @ left
        return (left @ right.T).reshape(-1), 4.0 * rank * sum(matrix.shape)

    return restore
