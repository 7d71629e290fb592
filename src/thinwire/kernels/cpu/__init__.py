"""The kernels of `reference` for contiguous tensors in main memory, one pass over memory each.

They release the GIL and use no thread pool of Numba's, so any thread may call them; a large tensor is cut into ranges
that run side by side.
"""

from thinwire.kernels.cpu.bits import pack_bits, unpack_bits
from thinwire.kernels.cpu.blocks import block_energies, largest_blocks
from thinwire.kernels.cpu.codes import (
    levels_encode,
    offset_encode,
    sign_encode,
    table_decode,
    ternary_encode,
)
from thinwire.kernels.cpu.factors import orthonormal, outer_sums, row_sums
from thinwire.kernels.cpu.fourier import inverse_fourier
from thinwire.kernels.cpu.hashing import hashed_slots, index_of, keys, mix, slot_of
from thinwire.kernels.cpu.indices import elias_fano_decode, elias_fano_encode
from thinwire.kernels.cpu.merge import merge
from thinwire.kernels.cpu.norms import group_norms
from thinwire.kernels.cpu.rounded import accumulate_rounded, accumulate_rounded_select
from thinwire.kernels.cpu.rows import largest_in_rows
from thinwire.kernels.cpu.scatter import mask, scatter, scatter_add
from thinwire.kernels.cpu.select import accumulate_momentum_select, accumulate_select, largest, select
from thinwire.kernels.cpu.sketch import sketch_insert, sketch_query
from thinwire.kernels.cpu.slots import slot_codes, slot_indices
from thinwire.kernels.reference import OffsetGrid, Picks, accumulate, accumulate_momentum

__all__ = [
    "OffsetGrid",
    "Picks",
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
