"""DiLoCo: many inner steps, one outer step with Nesterov momentum. Fragments may stream while training goes on."""

from functools import partial

import torch

from thinwire.checked import Count, Fraction, Size, checked
from thinwire.codecs import Cast
from thinwire.exchanges import AllGather
from thinwire.formats import OffsetFloat
from thinwire.memories import Memory, NoMemory
from thinwire.outer_steps.base import OuterSteps
from thinwire.reducer import Compressed


@checked
def diloco(*, every: Count = 500) -> OuterSteps:
    """Exchange every parameter's Δ, uncompressed; outer Nesterov SGD of rate 0.7 and momentum 0.9 (DiLoCo).

    Douillard et al. 2023, arXiv 2311.08105. H = 500 is read off the abstract's 500 times less communication, and was
    not checked against the paper's tables.

    Args:
        every: Inner steps from one outer step to the next.
    """
    return OuterSteps(every=every)


_E3M0 = OffsetFloat.balanced(bits=4, mantissa=0, rounding="nearest", group_size=256)


@checked
def streaming_diloco(
    *,
    every: Count = 100,
    fragments: Count | tuple[tuple[str, ...], ...] = 4,
    delay: Size = 5,
    mixing: Fraction = 0.5,
    memory: Memory | None = None,
) -> OuterSteps:
    """Exchange a fragment's Δ in floats of 4 bits, and merge what arrives some steps later (Streaming DiLoCo).

    Douillard et al. 2025, arXiv 2501.18512. The outer optimizer is SGD with Nesterov's momentum of 0.9 and a learning
    rate of 0.4. 256 values share a scale. H = 100, the rate of 0.4, the delay of 5 and α = 0.5 are from memory: nothing
    here confirms them, so look them up before you compare with the paper.

    Args:
        every: See `OuterSteps`.
        fragments: See `OuterSteps`. The paper's fragments have 3 layers each, spaced evenly through the model; to get
            those, name them.
        delay: See `OuterSteps`.
        mixing: See `OuterSteps`.
        memory: Keeps what 4 bits lose, such as `memories.ErrorFeedback()`. The paper keeps nothing.
    """
    return OuterSteps(
        every=every,
        recipe=Compressed(memory=memory or NoMemory(), codec=Cast(values=_E3M0), exchange=AllGather()),
        make_optimizer=partial(torch.optim.SGD, lr=0.4, momentum=0.9, nesterov=True),
        fragments=fragments,
        delay=delay,
        mixing=mixing,
    )
