"""Codecs: which elements of a vector to send, and in what form."""

from thinwire.codecs.base import Codec
from thinwire.codecs.block_topk import BlockTopK
from thinwire.codecs.cast import Cast, Identity
from thinwire.codecs.chunk_topk import ChunkTopK
from thinwire.codecs.count_sketch import CountSketch
from thinwire.codecs.fft import FFT
from thinwire.codecs.hashed_slots import HashedSlots
from thinwire.codecs.mstopk import MSTopK
from thinwire.codecs.random_k import RandomK
from thinwire.codecs.sampled_threshold import SampledThreshold
from thinwire.codecs.thresholding import KeptThreshold, LaplaceThreshold, SteeredThreshold
from thinwire.codecs.topk import RowTopK, TopK

__all__ = [
    "FFT",
    "BlockTopK",
    "Cast",
    "ChunkTopK",
    "Codec",
    "CountSketch",
    "HashedSlots",
    "Identity",
    "KeptThreshold",
    "LaplaceThreshold",
    "MSTopK",
    "RandomK",
    "RowTopK",
    "SampledThreshold",
    "SteeredThreshold",
    "TopK",
]
