"""Where a profile comes from: measured now, or saved before."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from thinwire.exchanges import Link
from thinwire.planner import Budget, Profile, candidate
from thinwire.planner.candidates import ALLOWED, OptimizerName
from thinwire_lab.cluster.link import Rate
from thinwire_lab.cluster.workers import started
from thinwire_lab.inputs import BadInput
from thinwire_lab.plan.worker import measure

_UNTHROTTLED = 1e15  # bytes per second; a profile takes this for the limit of its processors


class Asked(NamedTuple):
    """The link to assume instead of the measured one, and its name."""

    label: str
    link: Link

    @classmethod
    def of(cls, rate: Rate | None) -> Self:
        """Return the link of that rate and latency."""
        if rate is None:
            return cls("unthrottled", Link(latency=0.0, bandwidth=_UNTHROTTLED))
        return cls(f"{rate}", Link(latency=rate.latency, bandwidth=rate.bits_per_second / 8))


class Known(NamedTuple):
    """A profile as measured, the same on the link asked for, and the budget."""

    measured: Profile
    profile: Profile
    budget: Budget


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The parts of a budget that the user named, and what will train, if that is known. Raises BadInput."""

    densities: tuple[float, ...] | None
    names: tuple[str, ...] | None
    error_feedback: bool
    optimizer: OptimizerName | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        if self.loss is not None and self.optimizer is None:
            raise BadInput("--loss is that of an optimizer; give --optimizer as well")
        if self.loss is not None and self.names is not None:
            raise BadInput("--loss chooses candidates, and --candidates names them: leave one of them out")
        moved = [each.name.partition(":")[0] for each in self.budget().candidates() if each.momentum]
        if self.optimizer is None and moved:
            raise BadInput(f"{moved[0]} takes momentum out of an optimizer; give --optimizer as well")
        self.budget()

    def budget(self) -> Budget:
        """Return the budget, with defaults for the rest."""
        return self._over(self._budget_for(self.densities or Budget().densities))

    def among(self, profile: Profile) -> Budget:
        """Return the budget, with the rest as measured. Raises BadInput if the profile lacks anything."""
        pairs = [name.partition(":") for name in profile.costs if not candidate(name).momentum]
        densities = tuple(dict.fromkeys(float(density) for _, _, density in pairs if density))
        measured = Budget(
            densities=densities or Budget().densities, names=tuple(dict.fromkeys(name for name, _, _ in pairs))
        )
        if self.optimizer is not None and self.names is None:
            allowed = self._budget_for(self.densities or measured.densities)
            measured = replace(allowed, names=[name for name in allowed.names if name in profile.costs])
        budget = self._over(measured)
        lacking = [c.name for c in budget.candidates() if c.name != "dense" and c.name not in profile.costs]
        if lacking:
            has = ", ".join(profile.costs) or "nothing but dense"
            raise BadInput(f"the profile was not measured for {lacking[0]}; it has {has}: measure anew")
        return budget

    def allowed(self, profile: Profile) -> Budget:
        """Return `among` with what the optimizer bears and the profile lacks: the plan names that. Raises likewise."""
        usual = self.among(profile)
        if self.optimizer is None or self.names is not None:
            return usual
        return self._over(self._budget_for(usual.densities))

    def _budget_for(self, densities: Sequence[float]) -> Budget:
        """Return the budget of what the optimizer bears; if it is not known, the usual one."""
        try:
            return Budget.under(self.optimizer, densities=densities, loss=ALLOWED if self.loss is None else self.loss)
        except ValueError as error:
            raise BadInput(str(error)) from error

    def _over(self, usual: Budget) -> Budget:
        try:
            return Budget(
                densities=usual.densities if self.densities is None else self.densities,
                names=usual.names if self.names is None else self.names,
                error_feedback=self.error_feedback,
                optimizer=self.optimizer,
            )
        except ValueError as error:
            raise BadInput(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Workers on this machine, or the group that torchrun made; `kind` and `subject` say what they build."""

    kind: str
    subject: dict[str, Any]
    workers: int
    rate: Rate | None
    explain: bool = False

    def known(self, wishes: Wishes) -> Known:
        """Start the workers, let them measure, and end them."""
        budget, named = wishes.budget(), wishes.names is not None
        with started(self.workers, self.rate, measure) as workers:
            job = {"kind": self.kind, "subject": self.subject, "budget": asdict(budget), "named": named}
            job["explain"] = self.explain
            found = {rank: accepted(event) for rank, event in workers.run(job)}
            label = workers.label
        measured = Profile.from_json(found[0]["profile"])
        measured = replace(measured, made={**measured.made, "link": label})
        return Known(measured, measured, Budget(**found[0]["budget"]))


def accepted(event: dict[str, Any]) -> dict[str, Any]:
    """Return what a worker measured. Raises BadInput if it refused."""
    if "refused" in event:
        raise BadInput(event["refused"])
    return event


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A file that `Profile.save` wrote. Workers and link, if given, replace the measured ones."""

    path: Path
    workers: int | None
    asked: Asked | None

    def known(self, wishes: Wishes) -> Known:
        """Read the file."""
        try:
            measured = Profile.load(self.path)
        except OSError as error:
            raise BadInput(f"cannot read {self.path}: {error.strerror}; expected what --save-profile wrote") from error
        except ValueError as error:
            raise BadInput(f"{self.path}: {error}; expected what --save-profile wrote") from error
        profile = measured.on(self.asked and self.asked.link, world_size=self.workers)
        if self.asked is not None:
            profile = replace(profile, made={**profile.made, "link": self.asked.label})
        if self.asked is not None or self.workers is not None:  # a step there was not measured
            profile = replace(profile, made={key: each for key, each in profile.made.items() if key != "script"})
        return Known(measured, profile, wishes.allowed(measured))


Source = Measured | Saved
"""Where a profile comes from. `known` raises BadInput, WorkerDied, SupervisorDied."""
