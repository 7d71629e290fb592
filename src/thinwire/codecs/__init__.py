"""Codecs: vector → payload."""

from thinwire.codecs.base import Codec
from thinwire.codecs.cast import Cast
from thinwire.codecs.hashed_slots import HashedSlots
from thinwire.codecs.identity import Identity
from thinwire.codecs.random_k import RandomK
from thinwire.codecs.sampled_threshold import SampledThreshold
from thinwire.codecs.topk import TopK

__all__ = ["Cast", "Codec", "HashedSlots", "Identity", "RandomK", "SampledThreshold", "TopK"]
