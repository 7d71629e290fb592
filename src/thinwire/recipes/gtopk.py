"""gTop-k: the global Top-k, found on the way up a tree."""

from thinwire.checked import Size, checked
from thinwire.exchanges import GlobalTopKTree
from thinwire.exchanges.tree import Merge
from thinwire.recipes.topk import topk_over
from thinwire.reducer import Reducer
from thinwire.schedules import Density


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
