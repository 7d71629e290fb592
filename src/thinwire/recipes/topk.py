"""The largest elements, exactly or nearly, and random ones, with error feedback."""

from thinwire.checked import Count, Size, checked
from thinwire.codecs import MSTopK, RandomK, SampledThreshold, TopK
from thinwire.exchanges import AllGather, AllReduce, Exchange, GlobalTopKTree
from thinwire.exchanges.tree import Merge
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


@checked
def gtopk(
    *,
    density: Density = 0.001,
    merge: Merge = "exact",
    exact_values: bool = False,
    sampled: bool = False,
    minimum_size: Size = 1024,
) -> Reducer:
    """Send each worker's largest elements up a tree that keeps the largest sums (gTop-k, Shi et al. 2019).

    All ranks get the same k elements. The paper takes k over the whole model; here each tensor has its own k. See
    papers/gtopk/README.md for the equations, the code and the paper's claims.

    Args:
        density: k divided by the number of elements. The paper warms it up: `schedules.gtopk_warmup`.
        merge: See `exchanges.GlobalTopKTree`.
        exact_values: See `exchanges.GlobalTopKTree`.
        sampled: As in `topk`.
        minimum_size: Tensors with fewer elements are sent uncompressed.
    """
    exchange = GlobalTopKTree(merge=merge, exact_values=exact_values)
    return topk_over(exchange)(density=density, sampled=sampled, minimum_size=minimum_size)


@checked
def mstopk(*, density: Density = 0.01, rounds: Count = 25, minimum_size: Size = 1024) -> Reducer:
    """Send nearly the largest elements of each tensor, with error feedback (MSTopK, Shi et al. 2021).

    Args:
        density: The share of elements to send.
        rounds: Bisections of the threshold.
        minimum_size: Tensors with fewer elements are sent uncompressed.
    """
    large = Compressed(memory=ErrorFeedback(), codec=MSTopK(density=density, rounds=rounds))
    return MinimumSize(minimum_size=minimum_size, large=large)


@checked
def randomk(*, density: Density = 0.01, minimum_size: Size = 1024) -> Reducer:
    """Send random elements of each tensor, new ones in each step, with error feedback (Stich et al. 2018).

    Args:
        density: The share of elements to send.
        minimum_size: Tensors with fewer elements are sent uncompressed.
    """
    large = Compressed(memory=ErrorFeedback(), codec=RandomK(density=density), exchange=AllReduce())
    return MinimumSize(minimum_size=minimum_size, large=large)
