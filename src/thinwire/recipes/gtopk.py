"""gTop-k (Shi et al. 2019): the global Top-k, found on the way up a tree.

Its equations, where each part of it is, and its claims: papers/gtopk/README.md.
"""

from thinwire.checked import Size, checked
from thinwire.codecs import TopK
from thinwire.exchanges import GlobalTopKTree
from thinwire.exchanges.tree import Merge
from thinwire.memories import ErrorFeedback
from thinwire.recipes.dense import dense
from thinwire.reducer import Compressed, MinimumSize, Reducer
from thinwire.schedules import Density


@checked
def gtopk(
    *,
    density: Density = 0.001,
    merge: Merge = "exact",
    exact_values: bool = False,
    minimum_size: Size = 1024,
) -> Reducer:
    """Send each worker's largest `density` share up a tree that keeps the largest sums. All get the same k elements.

    The paper takes k over the whole model and warms the density up (`schedules.gtopk_warmup`). Here each tensor has its
    own k. For `merge` and `exact_values` see GlobalTopKTree. Tensors below `minimum_size` elements go uncompressed.
    """
    exchange = GlobalTopKTree(merge=merge, exact_values=exact_values)
    large = Compressed(memory=ErrorFeedback(), codec=TopK(density=density), exchange=exchange)
    return MinimumSize(minimum_size=minimum_size, small=dense(), large=large)
