"""`"auto"`: a plan is made, checked against uncompressed steps, and made anew when the link changes.

`policy` says when to do what, and lets measured steps decide. `adaptive` is the reducer that does it.
`Adaptive.history` lists every decision with its reason.
"""

from thinwire.planner.live.adaptive import Adaptive, Decision

__all__ = ["Adaptive", "Decision"]
