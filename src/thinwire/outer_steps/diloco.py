"""DiLoCo: many inner steps, one outer step with Nesterov momentum."""

from thinwire.checked import Count, checked
from thinwire.outer_steps.base import OuterSteps


@checked
def diloco(*, every: Count = 500) -> OuterSteps:
    """Exchange every parameter's Δ, uncompressed; outer Nesterov SGD of rate 0.7 and momentum 0.9 (DiLoCo).

    Douillard et al. 2023, arXiv 2311.08105. H = 500 is read off the abstract's 500 times less communication, and was
    not checked against the paper's tables.

    Args:
        every: Inner steps from one outer step to the next.
    """
    return OuterSteps(every=every)
