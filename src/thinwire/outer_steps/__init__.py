"""Outer steps, one paper a file: workers train on their own, and exchange now and then how far they have moved."""

from thinwire.outer_steps.base import MakeOptimizer, OuterSteps
from thinwire.outer_steps.diloco import diloco
from thinwire.outer_steps.muloco import muloco
from thinwire.outer_steps.sparseloco import sparseloco
from thinwire.outer_steps.streaming_diloco import streaming_diloco

__all__ = ["MakeOptimizer", "OuterSteps", "diloco", "muloco", "sparseloco", "streaming_diloco"]
