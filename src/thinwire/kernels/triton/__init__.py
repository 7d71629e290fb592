"""The kernels of `reference` for contiguous tensors on a GPU, in Triton; only this folder imports it.

Nothing here makes the host wait for the device but `merge`, and nothing depends on the order in which programs run. The
kernels take several types, so they carry no annotations; a tile's size is a compile-time constant in capitals.
"""

from thinwire.kernels.reference import Picks
from thinwire.kernels.triton.accumulate import accumulate, accumulate_momentum
from thinwire.kernels.triton.bits import pack_bits, unpack_bits
from thinwire.kernels.triton.blocks import block_energies, largest_blocks
from thinwire.kernels.triton.codes import (
    OffsetGrid,
    Rounding,
    levels_encode,
    offset_encode,
    sign_encode,
    table_decode,
    ternary_encode,
)
from thinwire.kernels.triton.factors import orthonormal, outer_sums, row_sums
from thinwire.kernels.triton.fourier import inverse_fourier
from thinwire.kernels.triton.hashing import hashed_slots, index_of, keys, mix, slot_of
from thinwire.kernels.triton.indices import elias_fano_decode, elias_fano_encode
from thinwire.kernels.triton.merge import merge
from thinwire.kernels.triton.norms import group_norms
from thinwire.kernels.triton.rounded import accumulate_rounded, accumulate_rounded_select
from thinwire.kernels.triton.rows import largest_in_rows
from thinwire.kernels.triton.scatter import mask, scatter, scatter_add
from thinwire.kernels.triton.select import accumulate_momentum_select, accumulate_select, largest, select
from thinwire.kernels.triton.sketch import sketch_insert, sketch_query
from thinwire.kernels.triton.slots import slot_codes, slot_indices

__all__ = [
    "OffsetGrid",
    "Picks",
    "Rounding",
    "accumulate",
    "accumulate_momentum",
    "accumulate_momentum_select",
    "accumulate_rounded",
    "accumulate_rounded_select",
    "accumulate_select",
    "block_energies",
    "elias_fano_decode",
    "elias_fano_encode",
    "group_norms",
    "hashed_slots",
    "index_of",
    "inverse_fourier",
    "keys",
    "largest",
    "largest_blocks",
    "largest_in_rows",
    "levels_encode",
    "mask",
    "merge",
    "mix",
    "offset_encode",
    "orthonormal",
    "outer_sums",
    "pack_bits",
    "row_sums",
    "scatter",
    "scatter_add",
    "select",
    "sign_encode",
    "sketch_insert",
    "sketch_query",
    "slot_codes",
    "slot_indices",
    "slot_of",
    "table_decode",
    "ternary_encode",
    "unpack_bits",
]
