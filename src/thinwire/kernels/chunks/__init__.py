"""Chunks of a tensor: the largest coefficients of each, their inverse transform, and where they lie."""

from thinwire.kernels.chunks import cpu, reference
from thinwire.kernels.chunks.chunking import Chunking, Numbering, Transform
from thinwire.kernels.dispatch import Kernel

__all__ = [
    "Chunking",
    "Numbering",
    "Transform",
    "chunk_subtract",
    "chunk_topk",
    "chunk_write",
    "subsets_decode",
    "subsets_encode",
]

chunk_topk = Kernel(reference.chunk_topk, cpu.chunk_topk, by="x")
chunk_write = Kernel(reference.chunk_write, cpu.chunk_write, by="out values")
chunk_subtract = Kernel(reference.chunk_subtract, cpu.chunk_subtract, by="out values")
subsets_encode = Kernel(reference.subsets_encode, cpu.subsets_encode, by="positions", any_dtype=True)
subsets_decode = Kernel(reference.subsets_decode, cpu.subsets_decode, by="rows", any_dtype=True)
