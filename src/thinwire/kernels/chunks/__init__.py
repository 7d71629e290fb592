"""Chunks of tensors: the largest coefficients of each, and their inverse transform."""

from thinwire.kernels.chunks import cpu, reference
from thinwire.kernels.chunks.chunking import Chunking, Transform
from thinwire.kernels.dispatch import Kernel

__all__ = ["Chunking", "Transform", "accumulate_chunk_topk", "chunk_put", "chunk_topk"]

chunk_topk = Kernel(reference.chunk_topk, cpu.chunk_topk, by="*xs")
accumulate_chunk_topk = Kernel(reference.accumulate_chunk_topk, cpu.accumulate_chunk_topk, by="sums")
chunk_put = Kernel(reference.chunk_put, cpu.chunk_put, by="*outs values")
