"""A plan: what to do with each tensor, what that should bring, and why."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, final

from thinwire.checked import Amount, Bandwidth, Number, Seconds, Size, checked
from thinwire.memories import ErrorFeedback, Memory
from thinwire.planner.candidates import DENSE, OptimizerName, candidate, in_words, shared
from thinwire.planner.profile import Profile
from thinwire.reducer import PerTensor, Reducer


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor in a plan.

    Args:
        name: The parameter's name.
        numel: Its elements.
        dense_bytes: Bytes of its gradient, uncompressed.
        choice: Its candidate.
        nbytes: Bytes of its payload.
        saves: Seconds that the choice saves in a step.
        reason: Why it was chosen.
    """

    name: str
    numel: Size
    dense_bytes: Size
    choice: str
    nbytes: Amount
    saves: Number
    reason: str


@checked
class Why(NamedTuple):
    """Why gradients are sent as they are.

    Args:
        decision: The reason for the choice as a whole.
        rows: A row for each tensor, by name.
    """

    decision: str
    rows: Mapping[str, Row]

    def __str__(self) -> str:
        """Return it as a table: tensor, candidate, reason."""
        names, choices = (
            max(map(len, column), default=0) for column in (self.rows, [r.choice for r in self.rows.values()])
        )
        lines = (f"  {name:{names}}  {row.choice:{choices}}  {row.reason}" for name, row in self.rows.items())
        return "\n".join([self.decision, *lines])


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to send for each tensor, and the predicted step time.

    Args:
        profile: What the plan was made from.
        rows: One for each tensor.
        dense_seconds, seconds: Duration of a step, uncompressed and as planned.
        break_even: The bandwidth in bytes per second above which compression stops paying; infinite where it always
            pays, 0 where it never does.
        advice: What else would help.
        optimizer: The optimizer that will train, if known.
        unmeasured: Candidates that the budget allows and `profile` lacks.
    """

    profile: Profile
    rows: Sequence[Row]
    dense_seconds: Seconds
    seconds: Seconds
    break_even: Bandwidth
    advice: Sequence[str]
    optimizer: OptimizerName | None = None
    unmeasured: Sequence[str] = ()

    @property
    def choice(self) -> dict[str, str]:
        """The name of the candidate for each tensor that is compressed."""
        return {row.name: row.choice for row in self.rows if row.choice != DENSE.name}

    @property
    def pays(self) -> bool:
        """Whether anything is compressed."""
        return bool(self.choice)

    @property
    def verdict(self) -> str:
        """The plan in a sentence."""
        if not self.pays:
            return f"nothing pays here: plain DDP, {1e3 * self.seconds:.1f} ms a step"
        used = ", ".join(dict.fromkeys(self.choice.values()))
        gain = self.dense_seconds / self.seconds if self.seconds else math.inf
        return (
            f"{len(self.choice)} of {len(self.rows)} tensors by {used}: {1e3 * self.seconds:.1f} ms a step instead of "
            f"{1e3 * self.dense_seconds:.1f}, {gain:.2f} times as fast"
        )

    @property
    def expected_loss(self) -> str:
        """In words, the measured cost in loss of the candidates in use; empty without an optimizer or candidates."""
        return in_words(self.choice.values(), self.optimizer)

    @property
    def missing(self) -> str:
        """In words, which candidates could not be chosen, as they were not measured; empty if none."""
        if not self.unmeasured:
            return ""
        names, by = ", ".join(self.unmeasured), f" under {self.optimizer}" if self.optimizer else ""
        return f"Allowed by the budget{by}, but not measured in this profile: {names}. Measure again to consider it."

    def why(self) -> Why:
        """Return the reasons, tensor by tensor."""
        told = " ".join(filter(None, (self.expected_loss, self.missing)))
        return Why(". ".join(filter(None, (self.verdict, told))), {row.name: row for row in self.rows})

    def reducer(self, memory: Memory | None = None) -> Reducer:
        """Return a reducer that follows the plan.

        Args:
            memory: Keeps the residual; by default an ErrorFeedback. Momentum that fades has a memory of its own.
        """
        return reducer(self.choice, memory or ErrorFeedback())

    def to_json(self) -> str:
        """Return the plan and its predictions as JSON."""
        whole = {"schema": "thinwire.plan/2", "verdict": self.verdict, "pays": self.pays}
        whole |= {k: v for k, v in asdict(self).items() if k not in ("profile", "optimizer", "unmeasured")}
        if self.optimizer is not None:
            whole |= {"optimizer": self.optimizer, "expected_loss": self.expected_loss}
        if self.unmeasured:
            whole |= {"unmeasured": self.unmeasured}
        whole["break_even"] = self.break_even if self.break_even != math.inf else None
        return json.dumps(whole | {"profile": json.loads(self.profile.to_json())}, indent=1)


def reducer(choice: Mapping[str, str], *memories: Memory) -> PerTensor:
    """Return a reducer of each parameter's candidate, which share memories of a kind; all others go uncompressed."""
    chosen = {name: given for name, given in choice.items() if given != DENSE.name}
    candidates = [candidate(name) for name in dict.fromkeys(chosen.values())]
    memories = shared(candidates, *memories)
    reducers = {each.name: each.reducer(*memories) for each in candidates}
    return PerTensor(reducers=reducers, chosen=chosen, otherwise=DENSE.reducer())
