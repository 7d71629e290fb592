"""Plans for a split model: does a boundary pay at each cut? DRAGONN's rule, T_comp < T_full − T_spr, decides."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Self, final

from thinwire.checked import Bandwidth, Count, Number, Range, Seconds, Size, checked
from thinwire.exchanges import Link
from thinwire.planner.plan import Plan
from thinwire.planner.reasons import ms

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
    def full(self) -> float:
        """Seconds on the link, both directions, unchanged."""
        return _WAYS * self.link.seconds(self.dense_bytes)

    @property
    def sparse(self) -> float:
        """Seconds on the link, both directions, sparsified."""
        return _WAYS * self.link.seconds(self.nbytes)

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


@final
@checked
@dataclass(frozen=True, kw_only=True)
class BoundaryRow:
    """One cut: what is chosen, the seconds it saves in a step, the cut's `break_even`, and why."""

    cut: Cut
    choice: str
    saves: Number
    break_even: Bandwidth
    reason: str

    @property
    def pays(self) -> bool:
        """Whether it is sparsified."""
        return self.choice != AS_IT_IS

    def document(self) -> dict[str, Any]:
        """Return it for JSON, an infinite break-even as None."""
        return asdict(self) | {"break_even": self.break_even if self.break_even < math.inf else None}


@final
@checked
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
        pays = any(row.pays for row in self.boundaries) or any(plan.pays for plan in self.stages)
        whole = {"schema": "thinwire.pipeline-plan/1", "verdict": self.verdict, "pays": pays}
        whole |= {name: getattr(self.crossings, name) for name in ("density", "values", "micro_batches")}
        whole |= {"boundaries": [row.document() for row in self.boundaries]}
        return json.dumps(whole | {"stages": [json.loads(plan.to_json()) for plan in self.stages]}, indent=1)


@checked
def decide_boundaries(crossings: Crossings) -> list[BoundaryRow]:
    """Return a row for each cut, sparsified where computing takes less time than the link saves."""
    return [_row(cut, crossings) for cut in crossings.cuts]


def _row(cut: Cut, crossings: Crossings) -> BoundaryRow:
    pays = cut.gain > 0
    return BoundaryRow(
        cut=cut,
        choice=crossings.name if pays else AS_IT_IS,
        saves=crossings.micro_batches * cut.gain if pays else 0.0,
        break_even=cut.break_even,
        reason=_reason(cut, crossings.name, pays),
    )


def _reason(cut: Cut, name: str, pays: bool) -> str:
    """Give the value of each term of the rule."""
    if not cut.dense_bytes:
        return "nothing crosses here"
    if cut.nbytes >= cut.dense_bytes:
        return f"{name} takes no fewer bytes"
    if pays:
        took = f"the round trip takes {ms(cut.sparse)} instead of {ms(cut.full)}"
        return f"{took}; encoding and decoding take {ms(cut.codec)}"
    return f"the round trip takes {ms(cut.full)}; {name} takes {ms(cut.sparse)}, and {ms(cut.codec)} to compute"
