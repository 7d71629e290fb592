"""Payloads: what travels between ranks."""

from thinwire.payloads.base import Payload, Scratch
from thinwire.payloads.blocks import Blocks
from thinwire.payloads.chunks import Chunks
from thinwire.payloads.dense import Dense
from thinwire.payloads.keyed import Keyed
from thinwire.payloads.numbers import Narrow, fitted, narrowed
from thinwire.payloads.sketch import Sketch, SketchTable
from thinwire.payloads.sparse import Sparse
from thinwire.payloads.spectral import Spectral
from thinwire.payloads.words import Words

__all__ = [
    "Blocks",
    "Chunks",
    "Dense",
    "Keyed",
    "Narrow",
    "Payload",
    "Scratch",
    "Sketch",
    "SketchTable",
    "Sparse",
    "Spectral",
    "Words",
    "fitted",
    "narrowed",
]
