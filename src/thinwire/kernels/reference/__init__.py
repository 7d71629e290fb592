"""The executable specification of every kernel, in plain torch.

All tensors are flat. Magnitudes are compared so that NaN ranks above infinity, and infinity above every number: what is
not finite is always selected, never hidden.
"""

from thinwire.kernels.reference.accumulate import accumulate, accumulate_momentum
from thinwire.kernels.reference.bits import pack_bits, unpack_bits
from thinwire.kernels.reference.blocks import block_energies, largest_blocks
from thinwire.kernels.reference.codes import (
    OffsetGrid,
    Rounding,
    levels_encode,
    offset_encode,
    sign_encode,
    table_decode,
    ternary_encode,
)
from thinwire.kernels.reference.factors import orthonormal, outer_sums, row_sums
from thinwire.kernels.reference.fourier import inverse_fourier
from thinwire.kernels.reference.hashing import hashed_slots, index_of, keys, mix, slot_of
from thinwire.kernels.reference.indices import elias_fano_decode, elias_fano_encode
from thinwire.kernels.reference.merge import merge
from thinwire.kernels.reference.norms import group_norms
from thinwire.kernels.reference.rounded import accumulate_rounded, accumulate_rounded_select
from thinwire.kernels.reference.rows import largest_in_rows
from thinwire.kernels.reference.scatter import mask, scatter, scatter_add
from thinwire.kernels.reference.select import (
    Picks,
    accumulate_momentum_select,
    accumulate_select,
    largest,
    select,
)
from thinwire.kernels.reference.sketch import sketch_insert, sketch_query
from thinwire.kernels.reference.slots import slot_codes, slot_indices

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
