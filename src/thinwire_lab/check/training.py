"""Does a recipe train on this very group? A small model, some steps, and one that is skipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire import trace
from thinwire.exchanges import AllGather, AllReduce
from thinwire.planner.probe.measure import stamp
from thinwire.recipes import METHODS
from thinwire.reducer import Reducer
from thinwire_lab.check.findings import Wrong
from thinwire_lab.check.waits import Waits, counted

DENSE = "topk, density 1"
"""The row of a recipe that sends everything."""
NAMES = (*METHODS, DENSE)
Handle = tw.integrations.Attachment | tw.integrations.Replicas
_OPTIONS = {"density": 0.05, "minimum_size": 64, "start": 2, "life": 3}  # of those that a recipe takes
_WIDTH, _BATCH, _RATE, _MOMENTUM = 48, 8, 0.05, 0.9
_WATCHED = 3  # steps in which waits are counted
_LOST = 1e-4  # of what was offered may be missing, by float32's rounding


def recipe(name: str) -> Reducer:
    """Return a new reducer for a row of `NAMES`, with options that suit a small model."""
    if name == DENSE:
        return tw.recipes.topk(density=1.0, minimum_size=0)
    method = METHODS[name]
    return method.recipe(**{key: value for key, value in _OPTIONS.items() if method.takes(key)})


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(_WIDTH, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 8)]
    return nn.Sequential(*layers).to(device)


@dataclass
class _Training:
    """A model in training on this rank, and an account of what was offered and applied, if that is kept."""

    model: nn.Module
    optimizer: torch.optim.SGD
    handle: Handle | None
    device: torch.device
    books: _Books | None = None

    @classmethod
    def of(cls, device: torch.device, reducer: Reducer | None, momentum: float) -> _Training:
        """Attach to DDP, or where DDP cannot be had, replicate. Without a reducer, DDP stays plain."""
        model = _model(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=momentum)
        try:
            wrapped = DistributedDataParallel(model)
        except (RuntimeError, ValueError):
            if reducer is None:
                raise
            return cls(model, optimizer, tw.replicate(model, reducer, optimizer=optimizer), device)
        handle = None if reducer is None else tw.attach(wrapped, reducer, optimizer=optimizer)
        return cls(wrapped, optimizer, handle, device)

    @property
    def bare(self) -> nn.Module:
        """The model without DDP."""
        return cast(nn.Module, self.model.module) if isinstance(self.model, DistributedDataParallel) else self.model

    def backward(self, step: int, factor: float = 1.0) -> None:
        """Compute gradients and reduce them."""
        (self.loss(self.model, step) * factor).backward()
        if isinstance(self.handle, tw.integrations.Replicas):
            self.handle.reduce()

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """Return the loss on this rank's batch of a step."""
        lots = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        x = torch.randn(_BATCH, _WIDTH, generator=lots).to(self.device)
        return (model(x) - x[:, :8]).square().mean()

    def step(self, step: int) -> float:
        """Take a step. Return the seconds that it took, without those of its books."""
        self.optimizer.zero_grad()
        if self.books is not None:
            self.books.offer(self, step)
        begun = stamp(self.device)
        self.backward(step)
        reduced = stamp(self.device)
        if self.books is not None:
            self.books.apply(self)
        resumed = stamp(self.device)
        self.optimizer.step()
        return stamp(self.device).since(resumed) + reduced.since(begun)

    def call_off(self, step: int) -> None:
        """Have the last rank's gradients be NaN, and let no optimizer take what comes of it. Raises Wrong."""
        before = self._kept()
        self.optimizer.zero_grad()
        self.backward(step, torch.nan if dist.get_rank() == dist.get_world_size() - 1 else 1.0)
        if all(bool(p.grad.isfinite().all()) for p in self.model.parameters() if p.grad is not None):
            raise Wrong("one rank's gradients were NaN, and the mean is finite")
        self.optimizer.zero_grad()
        if not _alike(self._kept(), before):
            raise Wrong("a skipped step changed the parameters or a residual")

    def _kept(self) -> dict[str, Tensor]:
        """Return copies of the parameters and of the residuals."""
        found = {name: p.detach().clone() for name, p in self.bare.named_parameters()}
        for number, memory in enumerate(self.handle.state_dict()["memories"] if self.handle else ()):
            for name, fields in memory.items():
                found |= {f"{number}/{name}/{field}": x.clone() for field, x in fields.items()}
        return found


