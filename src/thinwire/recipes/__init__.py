"""Recipes: one paper each, composed of memory, codec and exchange. Every call returns a new reducer."""

from thinwire.recipes.dense import dense
from thinwire.recipes.dgc import dgc
from thinwire.recipes.dragonn import dragonn
from thinwire.recipes.randomk import randomk
from thinwire.recipes.topk import topk

__all__ = ["dense", "dgc", "dragonn", "randomk", "topk"]
