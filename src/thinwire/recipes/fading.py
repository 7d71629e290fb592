"""Momentum in the memory, spread before it is chosen: DeMo (Peng et al. 2024), and two of ours, of one bit a value."""

from thinwire.checked import Fraction, Positive, Size, checked
from thinwire.codecs import ChunkTopK
from thinwire.codecs.chunk_topk import Chunk
from thinwire.exchanges import AllGather
from thinwire.formats import Sign
from thinwire.kernels import Transform
from thinwire.memories import FadingMomentum, OrthogonalMomentum
from thinwire.payloads import Narrow
from thinwire.recipes.dense import dense
from thinwire.reducer import Compressed, MinimumSize, Reducer
from thinwire.schedules import Density

_ONE_BIT = Sign()


@checked
def fading(
    *,
    density: Density = 6 / 256,
    decay: Fraction | None = 0.95,
    chunk: Chunk = 16,
    transform: Transform = "dct",
    values: Narrow = _ONE_BIT,
    clip_norm: Positive | None = None,
    minimum_size: Size = 1024,
) -> Reducer:
    """Send the largest `density` share of each chunk of the momentum, after a transform: one bit each, and its place.

    For AdamW, with β₂ = 0.9: attach with `optimizer=`. The momentum moves out of the optimizer into the memory, where
    `decay` takes its place (None: the optimizer's own). The optimizer's second moment normalises what arrives. If you
    clip gradients, set `clip_norm`, which clips each worker's gradients, per tensor, before they enter the residual;
    clipping the mean is too late. Tensors below `minimum_size` elements go uncompressed, and the optimizer keeps their
    momentum.
    """
    codec = ChunkTopK(density=density, chunk=chunk, transform=transform, values=values)
    large = Compressed(memory=FadingMomentum(decay=decay, clip_norm=clip_norm), codec=codec, exchange=AllGather())
    return MinimumSize(minimum_size=minimum_size, small=dense(), large=large)


@checked
def demo(
    *,
    density: Density = 32 / 4096,
    decay: Fraction | None = 0.999,
    chunk: Chunk = 64,
    values: Narrow = None,
    clip_norm: Positive | None = None,
    minimum_size: Size = 1024,
) -> Reducer:
    """Send the largest coefficients of each chunk of 64 × 64 elements, as DeMo does.

    Its update is the sign of what arrives: attach with `optimizer=` and give AdamW betas (β₁, 0).
    """
    return fading(
        density=density, decay=decay, chunk=chunk, values=values, clip_norm=clip_norm, minimum_size=minimum_size
    )


@checked
def orthogonal(
    *,
    density: Density = 6 / 256,
    decay: Fraction = 0.95,
    momentum: Fraction | None = None,
    chunk: Chunk = 16,
    transform: Transform = "dct",
    values: Narrow = _ONE_BIT,
    minimum_size: Size = 1024,
) -> Reducer:
    """Orthogonalise momentum on each rank, as Muon does; what is not sent decays. Else as `fading`.

    For AdamW with betas (0.9, 0.9): attach with `optimizer=`. Its β₁ moves into the memory (`momentum`, if that is
    given), and its second moment normalises what arrives. `decay` is the residual's. A rank's momentum is multiplied
    with itself 15 times a step, as in Muon, and takes four float32 an element. Tensors below `minimum_size` elements go
    uncompressed, and the optimizer keeps their momentum. All ranks count equally: a weight on a rank's loss has no
    effect, unless it is 0.
    """
    memory = OrthogonalMomentum(momentum=momentum, decay=decay)
    codec = ChunkTopK(density=density, chunk=chunk, transform=transform, values=values)
    large = Compressed(memory=memory, codec=codec, exchange=AllGather())
    return MinimumSize(minimum_size=minimum_size, small=dense(), large=large)
