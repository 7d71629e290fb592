"""Reducers: bucket of gradients → its mean over all ranks."""

from thinwire.reducer.base import Bucket, Mean, Reducer, Round, Segment, Segments
from thinwire.reducer.compressed import Compressed
from thinwire.reducer.owners import ToOwners
from thinwire.reducer.power_sgd import PowerSGD
from thinwire.reducer.wrappers import MinimumSize, PerTensor, Released, WarmUp, WithRows

__all__ = [
    "Bucket",
    "Compressed",
    "Mean",
    "MinimumSize",
    "PerTensor",
    "PowerSGD",
    "Reducer",
    "Released",
    "Round",
    "Segment",
    "Segments",
    "ToOwners",
    "WarmUp",
    "WithRows",
]
