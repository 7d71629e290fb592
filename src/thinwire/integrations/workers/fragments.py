"""Fragments: parts of a model's parameters, each with its global ones, the exchange of Δ and the outer optimizer."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, futures, nn
from torch.utils._pytree import tree_leaves

from thinwire.handle import MemoryUse
from thinwire.integrations.attachments.attachment import Attachment
from thinwire.integrations.training.gradients import GradientBucket, buckets, islands, local
from thinwire.integrations.workers.meeting import Meeting
from thinwire.schedules import Schedule, resolve
from thinwire.waits import all_finite


@final
class Fragment:
    """Some parameters of one worker (`own`) and the same as all workers have agreed on them (`parameters`), by name.

    The latter are float32 or wider: small means would vanish in 16 bits. `attachment` reduces Δ = global − own to its
    mean, and `optimizer` takes that as the gradient of the global ones. `arrived`: whether a mean is here and not
    applied yet. `finished`: exchanges that are over. `kind`: the class of the outer optimizer as it was made.
    """

    def __init__(
        self, own: Mapping[str, nn.Parameter], attachment: Attachment, optimizer: torch.optim.Optimizer
    ) -> None:
        self._own, self.attachment, self.optimizer = dict(own), attachment, optimizer
        self.kind = type(optimizer)
        self.parameters: Mapping[str, nn.Parameter] = attachment.parameters
        self._buckets: Sequence[GradientBucket] = list(buckets(list(self.parameters.values())))
        names = attachment.names
        self._views = {names[p]: v for b in self._buckets for p, v in zip(b.parameters, b.views, strict=True)}
        self._flying: list[torch.futures.Future[Tensor]] = []
        self.islands = islands(self._own.values())
        self.arrived = False
        self.meeting: Meeting | None = None
        self.finished = 0
        self.waited = 0.0

    @property
    def optimizer_changed(self) -> bool:
        """Whether the outer optimizer is of another class than it was, or does not train what it did."""
        groups = self.optimizer.param_groups
        held = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        return type(self.optimizer) is not self.kind or held != {id(p) for p in self.parameters.values()}

    @property
    def memory(self) -> MemoryUse:
        """Residuals, the global parameters and the optimizer's state; Δ and other staging; and scratch."""
        held, state = self.attachment.memory, self.optimizer.state.values()
        kept = [*self.parameters.values(), *(x for x in tree_leaves(list(state)) if isinstance(x, Tensor))]
        copies = sum(bucket.flat.nbytes for bucket in self._buckets)
        return MemoryUse(held.waiting + sum(x.nbytes for x in kept), held.staging + copies, held.scratch)

    def own(self) -> dict[str, Tensor]:
        """Return this worker's parameters; of DTensors, its shards. Not copies."""
        return {name: local(p).detach() for name, p in self._own.items()}

    @property
    def own_parameters(self) -> Sequence[nn.Parameter]:
        """This worker's parameters, as its model has them."""
        return list(self._own.values())

    def moved(self) -> bool:
        """Whether this worker's own parameters are not the global ones."""
        return any(not torch.equal(self.parameters[name].detach().to(x), x) for name, x in self.own().items())

    @torch.no_grad()
    def adopt(self) -> None:
        """Make this worker's own parameters the global ones."""
        for name, mine in self.own().items():
            self.parameters[name].copy_(mine)

    @torch.no_grad()
    def measure(self) -> None:
        """Take down Δ = global − own, where what own ones cannot say of the global ones is no movement."""
        for name, mine in self.own().items():
            view = self._views[name]
            torch.sub(self.parameters[name].detach().to(mine.dtype).to(view.dtype), mine.to(view.device), out=view)

    def finite(self) -> bool:
        """Whether what was taken down, or has arrived since, is finite on the whole island; a collective of it."""
        return bool(self.lowest(all_finite([bucket.flat for bucket in self._buckets])))

    def start(self, meeting: Meeting) -> None:
        """Start reducing Δ in an exchange, times its weight there; zeros in its place if that is 0 or NaN."""
        self.arrived, self.meeting = False, meeting
        counts = meeting.weight > 0
        divisor = self.attachment.group.size() / (meeting.weight if counts else 1.0)
        self.attachment.membership.divisor = lambda joined, steps: divisor
        for bucket in () if counts else self._buckets:
            bucket.flat.zero_()
        self._flying = [self.attachment.reduce(each.flat, each.parameters) for each in self._buckets]

    @property
    def flies(self) -> bool:
        """Whether an exchange is under way."""
        return bool(self._flying)

    def arrive(self) -> None:
        """Wait for the mean, and keep what was not sent."""
        if (meeting := self.meeting) and self._land():
            self.finished += 1
            self.arrived = self._weigh(meeting.weights) and self.finite()
            self.attachment.steps.settle_all(keep=self.arrived and meeting.taken is not False)

    def _weigh(self, weights: Sequence[float]) -> bool:
        """Make a mean of the sum that has arrived. Return whether anybody's share counts."""
        size = self.attachment.group.size()  # by which each was divided
        if (total := sum(weights)) not in (0, size):
            for bucket in self._buckets:
                bucket.flat.mul_(size / total)
        return total > 0

    def land_if_possible(self) -> None:
        """Wait for what is under way. If that fails, nothing has been sent."""
        with suppress(Exception):
            self._land()

    def _land(self) -> bool:
        """Wait for what is under way. Return whether there was anything."""
        if not self._flying:
            return False
        began, flying, self._flying = time.perf_counter(), self._flying, []
        try:
            futures.wait_all(flying)
            return True
        except KeyboardInterrupt:  # whoever goes on waits again
            self._flying = flying
            raise
        except BaseException:
            self.attachment.steps.take_back()
            raise
        finally:
            self.waited += time.perf_counter() - began

    @contextmanager
    def keeping_moves(self) -> Iterator[None]:
        """Within, this worker's own parameters move as the global ones do: what it has learnt is yet to be sent."""
        with torch.no_grad():
            before = {name: self.parameters[name].detach().to(mine, copy=True) for name, mine in self.own().items()}
            yield
            for name, mine in self.own().items():
                mine.add_(self.parameters[name].detach().to(mine)).sub_(before[name])

    @torch.no_grad()
    def take_back(self, part: float) -> None:
        """Have this part of the mean that is under way wait again, instead of applying it."""
        self.arrive()
        for name, mine in self.own().items() if self.arrived else ():
            mine.sub_(self._views[name].to(mine), alpha=part)
        self.arrived, self.meeting = False, None

    @torch.no_grad()
    def apply(self, rate: Schedule | None = None) -> bool:
        """Have the outer optimizer take the mean that has arrived, at this rate. Return whether there was one."""
        if not self.arrived:
            return False
        if rate is not None:
            lr = resolve(rate, self.finished - 1)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        for name, p in self.parameters.items():
            p.grad = self._views[name]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.arrived = False
        return True

    def sound(self) -> bool:
        """Whether this worker's own parameters are finite, on all ranks of its island."""
        return bool(self.lowest(all_finite(list(self.own().values()))))

    def lowest(self, value: float) -> float:
        """Return the lowest of the values on the ranks of the island, which must not decide apart; a collective."""
        if not self.islands:
            return value
        found = torch.tensor(value, dtype=torch.float64, device=self.own_parameters[0].device)
        for group in self.islands:
            dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
        return float(found)

    @torch.no_grad()
    def merge(self, mixing: float = 0.0) -> None:
        """Bring this worker's parameters to the global ones: own ← mixing · own + (1 − mixing) · global."""
        for name, mine in self.own().items():
            theirs = self.parameters[name].detach().to(mine)
            if mixing:
                mine.lerp_(theirs, 1 - mixing)
            else:
                mine.copy_(theirs)

    def means(self) -> dict[str, Tensor]:
        """Return the means that have arrived and are not applied yet, shaped as their parameters. Not copies."""
        return dict(self._views) if self.arrived else {}

    @torch.no_grad()
    def take_means(self, means: Mapping[str, Tensor]) -> None:
        """Go on from means that `means` returned, or from none."""
        self.meeting = None  # of before
        self._flying, self.arrived = [], bool(means)
        for name, view in self._views.items() if means else ():
            view.copy_(means[name])


