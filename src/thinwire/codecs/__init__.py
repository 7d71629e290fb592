"""Codecs: which elements of a vector to send, and in what form."""

from thinwire.codecs.base import Codec
from thinwire.codecs.block_topk import BlockTopK
from thinwire.codecs.cast import Cast
from thinwire.codecs.chunk_topk import ChunkTopK
from thinwire.codecs.count_sketch import CountSketch
from thinwire.codecs.fft import FFT
from thinwire.codecs.hashed_slots import HashedSlots
from thinwire.codecs.identity import Identity
from thinwire.codecs.kept_threshold import KeptThreshold
from thinwire.codecs.laplace_threshold import LaplaceThreshold
from thinwire.codecs.mstopk import MSTopK
from thinwire.codecs.random_k import RandomK
from thinwire.codecs.row_topk import RowTopK
from thinwire.codecs.sampled_threshold import SampledThreshold
from thinwire.codecs.steered_threshold import SteeredThreshold
from thinwire.codecs.topk import TopK

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
