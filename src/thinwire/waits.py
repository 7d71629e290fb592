"""When may the host wait for a GPU? Not within a step: what is wrong there is noted, and read once when it is over."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import Tensor

Error = Callable[[], Exception]

HOST = frozenset({"cpu"})
"""Kinds of devices that the host reads without waiting."""


def on_host(x: Tensor) -> bool:
    """Whether the host can read a tensor's elements without waiting for a device."""
    return x.device.type in HOST


def all_finite(some: Iterable[Tensor]) -> bool:
    """Whether all of these tensors are finite. On a GPU the host waits once."""
    ends = [end for x in some if x.numel() for end in x.aminmax()]  # two numbers of each: no second vector is made
    return not ends or bool(torch.stack([end.to(ends[0].device) for end in ends]).isfinite().all())


def refuse_captured(
    what: str,
    instead: str = "capture the forward pass alone, or remove() the handle",
    why: str = "replays would repeat this step's random choices and keep no residual",
) -> None:
    """Raise RuntimeError, with what is done, why not and what to do instead, while the current stream is captured."""
    if captured():
        raise RuntimeError(f"{what} while a CUDA graph is captured, and {why}: {instead}")


def refuse_unfit(what: str, instead: str = "capture the forward pass alone, or remove() the handle") -> None:
    """Raise RuntimeError where no step can be taken: while the current stream is captured, and in inference mode."""
    refuse_captured(what, instead)
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{what} within torch.inference_mode(), whose tensors no later step could change: call backward and step "
            "outside of it, and use torch.no_grad() for what needs no gradients. If DDP's backward was in it, wrap the "
            "model in DDP anew, and attach"
        )


def unfit() -> bool:
    """Whether `refuse_unfit` would refuse. It is asked where that must cost little."""
    return captured() or torch.is_inference_mode_enabled()


def captured() -> bool:
    """Whether the current stream's work goes into a CUDA graph, and is not done now."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def known(x: Tensor) -> Any:
    """Return the number in a 0-dim tensor that the host can read, which is faster to compare, or another as it is."""
    return x.item() if on_host(x) else x


@final
class Verdict:
    """What was checked on a GPU and not read yet. One read tells whether anything was wrong, and then what."""

    def __init__(self) -> None:
        self._checks: list[tuple[Tensor, Sequence[Error]]] = []
        self.withheld = False

    def note(self, wrong: Tensor, error: Error) -> None:
        """Note a check: `wrong` (bools, of which none may be set), and what returns the exception it stands for."""
        flat = wrong.view(-1).bool()  # torch's any() of uint8 is uint8
        self._checks.append((flat, [error] * flat.numel()))
        self.withheld = False

    def withhold(self, flags: Tensor, first: Error) -> None:
        """Take it that one tensor has the checks' bools, behind another, and that all is 0 if one of them is set."""
        self._checks, self.withheld = [(flags, [first, *self.errors])], True

    def take_in(self, other: "Verdict") -> None:
        """Note what another one has noted."""
        self._checks += other._checks

    def moved(self, move: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> "Verdict":
        """Have the checks' bools be one tensor, moved. Return the verdict."""
        flags = self.flags
        if flags is not None:
            (flags,) = move([flags])
            self._checks = [(flags, self.errors)]
        return self

    @property
    def checks(self) -> list[Tensor]:
        """The bools of each check, on the device."""
        return [wrong for wrong, _ in self._checks]

    @property
    def flags(self) -> Tensor | None:
        """The bools of all checks, on the device; None if nothing was checked."""
        flags = self.checks
        return torch.cat(flags) if len(flags) > 1 else next(iter(flags), None)

    @property
    def errors(self) -> list[Error]:
        """What returns the exception that each of the flags stands for."""
        return [error for _, errors in self._checks for error in errors]

    def read(self) -> None:
        """Wait, forget the checks, and raise the exception of the first that failed."""
        flags, errors = self.flags, self.errors
        self._checks.clear()
        for wrong, error in zip([] if flags is None else flags.tolist(), errors, strict=True):
            if wrong:
                raise error()


_open: ContextVar[Verdict | None] = ContextVar("thinwire.waits", default=None)


@contextmanager
def noting(verdict: Verdict | None) -> Iterator[None]:
    """Within, `refuse_if` notes what it finds on a GPU in `verdict`. With None it waits, as it does outside."""
    token = _open.set(verdict)
    try:
        yield
    finally:
        _open.reset(token)


noted_in = _open.get
"""Returns where `refuse_if` notes what it finds; None if it waits."""


def refuse_if(wrong: Tensor | bool, error: Error) -> bool:
    """Raise what `error` returns if any of `wrong` is set; where the host must not wait, note it and return True."""
    verdict = _open.get()
    if verdict is not None and isinstance(wrong, Tensor) and not on_host(wrong):
        verdict.note(wrong, error)
        return True
    if wrong.any() if isinstance(wrong, Tensor) else wrong:
        raise error()
    return False
