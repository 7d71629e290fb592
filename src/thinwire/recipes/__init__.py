"""Recipes: one paper each, composed of memory, codec and exchange; `METHODS` lists them all, by name."""

from thinwire.recipes.catalogue import METHODS
from thinwire.recipes.dct_dp import dct_dp
from thinwire.recipes.dense import dense
from thinwire.recipes.dgc import dgc
from thinwire.recipes.dragonn import dragonn
from thinwire.recipes.fading import demo, fading, orthogonal
from thinwire.recipes.fft import fft
from thinwire.recipes.gtopk import gtopk
from thinwire.recipes.method import Method
from thinwire.recipes.mstopk import mstopk
from thinwire.recipes.powersgd import powersgd
from thinwire.recipes.qsgd import qsgd
from thinwire.recipes.randomk import randomk
from thinwire.recipes.s2_reducer import s2_reducer
from thinwire.recipes.signsgd import signsgd
from thinwire.recipes.terngrad import terngrad
from thinwire.recipes.topk import topk

__all__ = [
    "METHODS",
    "Method",
    "dct_dp",
    "demo",
    "dense",
    "dgc",
    "dragonn",
    "fading",
    "fft",
    "gtopk",
    "mstopk",
    "orthogonal",
    "powersgd",
    "qsgd",
    "randomk",
    "s2_reducer",
    "signsgd",
    "terngrad",
    "topk",
]
