"""A plan that is made, verified and kept up to date while a model trains."""

from thinwire.planner.live.adaptive import Adaptive, Decision

__all__ = ["Adaptive", "Decision"]
