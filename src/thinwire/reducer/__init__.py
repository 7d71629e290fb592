"""Reducers: bucket of gradients → its mean over all ranks."""

from thinwire.reducer.base import Bucket, Reducer, Round, Slot
from thinwire.reducer.compressed import Compressed
from thinwire.reducer.per_tensor import PerTensor
from thinwire.reducer.power_sgd import PowerSGD
from thinwire.reducer.released import Released
from thinwire.reducer.rows import WithRows
from thinwire.reducer.wrappers import MinimumSize, WarmUp

__all__ = [
    "Bucket",
    "Compressed",
    "MinimumSize",
    "PerTensor",
    "PowerSGD",
    "Reducer",
    "Released",
    "Round",
    "Slot",
    "WarmUp",
    "WithRows",
]
