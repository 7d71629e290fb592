"""What the user asked of `thinwire plan`, checked, and where its profile comes from: measured now, or saved before."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from thinwire.exchanges import Link
from thinwire.planner import Budget, Profile, candidate
from thinwire.planner.candidates import ALLOWED, OptimizerName
from thinwire_lab.cluster.link import Rate, parse_rate
from thinwire_lab.cluster.workers import in_group, started, world_size
from thinwire_lab.inputs import BadInput, names, numbers
from thinwire_lab.plan.explain import check_several
from thinwire_lab.plan.worker import measure
from thinwire_lab.problems.optimizers import check_optimizer

_UNTHROTTLED = 1e15  # bytes per second; a profile takes this for the limit of its processors


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

    def budget(self) -> Budget:
        """Return the budget, with defaults for the rest."""
        return self._over(self._budget_for(self.densities or Budget().densities))

    def among(self, profile: Profile) -> Budget:
        """Return the budget, with the rest as measured. Raises BadInput if the profile lacks anything."""
        usable = [name for name in profile.costs if not candidate(name).momentum]
        densities = tuple(dict.fromkeys(float(name.partition(":")[2]) for name in usable if ":" in name))
        measured = Budget(densities=densities or Budget().densities, names=self._as_measured(profile, usable))
        if self.optimizer is not None and self.names is None:
            allowed = self._budget_for(self.densities or measured.densities)
            measured = replace(allowed, names=[name for name in allowed.names if name in profile.costs])
        budget = replace(self._over(measured), names=measured.names)
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

    def _as_measured(self, profile: Profile, usable: Sequence[str]) -> tuple[str, ...]:
        """Return the names, each without a density at those at which the profile has it, unless some are given."""
        if self.densities is not None:
            return self.names or tuple(dict.fromkeys(name.partition(":")[0] for name in usable))
        names = self.names or usable
        found = [[each for each in profile.costs if each.partition(":")[0] == name] or [name] for name in names]
        return tuple(each for several in found for each in several)

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
    """A file that `Profile.save` wrote. Workers, and a link and its name, if given, replace the measured ones."""

    path: Path
    workers: int | None
    asked: tuple[str, Link] | None

    def known(self, wishes: Wishes) -> Known:
        """Read the file."""
        try:
            measured = Profile.load(self.path)
        except OSError as error:
            raise BadInput(f"cannot read {self.path}: {error.strerror}; expected what --save-profile wrote") from error
        except ValueError as error:
            raise BadInput(f"{error}; expected what --save-profile wrote") from error
        name, link = self.asked or ("", None)
        profile = measured.on(link, world_size=self.workers)
        if name:
            profile = replace(profile, made={**profile.made, "link": name})
        if self.asked is not None or self.workers is not None:  # a step there was not measured
            profile = replace(profile, made={key: each for key, each in profile.made.items() if key != "script"})
        return Known(measured, profile, wishes.allowed(measured))


Source = Measured | Saved
"""Where a profile comes from. `known` raises BadInput, WorkerDied, SupervisorDied."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to plan for, as the user gave it; None if not given. `target` names a function of the user's."""

    target: str | None
    model: str | None
    data: Path | None
    scale: float | None
    seed: int | None
    workers: int | None
    link: str | None
    profile: Path | None
    save_profile: Path | None
    optimizer: OptimizerName | None = None
    explain: bool | None = None

    def source(self) -> Source:
        """Return where the profile comes from. Raises BadInput if options do not go together."""
        if self.workers is not None and self.workers < 1:
            raise BadInput(f"--workers is {self.workers}; expected 1 or more")
        return self._measured() if self.profile is None else self._saved(self.profile)

    def _saved(self, path: Path) -> Saved:
        self._leave_out(
            "with --profile nothing is measured", "target", "model", "data", "scale", "seed", "save_profile"
        )
        asked = None if self.link is None else _named(parse_rate(self.link))
        return Saved(path=path, workers=self.workers, asked=asked)

    def _measured(self) -> Measured:
        if in_group():
            self._leave_out("under torchrun the group has its size and its network", "workers", "link")
        subject: dict[str, object] = {"target": self.target}
        if self.target is not None:
            self._leave_out(f"{self.target} is the model", "model", "data", "scale", "seed")
        else:
            subject = {
                "name": self.model or "transformer",
                "seed": self.seed or 0,
                "data": None if self.data is None else str(self.data),
                "scale": 1.0 if self.scale is None else self.scale,
                "optimizer": self.optimizer or "sgd",
            }
        workers = world_size() if in_group() else self.workers or 2
        if self.explain:
            check_several(workers)
        return Measured(
            kind="bench" if self.target is None else "user",
            subject=subject,
            workers=workers,
            rate=parse_rate("100mbit" if self.link is None else self.link),
            explain=bool(self.explain),
        )

    def _leave_out(self, why: str, *options: str) -> None:
        if given := [option for option in options if getattr(self, option) is not None]:
            said = self.target if given[0] == "target" else f"--{given[0].replace('_', '-')}"
            raise BadInput(f"{why}: leave {said} out")


def _named(rate: Rate | None) -> tuple[str, Link]:
    """Return a link of that rate and latency, behind its name."""
    if rate is None:
        return "unthrottled", Link(latency=0.0, bandwidth=_UNTHROTTLED)
    return f"{rate}", Link(latency=rate.latency, bandwidth=rate.bits_per_second / 8)


def wishes(*, densities: str | None, candidates: str | None, optimizer: str | None = None, **others: Any) -> Wishes:
    """Read the budget from text. Raises BadInput, also for an optimizer that this torch does not have."""
    if optimizer is not None:
        check_optimizer(optimizer)
    return Wishes(
        densities=None if densities is None else numbers(densities, "--density"),
        names=None if candidates is None else names(candidates, "--candidates", "fp16,sampled_topk"),
        optimizer=cast(OptimizerName | None, optimizer),
        **others,
    )
