"""Every method, declared once. The bench, the planner, the tests and the tables all read it here."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import torch

from thinwire.codecs import Cast
from thinwire.exchanges import AllReduce, OwnerSharded, RecursiveDoubling
from thinwire.memories import NoMemory
from thinwire.recipes.dct_dp import dct_dp
from thinwire.recipes.dense import dense
from thinwire.recipes.dgc import dgc
from thinwire.recipes.dragonn import dragonn
from thinwire.recipes.fading import demo, fading, orthogonal
from thinwire.recipes.fft import fft
from thinwire.recipes.gtopk import gtopk
from thinwire.recipes.method import Method, RecipeFactory
from thinwire.recipes.mstopk import mstopk
from thinwire.recipes.powersgd import powersgd
from thinwire.recipes.qsgd import qsgd
from thinwire.recipes.randomk import randomk
from thinwire.recipes.s2_reducer import s2_reducer
from thinwire.recipes.signsgd import signsgd
from thinwire.recipes.terngrad import terngrad
from thinwire.recipes.topk import topk, topk_over
from thinwire.reducer import Compressed


def _narrow(dtype: torch.dtype) -> RecipeFactory:
    return lambda: Compressed(memory=NoMemory(), codec=Cast(values=dtype), exchange=AllReduce())


_STICH = "Sparsified SGD with Memory (Stich et al. 2018)"
_GTOPK = "gTop-k (Shi et al. 2019)"
_SPARCML = "SparCML (Renggli et al. 2019)"
_QSGD = "QSGD (Alistarh et al. 2017)"
_S2 = "S2 Reducer (Ge et al. 2021)"
_DCT = "Dynamic Communication Thresholding (Gupta et al. 2021)"

_ROWS = (
    Method(
        name="dense",
        recipe=dense,
        summary="no compression: what plain DDP does",
        sends="every value",
        benched=False,
        planned=True,
    ),
    Method(
        name="bf16",
        recipe=_narrow(torch.bfloat16),
        summary="bfloat16 on the wire",
        sends="every value in 16 bits",
        conserving=False,
        planned=True,
    ),
    Method(
        name="fp16",
        recipe=_narrow(torch.float16),
        summary="float16 on the wire: finer than bf16, overflows beyond 65504",
        sends="every value in 16 bits",
        conserving=False,
        benched=False,
        planned=True,
    ),
    Method(
        name="topk",
        recipe=topk,
        summary="exact Top-k with error feedback",
        sends="the largest elements of each tensor",
        paper=_STICH,
        planned=True,
    ),
    Method(
        name="dgc",
        recipe=dgc,
        summary="Deep Gradient Compression: sampled threshold, momentum correction, density warm-up",
        sends="the largest elements of each tensor, momentum-corrected",
        paper="Deep Gradient Compression (Lin et al. 2018)",
        warms_up=True,
    ),
    Method(
        name="dragonn",
        recipe=dragonn,
        summary="DRAGONN: hashed slots, momentum correction, density warm-up",
        sends="large elements of each tensor at hashed places, momentum-corrected",
        paper="DRAGONN (Wang et al. 2022)",
        warms_up=True,
    ),
    Method(
        name="fading",
        recipe=fading,
        summary="decaying momentum, the largest DCT coefficients of each chunk, one bit a value; for AdamW",
        sends="the largest coefficients of each chunk of the momentum, in one bit",
        share_of="frequencies",
        conserving=False,
        planned=True,
    ),
    Method(
        name="orthogonal",
        recipe=orthogonal,
        summary="momentum orthogonalised on each worker as in Muon, then as fading; for AdamW",
        sends="the largest coefficients of each chunk of the orthogonalised momentum, in one bit",
        share_of="frequencies",
        conserving=False,
        planned=True,
    ),
    Method(
        name="demo",
        recipe=demo,
        summary="DeMo: the same in chunks of 64 x 64, with full values and a slow decay",
        sends="the largest coefficients of each chunk of the momentum",
        share_of="frequencies",
        paper="DeMo (Peng et al. 2024)",
        conserving=False,
    ),
    Method(
        name="randomk",
        recipe=randomk,
        summary="Random-k with error feedback, summed during the exchange",
        sends="elements drawn at random, the same on all ranks",
        paper=_STICH,
    ),
    Method(
        name="gtopk",
        recipe=gtopk,
        summary="gTop-k: the global Top-k up and down a tree, with error feedback",
        sends="the largest elements, of which a tree keeps the largest sums",
        paper=_GTOPK,
        planned=True,
    ),
    Method(
        name="doubling",
        recipe=topk_over(RecursiveDoubling()),
        summary="exact Top-k, summed by sparse recursive doubling",
        sends="what topk picks, then what 2, 4, … ranks picked together",
        paper=_SPARCML,
        benched=False,
        planned=True,
    ),
    Method(
        name="owner",
        recipe=topk_over(OwnerSharded()),
        summary="exact Top-k, every index summed by the rank that owns it",
        sends="what topk picks, each element to the rank that owns its index; then the sums",
        benched=False,
        planned=True,
    ),
    Method(
        name="s2_reducer",
        recipe=s2_reducer,
        summary="S2 Reducer: block Top-k, a bitmap and a count sketch, summed during the exchange",
        sends="a bitmap of the blocks of largest norm, and a count sketch of their union",
        paper=_S2,
        share_of="blocks",
        conserving=False,
        planned=True,
    ),
    Method(
        name="s2_union",
        recipe=partial(s2_reducer, packed=None),
        summary="the same blocks without the sketch: the union's values, summed exactly",
        sends="a bitmap of the blocks of largest norm, and the values of their union",
        paper=_S2,
        share_of="blocks",
        planned=True,
    ),
    Method(
        name="fft",
        recipe=fft,
        summary="FFT sparsification with a 10-bit offset float, without a residual, as in the paper",
        sends="the largest frequencies of each tensor, in 10 bits",
        paper="FFT-based gradient sparsification (Wang et al. 2020)",
        share_of="frequencies",
        conserving=False,
    ),
    Method(
        name="dct_dp",
        recipe=dct_dp,
        summary="a threshold per tensor kept for 1,000 steps, with error feedback",
        sends="what reaches a threshold, which is measured every 1,000 steps",
        paper=_DCT,
    ),
    Method(
        name="dct_steered",
        recipe=partial(dct_dp, life=None),
        summary="the same with a threshold steered to the density",
        sends="what reaches a threshold that follows the density",
        paper=_DCT,
    ),
    Method(
        name="mstopk",
        recipe=mstopk,
        summary="Top-k by bisection of a threshold, with error feedback",
        sends="nearly the largest elements of each tensor",
        paper="MSTopK (Shi et al. 2021)",
    ),
    Method(
        name="qsgd",
        recipe=qsgd,
        summary="QSGD: 4 bits per value, stochastic",
        sends="every value in 4 bits, and the largest magnitude of every 512",
        paper=_QSGD,
        conserving=False,
        planned=True,
    ),
    Method(
        name="qsgd_l2",
        recipe=partial(qsgd, norm="l2"),
        summary="QSGD as its paper analyses it, scaled by the l2 norm",
        sends="every value in 4 bits, and the l2 norm of every 512",
        paper=_QSGD,
        conserving=False,
        benched=False,
        planned=True,
    ),
    Method(
        name="terngrad",
        recipe=terngrad,
        summary="TernGrad: 2 bits per value, clipped at 2.5 sigma",
        sends="every value in 2 bits",
        paper="TernGrad (Wen et al. 2017)",
        conserving=False,
        planned=True,
    ),
    Method(
        name="signsgd",
        recipe=signsgd,
        summary="1 bit per value, with error feedback",
        sends="every sign, and the mean magnitude of every 512 values",
        paper="Error Feedback Fixes SignSGD (Karimireddy et al. 2019)",
    ),
    Method(
        name="powersgd",
        recipe=powersgd,
        summary="PowerSGD of thinwire, rank 4, in DDP's buckets",
        sends="two thin factors of each matrix",
        paper="PowerSGD (Vogels et al. 2019)",
    ),
)


METHODS: Mapping[str, Method] = MappingProxyType({row.name: row for row in _ROWS})
"""Every method by name: ``for method in METHODS.values(): print(method.name, method.sends)``."""