def cut(parameters: Mapping[str, nn.Parameter], parts: int | Sequence[Sequence[str]]) -> list[dict[str, nn.Parameter]]:
    """Cut the parameters into equal parts in order, or as names say; ValueError unless each is in exactly one."""
    if not isinstance(parts, int):
        return _named(parameters, parts)
    if parts > len(parameters):
        raise ValueError(
            f"fragments is {parts}; expected at most {len(parameters)}, the number of parameters to train, of which "
            "each rank needs elements"
        )
    found: list[dict[str, nn.Parameter]] = [{} for _ in range(parts)]
    total, before, at = sum(p.numel() for p in parameters.values()), 0, 0
    for left, (name, p) in zip(range(len(parameters), 0, -1), parameters.items(), strict=True):
        enough = before + p.numel() / 2 > total * (at + 1) / parts
        if found[at] and at + 1 < parts and (enough or left < parts - at):
            at += 1
        found[at][name] = p
        before += p.numel()
    return found


def _named(parameters: Mapping[str, nn.Parameter], parts: Sequence[Sequence[str]]) -> list[dict[str, nn.Parameter]]:
    found = [{n: p for n, p in parameters.items() if any(_within(n, each) for each in names)} for names in parts]
    for names, part in zip(parts, found, strict=True):
        if unknown := [each for each in names if not any(_within(name, each) for name in part)]:
            shown = ", ".join([*parameters][:5]) + (", …" if len(parameters) > 5 else "")
            raise ValueError(
                f"fragments name {unknown[0]!r}, which has no trainable parameters here; expected names such as {shown}"
            )
        if not names:
            raise ValueError("a fragment is empty; expected names of modules or parameters in each")
    for name in parameters:
        count = sum(name in part for part in found)
        if count != 1:
            raise ValueError(
                f"{name!r} is in {count} fragments; expected each parameter in exactly one: "
                + ("name its module in one of them" if not count else "leave it to one of them")
            )
    return found


def _within(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")
