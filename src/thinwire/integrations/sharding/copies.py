"""Copies of a sharded model's parameters that all ranks keep, so that FSDP's all-gathers send differences.

Who writes to a shard cannot be seen in its version counter: optimizers that step many tensors in one call, and
`p.data`, leave that as it is. So ranks compare digests of their shards' bits: before and after an optimizer's step, and
at the first gather of a forward pass. A shard that only optimizers have changed is sent as a difference, any other
exactly.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as untraced
from typing_extensions import override

from thinwire import trace
from thinwire.collectives import Group, all_gather
from thinwire.gathers import Differences
from thinwire.integrations.sharding.fsdp import gathered_together
from thinwire.integrations.sharding.lane import Gather, Lane, Step
from thinwire.integrations.training.drift import differing, digest
from thinwire.integrations.training.gradients import local
from thinwire.integrations.training.optimizers import observe, stop_observing
from thinwire.kernels.memory import constant
from thinwire.waits import Verdict, noting, on_host

_log = logging.getLogger("thinwire")

NOTHING, DIFFERENCE, EXACT = range(3)
"""What a parameter's next gather sends."""


@final
class Copies:
    """Has the all-gathers of `modules`, on which `fully_shard` was called, send through `how`; see `Differences`.

    One message of a byte for each parameter goes ahead of a forward pass's first gather: what has changed on which
    rank. In a backward pass the copies of its forward are used. `groups`: the ranks that gather together, then those of
    other islands that hold the same shards, if any.
    """

    def __init__(
        self, modules: Sequence[Any], how: Differences, groups: Sequence[Group], names: Mapping[nn.Parameter, str]
    ) -> None:
        self._groups, self._names, self._lane = groups, names, Lane(groups[0])
        self._verdict, self._agreements = Verdict(), 0
        held = {tuple(gathered_together(module)): module for module in modules}  # once for a list of modules
        copies = {
            module: _Copy(p, how, self._verdict, self._lane, groups[0].rank(), self._agreement)
            for p, module in held.items()
        }
        for module, copy in copies.items():
            module.set_custom_all_gather(copy)
        self._of_modules = {module: copy for module, copy in copies.items() if copy.parameters}
        self._copies = list(self._of_modules.values())
        self._place = self._places()
        self._gathered = self._known = self._digests(list(self._place))
        self._written = self._gathered.new_ones(len(self._place), dtype=torch.bool)
        self._outermost: weakref.ref[nn.Module] | None = None
        self._agreed = False
        self._hooks = [module.register_forward_pre_hook(self._before_forward, prepend=True) for module in modules]
        self._hooks += [module.register_forward_hook(self._after_forward, always_call=True) for module in modules]
        observe(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(each.rows.nbytes for each in self._copies if each.rows is not None)

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent so far."""
        return self._agreements + sum(each.sent_bytes for each in self._copies)

    def refresh(self) -> None:
        """Have the next gathers send parameters exactly, on all ranks."""
        self._written.fill_(True)

    def differing(self) -> list[str]:
        """Return the names of the parameters whose copies differ between ranks; a collective."""
        self._wait()
        device = self._written.device
        found = {self._names[p]: x.to(device) for each in self._copies for p, x in each.of_parameters()}
        return differing(found, *self._groups)

    def compare(self) -> None:
        """Have the next gathers send exactly what not all islands have sent alike; a collective of them all.

        Whoever calls `refresh` in one island alone has it compute with another copy until then.
        """
        for others in self._groups[1:]:
            sent = torch.tensor([n % 256 for each in self._copies for n in each.since], dtype=torch.uint8)
            mine = sent.to(self._written.device)
            rows = mine.new_empty(others.size(), len(mine))
            all_gather(rows.view(-1), mine, others).wait()
            apart = (rows != mine).any(dim=0)
            self._written |= apart
            marks = iter(apart.tolist())
            for each in self._copies:
                each.since = [n * (not next(marks)) for n in each.since]  # alike again, as far as is known
            if apart.any():
                _log.warning(
                    "the copies of %d parameters differ between islands, as after refresh() or state_dict() in one "
                    "of them alone: the next gathers send them exactly. Call these on every rank",
                    int(apart.sum()),
                )

    def remove(self) -> None:
        """Have gathers send parameters as they are, and drop the copies."""
        stop_observing(self)
        while self._hooks:
            self._hooks.pop().remove()
        self._wait()
        for each in self._copies:
            each.retire()

    def _places(self) -> dict[nn.Parameter, int]:
        return {p: i for i, p in enumerate(p for each in self._copies for p in each.parameters)}

    def _follow(self) -> None:
        """Go on with what has replaced parameters, as `load_state_dict(assign=True)` does."""
        names = dict[nn.Parameter, str]()
        for module, copy in self._of_modules.items():
            before, copy.parameters = copy.parameters, gathered_together(module)
            names |= {new: self._names[old] for old, new in zip(before, copy.parameters, strict=True)}
        self._names, self._place = names, self._places()

    def _wait(self) -> None:
        self._lane.start(self._known).wait()

    def about_to_take(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what somebody else has written before this optimizer steps."""
        at, now = self._of(optimizer)
        self._written[at] |= now != self._known[at]

    def taken(self, optimizer: torch.optim.Optimizer, *, evaluated: bool = False) -> None:
        """Note what the optimizer has written."""
        at, now = self._of(optimizer)
        self._known = self._known.index_copy(0, at, now)

    def _of(self, optimizer: torch.optim.Optimizer) -> tuple[Tensor, Tensor]:
        held = [p for group in optimizer.param_groups for p in group["params"] if p in self._place]
        return constant(tuple(map(self._place.__getitem__, held)), torch.int64, self._known.device), self._digests(held)

    @torch.no_grad()
    def _digests(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        found = [digest(local(p)) for p in parameters]
        return torch.stack(found) if found else self._known[:0]

    @untraced  # nor does Dynamo trace FSDP's own hooks
    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        if _in_backward():  # a checkpoint recomputes
            return
        outermost = self._outermost and self._outermost()
        if outermost is None or outermost is module:
            self._outermost, self._agreed = weakref.ref(module), False

    @untraced  # nor does Dynamo trace FSDP's own hooks
    def _after_forward(self, module: nn.Module, inputs: object, output: object) -> None:
        if self._outermost and self._outermost() is module:
            self._outermost = None

    @torch.inference_mode(False)
    def _agreement(self) -> Sequence[Step]:
        """Return what has ranks agree on what every parameter's next gather sends, if it is time to.

        That is once in a forward pass and never in backward, but before each gather outside, as of `module.unshard()`.
        """
        if _in_backward() or (self._outermost is not None and self._agreed):
            return ()
        self._follow()
        now = self._digests(list(self._place))
        exact = self._written | (now != self._known)
        self._agreed, self._known, self._written = True, now, torch.zeros_like(exact)
        return (partial(self._agree, exact, now),)

    def _agree(self, exact: Tensor, now: Tensor, group: Group) -> None:
        spoilt = torch.cat([each.spoilt.to(now.device).expand(len(each.parameters)) for each in self._copies])
        changed = now != self._gathered
        mine = torch.where(exact | spoilt, EXACT, changed * DIFFERENCE).to(torch.uint8)
        everyone = mine.new_empty(group.size() * len(mine))
        all_gather(everyone, mine, group).wait()
        self._agreements += (nbytes := (group.size() - 1) * mine.nbytes)
        trace.count("gathered_bytes", nbytes)
        modes = everyone.view(group.size(), -1).amax(dim=0).tolist()
        for each in self._copies:
            each.want([modes[self._place[p]] for p in each.parameters])
        self._gathered = now
        self._verdict.read()
        self._verdict.clear()


@final
class _Copy(Gather):
    """The copy of what one `fully_shard` gathers.

    Its `rows` have each rank's shards, one after another and padded, as FSDP gathers them. `since`: how many
    differences each parameter has taken since it was exact. `spoilt`: whether this rank's last difference was not
    finite (1).
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        how: Differences,
        verdict: Verdict,
        lane: Lane,
        rank: int,
        first: Callable[[], Sequence[Step]],
    ) -> None:
        super().__init__(lane)
        self.parameters, self._how, self._verdict, self._rank, self._agreement = parameters, how, verdict, rank, first
        self._lengths = [-(-p.shape[0] // lane.size) * p.shape[1:].numel() for p in parameters]
        self._modes, self.since = [EXACT] * len(parameters), [0] * len(parameters)
        self.spoilt = torch.zeros(1, dtype=torch.bool)
        self.rows: Tensor | None = None

    def want(self, modes: Sequence[int]) -> None:
        """Note what the next gather is to send for each parameter, unless more is due already."""
        self._modes = [max(pair) for pair in zip(self._modes, modes, strict=True)]

    def of_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Return each parameter with its part of the copy."""
        if self.rows is not None:
            yield from zip(self.parameters, self.rows.split(self._lengths, dim=1), strict=True)

    @override
    def retire(self) -> None:
        super().retire()
        self.rows = None

    @override
    def _first(self) -> Sequence[Step]:
        return self._agreement()

    @override
    def _bring(self, rows: Tensor, x: Tensor, group: Group) -> None:
        modes = self._modes
        if self.rows is None:
            modes = [EXACT] * len(modes)
        elif self._how.exact(x.dtype):
            modes = [EXACT if mode else NOTHING for mode in modes]
        exact, moved = ([i for i, mode in enumerate(modes) if mode == which] for which in (EXACT, DIFFERENCE))
        parts = x.split(self._lengths)
        whole = torch.cat([parts[i] for i in exact]) if exact else None
        difference = self._difference(parts, moved) if moved else None
        if self.rows is not None:
            rows.copy_(self.rows, non_blocking=True)  # and over x, which lies among them
        if whole is not None:
            for place, arrived in self._columns(rows, exact, self._arrived(whole, group)):
                place.copy_(arrived)
        if difference is not None:
            with noting(self._verdict):
                payload = self._how.encode(difference, [self._lengths[i] for i in moved])
                self.spoilt = ~payload.values.isfinite().all()[None]
                values = payload.of_each(self._arrived(payload.to_buffer(), group))
            for place, arrived in self._columns(rows, moved, values):
                place.add_(arrived)
        elif exact:
            self.spoilt = torch.zeros_like(self.spoilt)
        if exact or moved:
            self._keep(rows)
        self.since = [(n + mode) * (mode != EXACT) for mode, n in zip(modes, self.since, strict=True)]
        self._modes = [NOTHING] * len(modes)

    def _difference(self, parts: Sequence[Tensor], moved: Sequence[int]) -> Tensor:
        assert self.rows is not None  # else all is sent exactly
        wide = torch.promote_types(parts[0].dtype, torch.float32)
        held = self.rows[self._rank].to(parts[0].device, non_blocking=True).split(self._lengths)
        pairs = [(parts[i].to(wide), held[i].to(wide)) for i in moved]
        return torch.cat([(x - y).masked_fill_(x == y, 0) for x, y in pairs])  # not so where an infinity stays

    def _columns(self, rows: Tensor, which: Sequence[int], values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the columns of these parameters, each with its part of `values`; neighbours are joined."""
        places = rows.split(self._lengths, dim=1)
        if len(which) == len(places):
            return iter([(rows, values)])
        parts = values.split([self._lengths[i] for i in which], dim=1)
        return zip((places[i] for i in which), parts, strict=True)

    def _keep(self, rows: Tensor) -> None:
        if self.rows is None:
            on_gpu, host = not on_host(rows), self._how.host
            device = "cpu" if host else rows.device
            self.rows = torch.empty(rows.shape, dtype=rows.dtype, device=device, pin_memory=on_gpu and host)
        self.rows.copy_(rows, non_blocking=True)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0
