"""Does compression pay here? Measure, decide, predict, and say why."""

from thinwire.planner.boundaries import BoundaryRow, Crossings, Cut, decide_boundaries
from thinwire.planner.candidates import DENSE, NAMES, Budget, Candidate, candidate, renamed
from thinwire.planner.curve import Curve
from thinwire.planner.decide import break_even, decide
from thinwire.planner.pipeline_plan import PipelinePlan
from thinwire.planner.plan import Plan, Row
from thinwire.planner.profile import Bucket, Cost, Gradient, Profile, Timeline
from thinwire.planner.ratio import minimum_ratio
from thinwire.planner.search import fastest
from thinwire.planner.timeline import Span, spans, step_seconds

__all__ = [
    "DENSE",
    "NAMES",
    "BoundaryRow",
    "Bucket",
    "Budget",
    "Candidate",
    "Cost",
    "Crossings",
    "Curve",
    "Cut",
    "Gradient",
    "PipelinePlan",
    "Plan",
    "Profile",
    "Row",
    "Span",
    "Timeline",
    "break_even",
    "candidate",
    "decide",
    "decide_boundaries",
    "fastest",
    "minimum_ratio",
    "renamed",
    "spans",
    "step_seconds",
]
