"""Outer steps: workers train on their own, and exchange now and then how far they have moved."""

from thinwire.outer_steps.base import MakeOptimizer, OuterSteps
from thinwire.outer_steps.diloco import diloco, streaming_diloco
from thinwire.outer_steps.two_bits import muloco, sparseloco

__all__ = ["MakeOptimizer", "OuterSteps", "diloco", "muloco", "sparseloco", "streaming_diloco"]
