"""Every value of Δ in two bits: all of them (MuLoCo), or the largest of the residual (SparseLoCo)."""

from functools import partial

import torch

from thinwire.checked import Amount, Count, Fraction, Part, Size, checked
from thinwire.codecs import Cast, ChunkTopK
from thinwire.exchanges import AllGather
from thinwire.formats import Format, Magnitudes
from thinwire.memories import ErrorFeedback
from thinwire.outer_steps.base import OuterSteps
from thinwire.payloads import Narrow
from thinwire.recipes.dense import dense
from thinwire.reducer import Compressed, MinimumSize
from thinwire.schedules import Density, Schedule, resolve

_ALL, _LARGEST = Magnitudes(levels=(0.57, 1.89), group_size=512), Magnitudes()


@checked
def muloco(
    *,
    every: Count | Schedule = 30,
    rate: Amount | Schedule = 0.7,
    momentum: Fraction = 0.6,
    values: Format = _ALL,
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


@checked
def sparseloco(
    *,
    every: Count | Schedule = 30,
    density: Density = 64 / 4096,
    decay: Part = 0.95,
    rate: Amount | Schedule = 1.0,
    values: Narrow = _LARGEST,
    minimum_size: Size = 1024,
    residual_dtype: torch.dtype | None = None,
) -> OuterSteps:
    """Send 64 of each 64 × 64 elements, in 2 bits: e ← decay · e + Δ; q = Q(Top-k(e)); e ← e − q (SparseLoCo).

    Sarfi et al. 2025, arXiv 2508.15706. These are the settings of one production run. The outer optimizer is SGD
    without momentum: global ← global − rate · mean of q.

    Args:
        every: Inner steps from one outer step to the next, or a schedule of them by outer step; the abstract has 15 to
            250.
        density: The share of elements to send, or a schedule of it by outer step; the abstract gives 1 to 3 %.
        decay: Decay of the residual.
        rate: The outer learning rate, or a schedule of it by outer step. In that run it fell from 1.0 to 0.4 in steps,
            as `schedules.Stages(values=(1.0, 0.8, 0.6), steps_each=2000, final=0.4)` does.
        values: How values travel.
        minimum_size: Tensors with fewer elements are sent uncompressed.
        residual_dtype: torch.bfloat16 takes 4 bytes a parameter less; see `memories.ErrorFeedback`.
    """
    codec = ChunkTopK(density=density, chunk=64, transform=None, values=values)
    large = Compressed(memory=ErrorFeedback(decay=decay, dtype=residual_dtype), codec=codec, exchange=AllGather())
    return OuterSteps(
        every=every,
        recipe=MinimumSize(minimum_size=minimum_size, small=dense(), large=large),
        make_optimizer=partial(torch.optim.SGD, lr=resolve(rate, 0)),
        rate=rate if isinstance(rate, Schedule) else None,
    )
