"""Momentum in the memory, spread before it is chosen: DeMo (Peng et al. 2024), and two of ours, of one bit a value."""

from thinwire.checked import Fraction, Positive, Size, checked
from thinwire.codecs import ChunkTopK
from thinwire.codecs.chunk_topk import Chunk
from thinwire.formats import Sign
from thinwire.kernels import Transform
from thinwire.memories import FadingMomentum, OrthogonalMomentum
from thinwire.payloads import Narrow
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
    """Send the largest coefficients of each chunk of the momentum: one bit each, and its place.

    For AdamW, with β₂ = 0.9: attach with `optimizer=`. The momentum moves out of the optimizer into the memory; the
    optimizer's second moment normalises what arrives.

    Args:
        density: The share of a chunk's coefficients to send.
        decay: Decay of the momentum; None uses the optimizer's.
        chunk: Chunks of a matrix have `chunk` × `chunk` elements (see `codecs.ChunkTopK`).
        transform: The transform that is applied to each chunk before coefficients are chosen.
        values: How coefficients travel.
        clip_norm: If you clip gradients, set this: it clips each worker's, per tensor, before they enter the residual.
            Clipping the mean is too late.
        minimum_size: Tensors with fewer elements are sent uncompressed, and the optimizer keeps their momentum.

    Example:
        >>> model = DistributedDataParallel(nn.Linear(64, 64))
        >>> adamw = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.9))
        >>> handle = tw.attach(model, tw.recipes.fading(), optimizer=adamw)
    """
    codec = ChunkTopK(density=density, chunk=chunk, transform=transform, values=values)
    large = Compressed(memory=FadingMomentum(decay=decay, clip_norm=clip_norm), codec=codec)
    return MinimumSize(minimum_size=minimum_size, large=large)


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
    """Send the largest coefficients of each chunk of 64 × 64 elements (DeMo, Peng et al. 2024).

    Its update is the sign of what arrives: attach with `optimizer=` and give AdamW betas (β₁, 0).

    Args:
        density: As in `fading`.
        decay: As in `fading`.
        chunk: As in `fading`.
        values: As in `fading`.
        clip_norm: As in `fading`.
        minimum_size: As in `fading`.
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
    """Orthogonalise momentum on each rank, as Muon does (Jordan et al. 2024), and send it as `fading` does.

    For AdamW with betas (0.9, 0.9): attach with `optimizer=`. Each step takes 15 matrix products of a rank's momentum,
    and memory for four float32 per element. All ranks count equally: a weight on a rank's loss has no effect, unless it
    is 0. Other arguments are those of `fading`.

    Args:
        density: As in `fading`.
        decay: Decay of the residual, once a step.
        momentum: The memory's momentum; None uses the optimizer's β₁.
        chunk: As in `fading`.
        transform: As in `fading`.
        values: As in `fading`.
        minimum_size: As in `fading`.
    """
    memory = OrthogonalMomentum(momentum=momentum, decay=decay)
    codec = ChunkTopK(density=density, chunk=chunk, transform=transform, values=values)
    large = Compressed(memory=memory, codec=codec)
    return MinimumSize(minimum_size=minimum_size, large=large)
