"""Plans for a split model: does a boundary pay at each cut? DRAGONN's rule, T_comp < T_full − T_spr, decides."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple, Self, final

from thinwire.checked import Count, Range, Seconds, Size, checked
from thinwire.exchanges import Link
from thinwire.planner.plan import Plan
from thinwire.planner.reasons import ms
from thinwire_lab.plan.words import bit_rate

AS_IT_IS = "as it is"
ActivationShare = Annotated[float, Range("a share of activations, above 0 and below 1", above=0, below=1)]
_WAYS = 2  # activations there, their gradients back
_FOREVER = 1e12  # seconds


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Cut:
    """What was measured between `stage` and the next one, for a micro-batch.

    Args:
        stage: The one before the cut.
        dense_bytes, nbytes: What crosses in each direction, unchanged and sparsified.
        codec: Seconds both ends spend on sparsifying, both directions together.
        link: Between the two stages.

    Raises:
        ValueError: For impossible numbers, and for a link without bandwidth.
    """

    stage: Size
    dense_bytes: Size
    nbytes: Size
    codec: Seconds
    link: Link

    def __post_init__(self) -> None:
        if not self.link.seconds(max(self.dense_bytes, self.nbytes, 1)) < _FOREVER:
            raise ValueError(f"the link behind stage {self.stage} carries nothing: {self.link}; expected a bandwidth")

    @property
    def gain(self) -> float:
        """Seconds that sparsifying saves per micro-batch; negative where it costs time."""
        return _WAYS * (self.dense_bytes - self.nbytes) / self.link.bandwidth - self.codec

    @property
    def break_even(self) -> float:
        """Bandwidth in bytes per second above which sparsifying costs time; 0 if it never pays, infinite if always."""
        fewer = max(0, self.dense_bytes - self.nbytes)
        return _WAYS * fewer / self.codec if self.codec else math.inf if fewer else 0.0


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Crossings:
    """What was measured at every cut of a pipeline.

    Args:
        density: To which the crossings were sparsified.
        micro_batches: Of a step.
        cuts: Between each stage and the next.
        values: How values travelled.
    """

    density: ActivationShare
    micro_batches: Count
    cuts: Sequence[Cut]
    values: str = "bf16"

    @property
    def name(self) -> str:
        """What a plan calls sparsifying, such as "top 5 % in bf16"."""
        return f"top {100 * self.density:.3g} % in {self.values}"

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Self:
        """Return them from what `dataclasses.asdict` made of them."""
        return cls(**{**found, "cuts": tuple(Cut(**{**cut, "link": Link(**cut["link"])}) for cut in found["cuts"])})


class BoundaryRow(NamedTuple):
    """One cut: what is chosen, the seconds it saves in a step, the cut's `break_even`, and why."""

    cut: Cut
    choice: str
    saves: float
    break_even: float
    reason: str

    @property
    def pays(self) -> bool:
        """Whether it is sparsified."""
        return self.choice != AS_IT_IS

    def document(self) -> dict[str, Any]:
        """Return it for JSON, an infinite break-even as None."""
        break_even = self.break_even if self.break_even < math.inf else None
        return self._asdict() | {"cut": asdict(self.cut), "break_even": break_even}


class PipelinePlan(NamedTuple):
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

    def document(self) -> dict[str, Any]:
        """Return all of it for JSON, each stage's plan as `Plan.to_json` has it."""
        pays = any(row.pays for row in self.boundaries) or any(plan.pays for plan in self.stages)
        found = {"schema": "thinwire.pipeline-plan/1", "verdict": self.verdict, "pays": pays}
        found |= {name: getattr(self.crossings, name) for name in ("density", "values", "micro_batches")}
        found |= {"boundaries": [row.document() for row in self.boundaries]}
        return found | {"stages": [json.loads(plan.to_json()) for plan in self.stages]}


def decide_boundaries(crossings: Crossings) -> list[BoundaryRow]:
    """Return a row for each cut, sparsified where computing takes less time than the link saves."""
    rows = []
    for cut in crossings.cuts:
        pays, reason = cut.gain > 0, f"{_reason(cut, crossings.name)}; {_up_to(cut.break_even)}"
        choice, saves = (crossings.name, crossings.micro_batches * cut.gain) if pays else (AS_IT_IS, 0.0)
        rows.append(BoundaryRow(cut, choice, saves, cut.break_even, reason))
    return rows


def _reason(cut: Cut, name: str) -> str:
    """Give the value of each term of the rule."""
    full, sparse = (ms(_WAYS * cut.link.seconds(nbytes)) for nbytes in (cut.dense_bytes, cut.nbytes))
    if not cut.dense_bytes:
        return "nothing crosses here"
    if cut.nbytes >= cut.dense_bytes:
        return f"{name} takes no fewer bytes"
    if cut.gain > 0:
        return f"the round trip takes {sparse} instead of {full}; encoding and decoding take {ms(cut.codec)}"
    return f"the round trip takes {full}; {name} takes {sparse}, and {ms(cut.codec)} to compute"


def _up_to(break_even: float) -> str:
    """Say up to which bandwidth sparsifying pays."""
    if math.isinf(break_even):
        return "pays at any bandwidth"
    return f"pays below {bit_rate(break_even)} here" if break_even else "never pays here, however slow the link"
