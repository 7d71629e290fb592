"""Operations on every element of a vector: in Numba on the CPU, in Triton on a GPU, otherwise in plain torch.

`kernels.select(x, threshold, capacity)` runs the implementation that suits its tensors; all of them compute the same
thing. `kernels.select.reference` is a particular one (see `thinwire.kernels.dispatch.Kernel`). Each folder holds some
operations: `reference.py` says what each computes, `cpu.py` has functions of the same names for Numba, and `triton.py`
for the GPU. Vectors are flat tensors throughout.
"""

from thinwire.kernels.accumulate import reference as _accumulate
from thinwire.kernels.bits import reference as _bits
from thinwire.kernels.bits.reference import EliasFano as EliasFano
from thinwire.kernels.bits.reference import Section as Section
from thinwire.kernels.blocks import reference as _blocks
from thinwire.kernels.blocks.reference import Norm as Norm
from thinwire.kernels.chunks import reference as _chunks
from thinwire.kernels.chunks.chunking import Chunking as Chunking
from thinwire.kernels.chunks.chunking import Transform as Transform
from thinwire.kernels.codes import reference as _codes
from thinwire.kernels.codes.reference import Arrived as Arrived
from thinwire.kernels.codes.reference import OffsetGrid as OffsetGrid
from thinwire.kernels.codes.reference import Packed as Packed
from thinwire.kernels.codes.reference import Rounding as Rounding
from thinwire.kernels.codes.reference import UniformGrid as UniformGrid
from thinwire.kernels.dispatch import Kernel as Kernel
from thinwire.kernels.exact import reference as _exact
from thinwire.kernels.hashing import reference as _hashing
from thinwire.kernels.hashing.reference import Slotted as Slotted
from thinwire.kernels.hashing.reference import hashed_slots as hashed_slots
from thinwire.kernels.hashing.reference import mix as mix
from thinwire.kernels.hashing.reference import slot_of as slot_of
from thinwire.kernels.parts import Found as Found
from thinwire.kernels.parts import Groups as Groups
from thinwire.kernels.parts import gather as gather
from thinwire.kernels.places import reference as _places
from thinwire.kernels.places.reference import Checks as Checks
from thinwire.kernels.sampled import reference as _sampled
from thinwire.kernels.sampled.reference import Draw as Draw
from thinwire.kernels.sampled.reference import limited as limited
from thinwire.kernels.scatter import reference as _scatter
from thinwire.kernels.select import reference as _select
from thinwire.kernels.select.reference import Picks as Picks
from thinwire.kernels.subsets import reference as _subsets
from thinwire.kernels.subsets.reference import Numbered as Numbered
from thinwire.kernels.subsets.reference import Numbering as Numbering
from thinwire.kernels.sums import Sum as Sum

accumulate = Kernel(_accumulate.accumulate, by="sums")
joined = Kernel(_accumulate.joined, by="*xs")
clamped = Kernel(_accumulate.clamped, by="*means *wide")
subtract_rounded = Kernel(_accumulate.subtract_rounded, by="x indices", any_dtype=True)

select = Kernel(_select.select, by="x")
largest = Kernel(_select.largest, by="x")
largest_of_each = Kernel(_select.largest_of_each, by="*xs")
accumulate_select = Kernel(_select.accumulate_select, by="sums")
accumulate_largest_of_each = Kernel(_sampled.accumulate_largest_of_each, by="sums")
accumulate_hashed_slots = Kernel(_sampled.accumulate_hashed_slots, by="sums")
accumulate_sampled_select = Kernel(_sampled.accumulate_sampled_select, by="sums")
peak_of_each = Kernel(_select.peak_of_each, by="*xs")

chunk_topk = Kernel(_chunks.chunk_topk, by="*xs")
accumulate_chunk_topk = Kernel(_chunks.accumulate_chunk_topk, by="sums")
chunk_put = Kernel(_chunks.chunk_put, by="*outs values")
chunk_settle = Kernel(_chunks.chunk_settle, by="*outs *parts own_values")

block_energies = Kernel(_blocks.block_energies, by="x")
largest_blocks = Kernel(_blocks.largest_blocks, by="x")
largest_in_rows = Kernel(_blocks.largest_in_rows, by="x")
group_norms = Kernel(_blocks.group_norms, by="x")
group_scales = Kernel(_blocks.group_scales, by="x")

gather_each = Kernel(_select.gather_each, by="*xs")
scatter = Kernel(_scatter.scatter, by="out")
scatter_add = Kernel(_scatter.scatter_add, by="*outs *masked")
settle = Kernel(_scatter.settle, by="out *outs")
merge = Kernel(_scatter.merge, by="*rows")
placed = Kernel(_places.placed, by="indices", any_dtype=True)
misplaced = Kernel(_places.misplaced, by="keys edges", any_dtype=True)
differ = Kernel(_places.differ, by="fixed", any_dtype=True)

hashed_slots_of_each = Kernel(_hashing.hashed_slots_of_each, by="*xs")
slots_encode = Kernel(_hashing.slots_encode, by="indices", any_dtype=True)
slots_read = Kernel(_hashing.slots_read, by="fixed", any_dtype=True)
slots_decode = Kernel(_hashing.slots_decode, by="*rows", any_dtype=True)

sketch_insert = Kernel(_hashing.sketch_insert, by="x")
sketch_query = Kernel(_hashing.sketch_query, by="table")

codes_encode = Kernel(_codes.codes_encode, by="x scales")
scaled_encode = Kernel(_codes.scaled_encode, by="xs", any_dtype=True)
numbers_read = Kernel(_codes.numbers_read, by="table", any_dtype=True)
table_decode = Kernel(_codes.table_decode, by="out codes scales", any_dtype=True)

sections_write = Kernel(_bits.sections_write, by="out", any_dtype=True)
pack_bits = Kernel(_bits.pack_bits, by="codes", any_dtype=True)
unpack_bits = Kernel(_bits.unpack_bits, by="buffer", any_dtype=True)
ones = Kernel(_bits.ones, by="bits", any_dtype=True)
elias_fano_encode = Kernel(_bits.elias_fano_encode, by="indices", any_dtype=True)
elias_fano_read = Kernel(_bits.elias_fano_read, by="edges", any_dtype=True)
elias_fano_decode = Kernel(_bits.elias_fano_decode, by="*rows", any_dtype=True)
subsets_encode = Kernel(_subsets.subsets_encode, by="positions", any_dtype=True)
subsets_read = Kernel(_subsets.subsets_read, by="*rows", any_dtype=True)
subsets_decode = Kernel(_subsets.subsets_decode, by="rows", any_dtype=True)
exponents_count = Kernel(_bits.exponents_count, by="x", any_dtype=True)
exponents_encode = Kernel(_bits.exponents_encode, by="x codes", any_dtype=True)
exponents_decode = Kernel(_bits.exponents_decode, by="out rest sizes stream table", any_dtype=True)

row_sums = Kernel(_exact.row_sums, by="rows")
outer_sums = Kernel(_exact.outer_sums, by="out a b")
orthonormal = Kernel(_exact.orthonormal, by="x")
inverse_fourier = Kernel(_exact.inverse_fourier, by="pairs")
