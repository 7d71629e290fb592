"""Copies of a sharded model's parameters that all ranks keep, so that FSDP's all-gathers send differences.

Who writes to a shard cannot be seen in its version counter: optimizers that step many tensors in one call, and
`p.data`, leave that as it is. So ranks compare digests of their shards' bits: before and after an optimizer's step, and
at the first gather of a forward pass. A shard that only optimizers have changed is sent as a difference, any other
exactly.
"""

import logging
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
from thinwire.integrations.sharding.fsdp import records
from thinwire.integrations.sharding.lane import Gather, Lane, Started, Step
from thinwire.integrations.training.drift import differing, digest
from thinwire.integrations.training.gradients import local
from thinwire.integrations.training.optimizers import observe, running, stop_observing
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
        self._modules, self._groups, self._lane = set(modules), groups, Lane(groups[0])
        self._verdict, self._agreements = Verdict(), 0
        held = {tuple(records(module)): module for module in modules if records(module)}  # once for a list of modules
        rank, first = groups[0].rank(), self._agreed
        self._copies = [_Copy(m, names, how, self._verdict, self._lane, rank, first) for m in held.values()]
        self._records = [record for each in held for record in each]
        self._gathered = self._known = self._digests(self._parameters)
        self._written, self._sent = torch.ones_like(self._known), torch.zeros_like(self._known)
        self._agreement: Started | None = None

    def begin(self) -> None:
        """Begin. The first gathers send parameters exactly."""
        for copy in self._copies:
            copy.begin()
        self._hooks = [module.register_forward_pre_hook(self._before_forward, prepend=True) for module in self._modules]
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
        self._written += 1

    def differing(self) -> list[str]:
        """Return the names of the parameters whose copies differ between ranks; a collective."""
        self._wait()
        device = self._written.device
        found = {name: x.to(device) for each in self._copies for name, x in each.parts().items()}
        return differing(found, *self._groups)

    def compare(self) -> None:
        """Have the next gathers send exactly what not all islands have sent alike; a collective of them all.

        Whoever calls `refresh` in one island alone has it compute with another copy until then.
        """
        for others in self._groups[1:]:
            sent = torch.tensor([n % 256 for each in self._copies for n in each.since], dtype=torch.uint8, device="cpu")
            mine = sent.to(self._written.device)
            rows = mine.new_empty(others.size(), len(mine))
            all_gather(rows.view(-1), mine, others).wait()
            apart = (rows != mine).any(dim=0)
            self._written += apart
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

    @property
    def _parameters(self) -> list[nn.Parameter]:
        """Those of now: `load_state_dict(assign=True)` replaces them."""
        return [record.sharded_param for record in self._records]

    def _wait(self) -> None:
        self._lane.start(self._known).wait()

    def about_to_take(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what somebody else has written before this optimizer steps."""
        self._note(*self._of(optimizer))

    def taken(self, optimizer: torch.optim.Optimizer, *, evaluated: bool = False) -> None:
        """Note what the optimizer has written."""
        at, now = self._of(optimizer)
        self._known = self._known.index_copy(0, at, now)

    def _note(self, at: Any, now: Tensor) -> None:
        self._written[at] += now != self._known[at]

    def _of(self, optimizer: torch.optim.Optimizer) -> tuple[Tensor, Tensor]:
        place = {p: i for i, p in enumerate(self._parameters)}
        held = [p for group in optimizer.param_groups for p in group["params"] if p in place]
        return constant(tuple(map(place.__getitem__, held)), torch.int64, self._known.device), self._digests(held)

    @torch.no_grad()
    def _digests(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        found = [digest(local(p)) for p in parameters]
        return torch.stack(found) if found else self._known[:0]

    @untraced  # nor does Dynamo trace FSDP's own hooks
    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        # In backward a checkpoint recomputes; a deeper one is part of another one's.
        if torch._C._current_graph_task_id() < 0 and self._depth() <= 1:
            self._agreement = None

    def _depth(self) -> int:
        """Return how many modules are in forward, by the stack: hooks do not learn of a pass that Ctrl-C ends."""
        return sum(held["self"] in self._modules for held in running(_FORWARD))

    @torch.inference_mode(False)
    def _agreed(self) -> Sequence[Step]:
        """Have ranks agree on what every parameter's next gather sends, if it is time to; return what raises if not.

        It is time once in a forward pass, and before each gather outside, as of `module.unshard()`; never in backward.
        """
        if torch._C._current_graph_task_id() >= 0:
            return ()
        if self._agreement is None or not self._depth():
            self._agreement = None
            now = self._digests(self._parameters)
            self._note(slice(None), now)
            self._known = now
            self._agreement = self._lane.start(now, partial(self._agree, now, self._written.clone()))
        return (self._agreement.check,)

    def _agree(self, now: Tensor, written: Tensor, group: Group) -> None:
        spoilt = torch.cat([each.spoilt.to(now.device).expand(len(each.since)) for each in self._copies])
        exact, changed = (written != self._sent) | spoilt, now != self._gathered
        mine = torch.where(exact, EXACT, changed * DIFFERENCE).to(torch.uint8)
        everyone = mine.new_empty(group.size() * len(mine))
        all_gather(everyone, mine, group).wait()
        self._agreements += (nbytes := (group.size() - 1) * mine.nbytes)
        trace.count("gathered_bytes", nbytes)
        modes = iter(everyone.view(group.size(), -1).amax(dim=0).tolist())
        for each in self._copies:
            each.want(modes)
        self._gathered, self._sent = now, torch.full_like(written, -1)
        self._verdict.read()  # if what has been decoded was malformed, all is sent exactly
        self._sent = written


_FORWARD = nn.Module._call_impl.__code__


@final
class _Copy(Gather):
    """The copy of what one `fully_shard` gathers.

    Its `rows` have each rank's shards, one after another and padded, as FSDP gathers them. `since`: how many
    differences each parameter has taken since it was exact. `spoilt`: whether this rank's last difference was not
    finite (1).
    """

    def __init__(
        self,
        module: Any,
        names: Mapping[nn.Parameter, str],
        how: Differences,
        verdict: Verdict,
        lane: Lane,
        rank: int,
        first: Callable[[], Sequence[Step]],
    ) -> None:
        super().__init__([module], lane, first)
        parameters = [record.sharded_param for record in records(module)]
        self.names, self._how, self._verdict, self._rank = [names[p] for p in parameters], how, verdict, rank
        self._lengths = [-(-p.shape[0] // lane.size) * p.shape[1:].numel() for p in parameters]
        self._modes, self.since = [EXACT] * len(parameters), [0] * len(parameters)
        self.spoilt = torch.zeros(1, dtype=torch.bool, device="cpu")
        self.rows: Tensor | None = None

    def want(self, modes: Iterator[int]) -> None:
        """Take from what the next gathers are to send what concerns this one, unless more is due already."""
        self._modes = [max(mode, next(modes)) for mode in self._modes]

    def parts(self) -> dict[str, Tensor]:
        """Return each parameter's part of the copy, by name; nothing if there is none yet."""
        rows = self.rows
        return {} if rows is None else dict(zip(self.names, rows.split(self._lengths, dim=1), strict=True))

    @override
    def retire(self) -> None:
        super().retire()
        self.rows = None

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
        difference = None
        if self.rows is not None and moved:  # else all is sent exactly
            wide = torch.promote_types(x.dtype, torch.float32)
            held = self.rows[self._rank].to(x.device, non_blocking=True).split(self._lengths)
            pairs = [(parts[i].to(wide), held[i].to(wide)) for i in moved]
            difference = torch.cat([(y - z).masked_fill_(y == z, 0) for y, z in pairs])  # not where an infinity stays
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
