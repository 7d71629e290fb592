"""Does compression pay here? Measure, decide, predict, and say why."""

from thinwire.planner.candidates import DENSE, NAMES, Budget, Candidate, candidate
from thinwire.planner.decide import break_even, decide, fastest
from thinwire.planner.plan import Plan, Row, Why
from thinwire.planner.profile import Bucket, Cost, Curve, Gradient, Profile, Timeline
from thinwire.planner.timeline import step_seconds

__all__ = [
    "DENSE",
    "NAMES",
    "Bucket",
    "Budget",
    "Candidate",
    "Cost",
    "Curve",
    "Gradient",
    "Plan",
    "Profile",
    "Row",
    "Timeline",
    "Why",
    "break_even",
    "candidate",
    "decide",
    "fastest",
    "step_seconds",
]
