"""What the user asked of `thinwire plan`, checked."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from thinwire.planner.candidates import OptimizerName
from thinwire_lab.cluster.link import parse_rate
from thinwire_lab.cluster.workers import in_group, world_size
from thinwire_lab.inputs import BadInput, names, numbers
from thinwire_lab.plan.sources import Asked, Measured, Saved, Source, Wishes
from thinwire_lab.problems.optimizers import check_optimizer


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
        asked = None if self.link is None else Asked.of(parse_rate(self.link))
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
        return Measured(
            kind="bench" if self.target is None else "user",
            subject=subject,
            workers=world_size() if in_group() else self.workers or 2,
            rate=parse_rate("100mbit" if self.link is None else self.link),
            explain=bool(self.explain),
        )

    def _leave_out(self, why: str, *options: str) -> None:
        if given := [option for option in options if getattr(self, option) is not None]:
            said = self.target if given[0] == "target" else f"--{given[0].replace('_', '-')}"
            raise BadInput(f"{why}: leave {said} out")


def optimizer_called(name: str | None) -> OptimizerName | None:
    """Return the name if it is that of an optimizer that this torch has. Raises BadInput."""
    if name is not None:
        check_optimizer(name)
    return cast(OptimizerName | None, name)


def wishes(
    *,
    densities: str | None,
    candidates: str | None,
    error_feedback: bool,
    optimizer: OptimizerName | None = None,
    loss: float | None = None,
) -> Wishes:
    """Read the budget from text. Raises BadInput."""
    return Wishes(
        densities=None if densities is None else numbers(densities, "--density"),
        names=None if candidates is None else names(candidates, "--candidates", "fp16,sampled_topk"),
        error_feedback=error_feedback,
        optimizer=optimizer,
        loss=loss,
    )
