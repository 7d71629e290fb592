"""Top-k of each chunk after an orthonormal transform."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, ClassVar, final

from thinwire.checked import Range, checked
from thinwire.codecs.base import BucketCodec, kept
from thinwire.kernels import Chunking, Transform
from thinwire.kernels.parts import Cut
from thinwire.payloads import Chunks, Narrow, Scratch
from thinwire.payloads.numbers import narrowed_each
from thinwire.schedules import Density
from thinwire.signals import Signals


@lru_cache(maxsize=1024)
def _cut(shape: tuple[int, ...], chunk: int, transform: Transform, density: Density) -> Chunking:
    return Chunking.of(shape, chunk, transform, partial(kept, density))


Chunk = Annotated[int, Range("2 to 64 rows and columns", least=2, most=64)]


@final
@checked
@dataclass(frozen=True, kw_only=True)
class ChunkTopK(BucketCodec):
    """Transform each chunk, and send its k = max(1, round(density · n)) largest of n coefficients (Peng et al. 2024).

    Ranks' coefficients are summed, and the sum is transformed back once.

    Args:
        density: The share of each chunk's coefficients to send.
        chunk: A tensor of shape (rows, …) is a matrix, cut into chunks of `chunk` × `chunk` elements, or somewhat less
            (`kernels.Chunking` says how). Vectors are cut into runs of 4 · `chunk`.
        transform: Spreads each choice over its chunk: "dct" is the orthonormal DCT-II of rows and columns, "hadamard"
            the same with Hadamard's matrix and fixed random signs. None sends single elements.
        values: How coefficients travel.
    """

    density: Density
    chunk: Chunk = 16
    transform: Transform = "dct"
    values: Narrow = None

    scratch: ClassVar[Scratch] = Scratch(value=16)  # the payload

    def encode_signals(self, signals: Signals, *, seeds: Sequence[int], cut: Cut, numel: int) -> Chunks:
        """Return the coefficients, chunk by chunk. Those of a chunk with a NaN or an infinity are not finite."""
        how = self.chunk, self.transform, self.density
        shapes = zip(signals.shapes, signals.lengths, strict=True)
        chunkings = tuple([_cut(shape or (length,), *how) for shape, length in shapes])
        positions, coefficients = signals.chunk_topk(chunkings)
        counts = [chunking.count for chunking in chunkings]
        values, coded = narrowed_each(coefficients, counts, self.values, signals.dtype, seeds, signals.share)
        return Chunks(
            positions=positions, values=values, numel=numel, chunkings=chunkings, regions=cut.regions, coded=coded
        )
