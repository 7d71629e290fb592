"""Operations on every element of a vector: in Numba on the CPU, in Triton on a GPU, otherwise in plain torch.

`kernels.select(x, threshold, capacity)` runs the implementation that suits its tensors; all of them compute the same
thing. `kernels.select.reference` is a particular one (see `thinwire.kernels.dispatch.Kernel`). Each folder holds one
operation: `reference.py` says what it computes, `cpu.py` is for Numba, `triton.py` for the GPU, and `__init__.py`
declares the kernels. Vectors are flat tensors throughout.
"""

from thinwire.kernels.accumulate import accumulate, subtract_rounded
from thinwire.kernels.bits import (
    EliasFano,
    elias_fano_decode,
    elias_fano_decode_rows,
    elias_fano_encode,
    ones,
    pack_bits,
    unpack_bits,
)
from thinwire.kernels.blocks import block_energies, group_norms, largest_blocks, largest_in_rows
from thinwire.kernels.chunks import Chunking, Transform, accumulate_chunk_topk, chunk_put, chunk_topk
from thinwire.kernels.codes import (
    OffsetGrid,
    Rounding,
    levels_encode,
    offset_encode,
    sign_encode,
    table_decode,
    ternary_encode,
)
from thinwire.kernels.dispatch import Kernel
from thinwire.kernels.exponents import exponents_count, exponents_decode, exponents_encode
from thinwire.kernels.fourier import inverse_fourier
from thinwire.kernels.gathered import gather_each, peak_of_each
from thinwire.kernels.groups import Groups
from thinwire.kernels.hashing import (
    hashed_slots,
    hashed_slots_of_each,
    index_of,
    keys,
    mix,
    slot_codes,
    slot_indices,
    slot_of,
)
from thinwire.kernels.matrices import orthonormal, outer_sums, row_sums
from thinwire.kernels.sampled import Draw, accumulate_sampled_select, limited
from thinwire.kernels.scatter import mask, merge, scatter, scatter_add
from thinwire.kernels.select import (
    Picks,
    accumulate_select,
    gather,
    largest,
    largest_of_each,
    select,
)
from thinwire.kernels.sketch import sketch_insert, sketch_query
from thinwire.kernels.slotted import Slotted, slots_decode, slots_encode
from thinwire.kernels.subsets import Numbering, subsets_decode, subsets_encode
from thinwire.kernels.sums import Sum

__all__ = [
    "Chunking",
    "Draw",
    "EliasFano",
    "Groups",
    "Kernel",
    "Numbering",
    "OffsetGrid",
    "Picks",
    "Rounding",
    "Slotted",
    "Sum",
    "Transform",
    "accumulate",
    "accumulate_chunk_topk",
    "accumulate_sampled_select",
    "accumulate_select",
    "block_energies",
    "chunk_put",
    "chunk_topk",
    "elias_fano_decode",
    "elias_fano_decode_rows",
    "elias_fano_encode",
    "exponents_count",
    "exponents_decode",
    "exponents_encode",
    "gather",
    "gather_each",
    "group_norms",
    "hashed_slots",
    "hashed_slots_of_each",
    "index_of",
    "inverse_fourier",
    "keys",
    "largest",
    "largest_blocks",
    "largest_in_rows",
    "largest_of_each",
    "levels_encode",
    "limited",
    "mask",
    "merge",
    "mix",
    "offset_encode",
    "ones",
    "orthonormal",
    "outer_sums",
    "pack_bits",
    "peak_of_each",
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
    "slots_decode",
    "slots_encode",
    "subsets_decode",
    "subsets_encode",
    "subtract_rounded",
    "table_decode",
    "ternary_encode",
    "unpack_bits",
]