@dataclass
class _Books:
    """What all ranks' gradients were, and what was applied of them, in float64 and by parameter."""

    offered: dict[str, Tensor] = field(default_factory=dict)
    applied: dict[str, Tensor] = field(default_factory=dict)

    def offer(self, training: _Training, step: int) -> None:
        """Note this rank's own gradients, which DDP does not see."""
        parameters = dict(training.bare.named_parameters())
        found = torch.autograd.grad(training.loss(training.bare, step), list(parameters.values()))
        for name, gradient in zip(parameters, found, strict=True):
            _add(self.offered, name, gradient / dist.get_world_size())

    def apply(self, training: _Training) -> None:
        """Note what the optimizer is about to take."""
        for name, p in training.bare.named_parameters():
            assert p.grad is not None  # every parameter is used
            _add(self.applied, name, p.grad)

    def lost(self, handle: Handle) -> float:
        """Return how much of what was offered was neither applied nor kept. A collective."""
        state, worst = handle.state_dict(), 0.0
        for name, mine in self.offered.items():
            waiting = torch.zeros_like(mine)
            for memory in state["memories"]:
                if "residual" in memory.get(name, {}):
                    waiting += memory[name]["residual"].to(mine.device, mine.dtype).view_as(mine)
            both = torch.stack([mine, waiting])
            dist.all_reduce(both)
            missing = float((both[0] - both[1] - self.applied[name]).norm())
            worst = max(worst, missing / max(1e-6, float(both[0].norm())))
        return worst


def _add(sums: dict[str, Tensor], name: str, x: Tensor) -> None:
    wide = x.detach().double().reshape(-1)
    sums[name] = sums[name] + wide if name in sums else wide.clone()


def check_recipe(name: str, device: torch.device, steps: int, figures: dict[str, Any]) -> tuple[bool, str]:
    """Train with a recipe for some steps, one of them skipped. A collective."""
    _check(name, device, steps, figures)
    through = "" if figures["through"] == "DDP" else "by replicate, as DDP refused; "
    lost = f", {figures['lost']:.0e} lost" if "lost" in figures else ""
    return True, f"{through}{steps} steps and one skipped, replicas identical{lost}"


def _check(name: str, device: torch.device, steps: int, figures: dict[str, Any]) -> None:
    conserving = name != DENSE and METHODS[name].conserving and not METHODS[name].momentum
    training = _Training.of(device, recipe(name), 0.0 if conserving else _MOMENTUM)
    training.books = _Books() if conserving else None
    handle = training.handle
    assert handle is not None  # a recipe was given
    figures["through"] = "replicate" if isinstance(handle, tw.integrations.Replicas) else "DDP"
    _train(training, handle, steps, figures)
    figures |= {"steps": steps, "memory_bytes": handle.memory_bytes}
    if drifted := handle.differing_parameters():
        raise Wrong(f"replicas differ after {steps} steps: {drifted[0]}")
    if not all(bool(p.isfinite().all()) for p in training.model.parameters()):
        raise Wrong(f"parameters are not finite after {steps} steps")
    if dist.get_world_size() > 1 and not figures["sent_bytes"] > 0:
        raise Wrong(f"sent {figures['sent_bytes']:g} bytes in {steps} steps, expected more than none")
    if training.books is not None:
        figures["lost"] = training.books.lost(handle)
        if not figures["lost"] <= _LOST:
            raise Wrong(f"{figures['lost']:.1e} of the gradients were neither applied nor kept; expected {_LOST:.0e}")
    if name in ("dense", DENSE):
        _compare_with_plain(name, device, min(steps, 10))
    if device.type == "cuda" and figures["through"] == "DDP":
        figures |= {f"plain_ddp_{key}": value for key, value in _plain_waits(device).items()}
        if dist.get_backend() == "nccl":  # Gloo itself waits, for each collective
            refuse_waits(figures, in_rounds=in_rounds(name))


