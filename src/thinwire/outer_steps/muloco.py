"""MuLoCo: Muon inside, and every value of Δ in two bits."""

from functools import partial

import torch

from thinwire.checked import Amount, Count, Fraction, Size, checked
from thinwire.codecs import Cast
from thinwire.exchanges import AllGather
from thinwire.formats import Format, Magnitudes
from thinwire.memories import ErrorFeedback
from thinwire.outer_steps.base import OuterSteps
from thinwire.recipes.dense import dense
from thinwire.reducer import Compressed, MinimumSize
from thinwire.schedules import Schedule, resolve

_TWO_BITS = Magnitudes(levels=(0.57, 1.89), group_size=512)


@checked
def muloco(
    *,
    every: Count | Schedule = 30,
    rate: Amount | Schedule = 0.7,
    momentum: Fraction = 0.6,
    values: Format = _TWO_BITS,
    minimum_size: Size = 1024,
    residual_dtype: torch.dtype | None = None,
) -> OuterSteps:
    """Send every element in 2 bits: e ← e + Δ; q = Q(e); e ← e − q (MuLoCo). Let Muon take the inner steps.

    Thérien et al. 2025, arXiv 2505.23725. The outer optimizer is SGD with Nesterov's momentum. H, its rate and its
    momentum are the defaults of the authors' code. The paper quantises otherwise; these levels are those of least error
    for a normal distribution.

    Args:
        every: Inner steps from one outer step to the next, or a schedule of them by outer step.
        rate: The outer learning rate, or a schedule of it by outer step.
        momentum: The outer momentum.
        values: How values travel.
        minimum_size: Tensors with fewer elements are sent uncompressed.
        residual_dtype: torch.bfloat16 takes 4 bytes a parameter less; see `memories.ErrorFeedback`.
    """
    large = Compressed(memory=ErrorFeedback(dtype=residual_dtype), codec=Cast(values=values), exchange=AllGather())
    return OuterSteps(
        every=every,
        recipe=MinimumSize(minimum_size=minimum_size, small=dense(), large=large),
        make_optimizer=partial(torch.optim.SGD, lr=resolve(rate, 0), momentum=momentum, nesterov=momentum > 0),
        rate=rate if isinstance(rate, Schedule) else None,
    )
