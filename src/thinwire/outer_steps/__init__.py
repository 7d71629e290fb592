"""Outer steps: workers train on their own, and every so many steps exchange how far they have moved.

One paper a file. `OuterSteps` puts other parts together.
"""

from thinwire.outer_steps.base import OptimizerFactory, OuterSteps
from thinwire.outer_steps.diloco import diloco
from thinwire.outer_steps.sparseloco import sparseloco
from thinwire.outer_steps.streaming_diloco import streaming_diloco

__all__ = ["OptimizerFactory", "OuterSteps", "diloco", "sparseloco", "streaming_diloco"]
