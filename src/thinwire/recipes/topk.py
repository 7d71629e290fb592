"""Exact Top-k with error feedback."""

from thinwire.checked import Size, checked
from thinwire.codecs import SampledThreshold, TopK
from thinwire.exchanges import AllGather, Exchange
from thinwire.memories import ErrorFeedback
from thinwire.recipes.method import RecipeFactory
from thinwire.reducer import Compressed, MinimumSize, Reducer
from thinwire.schedules import Density


@checked
def topk(*, density: Density = 0.01, sampled: bool = False, minimum_size: Size = 1024) -> Reducer:
    """Send the largest elements of each tensor, with error feedback (Sparsified SGD with Memory, Stich et al. 2018).

    Args:
        density: The share of elements to send.
        sampled: Whether to select by a sampled threshold, as Deep Gradient Compression does (Lin et al. 2018): faster,
            and nearly always the largest.
        minimum_size: Tensors with fewer elements are sent uncompressed.
    """
    return topk_over(AllGather())(density=density, sampled=sampled, minimum_size=minimum_size)


@checked
def topk_over(exchange: Exchange) -> RecipeFactory:
    """Return a recipe as `topk` with another exchange."""

    @checked
    def recipe(*, density: Density = 0.01, sampled: bool = False, minimum_size: Size = 1024) -> Reducer:
        codec = (SampledThreshold if sampled else TopK)(density=density)
        large = Compressed(memory=ErrorFeedback(), codec=codec, exchange=exchange)
        return MinimumSize(minimum_size=minimum_size, large=large)

    return recipe
