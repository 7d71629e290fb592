"""A plan for a model that is split into stages."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from thinwire.planner.boundaries import BoundaryRow, Crossings
from thinwire.planner.plan import Plan


@final
@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """A plan for the gradients of each stage's replicas, and what to do at each cut."""

    stages: Sequence[Plan]
    crossings: Crossings
    boundaries: Sequence[BoundaryRow]

    @property
    def verdict(self) -> str:
        """What to do at the cuts, in a sentence."""
        paying = [row for row in self.boundaries if row.pays]
        if not paying:
            return "sparsifying pays at no cut"
        saved = 1e3 * sum(row.saves for row in paying)
        where = f"{len(paying)} of {len(self.boundaries)} cuts"
        return f"{self.crossings.name} at {where} saves up to {saved:.1f} ms a step"

    def to_json(self) -> str:
        """Return all of it as JSON, each stage's plan as `Plan.to_json` has it."""
        whole = {"schema": "thinwire.pipeline-plan/1", "verdict": self.verdict, "pays": self._pays()}
        whole |= {name: getattr(self.crossings, name) for name in ("density", "values", "micro_batches")}
        whole |= {"boundaries": [row.document() for row in self.boundaries]}
        return json.dumps(whole | {"stages": [json.loads(plan.to_json()) for plan in self.stages]}, indent=1)

    def _pays(self) -> bool:
        return any(row.pays for row in self.boundaries) or any(plan.pays for plan in self.stages)
