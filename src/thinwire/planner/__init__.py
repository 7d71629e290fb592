"""Does compression pay here? Measure, decide, predict, and say why."""

from thinwire.planner.boundaries import BoundaryRow, Crossings, Cut, PipelinePlan, decide_boundaries
from thinwire.planner.candidates import DENSE, NAMES, Budget, Candidate, candidate
from thinwire.planner.decide import break_even, decide, minimum_ratio
from thinwire.planner.plan import Plan, Row, Why
from thinwire.planner.profile import Bucket, Cost, Curve, Gradient, Profile, Timeline
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
    "Why",
    "break_even",
    "candidate",
    "decide",
    "decide_boundaries",
    "fastest",
    "minimum_ratio",
    "spans",
    "step_seconds",
]
