"""What the user asked of `thinwire plan`, checked."""

from dataclasses import dataclass
from pathlib import Path

from thinwire.bench.link import parse_rate
from thinwire.bench.options import names, numbers
from thinwire.bench.plan_sources import Asked, Measured, Saved, Source, Wishes
from thinwire.bench.problems import BadInput
from thinwire.bench.torchrun import in_group, world_size


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to plan for, as given; None where nothing was. `target` names a function of the user's."""

    target: str | None
    model: str | None
    data: Path | None
    scale: float | None
    seed: int | None
    workers: int | None
    link: str | None
    profile: Path | None
    save_profile: Path | None

    def source(self) -> Source:
        """Return where the profile comes from. Raises BadInput for what does not go together."""
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
            }
        return Measured(
            kind="bench" if self.target is None else "user",
            subject=subject,
            workers=world_size() if in_group() else self.workers or 2,
            rate=parse_rate("100mbit" if self.link is None else self.link),
        )

    def _leave_out(self, why: str, *options: str) -> None:
        if given := [option for option in options if getattr(self, option) is not None]:
            said = {"target": self.target, "save_profile": "--save-profile"}.get(given[0], f"--{given[0]}")
            raise BadInput(f"{why}: leave {said} out")


def wishes(*, densities: str | None, candidates: str | None, error_feedback: bool) -> Wishes:
    """Read the budget from text. Raises BadInput."""
    return Wishes(
        densities=None if densities is None else numbers(densities, "--density"),
        names=None if candidates is None else names(candidates, "--candidates", "fp16,topk"),
        error_feedback=error_feedback,
    )