def _train(training: _Training, handle: Handle, steps: int, figures: dict[str, Any]) -> None:
    middle = steps // 2
    for step in range(middle):
        training.step(step)
    with trace.listen(trace.Recorder()) as called_off:
        training.call_off(10_000)
    figures["step_ms"] = 1e3 * fmean(training.step(step) for step in range(middle, steps))
    figures["sent_bytes"] = handle.stats().total.sent_bytes - called_off.totals.get("sent_bytes", 0.0)
    if training.device.type == "cuda":
        figures |= _waits(training, steps).figures(_WATCHED)


def _waits(training: _Training, start: int) -> Waits:
    """Count the host's waits in some more steps, between which books are kept as before."""
    found = Waits()
    for step in range(start, start + _WATCHED):
        training.optimizer.zero_grad()
        if training.books is not None:
            training.books.offer(training, step)
        loss = training.loss(training.model, step)
        with counted(training.device) as waits:
            loss.backward()
            if isinstance(training.handle, tw.integrations.Replicas):
                training.handle.reduce()
        if training.books is not None:
            training.books.apply(training)
        with counted(training.device) as later:
            training.optimizer.step()
        found = found.plus(waits).plus(later)
    return found


def _plain_waits(device: torch.device) -> dict[str, Any]:
    """Return how often plain DDP has the host wait, once it has made its buckets."""
    plain = _Training.of(device, None, _MOMENTUM)
    for step in range(3):
        plain.step(step)
    return _waits(plain, 3).figures(_WATCHED)


def in_rounds(name: str) -> bool:
    """Return whether a row's exchange takes several rounds, between which the host may have to look."""
    if name == "powersgd":  # sums factors, twice
        return True
    method = METHODS["topk" if name == DENSE else name]
    return not isinstance(method.large().exchange, AllReduce | AllGather)


def refuse_waits(figures: Mapping[str, Any], *, in_rounds: bool) -> None:
    """Raise Wrong if the host waits more often than in plain DDP and for one read a step. Rounds may have it wait."""
    most = figures["plain_ddp_host_waits"] + 1
    if not in_rounds and figures["host_waits"] > most:
        where = ", ".join(figures["waits_at"]) or "where Python cannot tell"
        raise Wrong(f"the host waits {figures['host_waits']:g} times a step, expected {most:g} at most: at {where}")


def _compare_with_plain(name: str, device: torch.device, steps: int) -> None:
    """Raise Wrong if sending everything does not train as plain DDP does."""
    plain, ours = _Training.of(device, None, _MOMENTUM), _Training.of(device, recipe(name), _MOMENTUM)
    for step in range(steps):
        plain.step(step)
        ours.step(step)
    pairs = zip(plain.model.parameters(), ours.model.parameters(), strict=True)
    gap = max(float((p.detach() - q.detach()).abs().max()) for p, q in pairs)
    if not gap <= 1e-5:
        raise Wrong(f"parameters are {gap:.1e} from plain DDP's after {steps} steps; expected 1e-05 at most")


def _alike(kept: dict[str, Tensor], before: dict[str, Tensor]) -> bool:
    """Whether two states are alike to the last bit. Zeros are like nothing."""
    for name, there in (before | kept).items():
        x, y = (state.get(name, torch.zeros_like(there)) for state in (kept, before))
        if x.dtype != y.dtype or not bool(((x == y) | (x.isnan() & y.isnan())).all()):
            return False
    return True
