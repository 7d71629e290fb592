"""Chunks of a tensor: the largest coefficients of each, and their inverse transform."""

from thinwire.kernels.chunks import cpu, reference
from thinwire.kernels.chunks.chunking import Chunking, Transform
from thinwire.kernels.dispatch import Kernel

__all__ = [
    "Chunking",
    "Transform",
    "accumulate_fading_chunk_topk",
    "accumulate_fading_chunk_topk_each",
    "chunk_put_each",
    "chunk_subtract",
    "chunk_topk",
    "chunk_topk_each",
    "chunk_write",
]

chunk_topk = Kernel(reference.chunk_topk, cpu.chunk_topk, by="x")
accumulate_fading_chunk_topk = Kernel(
    reference.accumulate_fading_chunk_topk, cpu.accumulate_fading_chunk_topk, by="out residual"
)
chunk_write = Kernel(reference.chunk_write, cpu.chunk_write, by="out values")
chunk_subtract = Kernel(reference.chunk_subtract, cpu.chunk_subtract, by="out values")
chunk_topk_each = Kernel(reference.chunk_topk_each, cpu.chunk_topk_each, by="*xs")
accumulate_fading_chunk_topk_each = Kernel(
    reference.accumulate_fading_chunk_topk_each, cpu.accumulate_fading_chunk_topk_each, by="*outs *residuals"
)
chunk_put_each = Kernel(reference.chunk_put_each, cpu.chunk_put_each, by="*outs values")
