"""Copies of a sharded model's parameters that all ranks keep, so that FSDP's all-gathers send differences.

Who writes to a shard cannot be seen in its version counter: optimizers that step many tensors in one call, and
`p.data`, leave that as it is. So ranks compare digests of their shards' bits: before and after an optimizer's step, and
when a forward pass begins. A shard that only optimizers have changed is sent as a difference, any other exactly.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as untraced

from thinwire import trace
from thinwire.collectives import Group, all_gather
from thinwire.gathers import Differences
from thinwire.integrations.sharding.fsdp import gathered_together
from thinwire.integrations.training.drift import differing, digest
from thinwire.integrations.training.gradients import local
from thinwire.integrations.training.optimizers import observe, stop_observing
from thinwire.kernels.memory import constant
from thinwire.waits import Verdict, noting, on_host

NOTHING, DIFFERENCE, EXACT = range(3)
"""What a parameter's next gather sends."""


@final
class Copies:
    """Has the all-gathers of `modules`, on which `fully_shard` was called, send through `how`; see `Differences`.

    One message of a byte for each parameter goes ahead of every forward pass: what has changed on which rank. In a
    backward pass the copies of its forward are used.
    """

    def __init__(
        self, modules: Sequence[Any], how: Differences, group: Group, names: Mapping[nn.Parameter, str]
    ) -> None:
        self._group, self._names = group, names
        self._verdict, self._agreements = Verdict(), 0
        copies = [_Copy(p, how, group, self._verdict, self._agree_outside) for p in map(gathered_together, modules)]
        self._copies = [each for each in copies if each.parameters]
        for module, copy in zip(modules, copies, strict=True):
            module.set_custom_all_gather(copy)
        self._place = {p: i for i, p in enumerate(p for each in self._copies for p in each.parameters)}
        self._gathered = self._known = self._digests(list(self._place))
        self._written = self._gathered.new_ones(len(self._place), dtype=torch.bool)
        self._outermost: weakref.ref[nn.Module] | None = None
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
        device = self._written.device
        found = {self._names[p]: x.to(device) for each in self._copies for p, x in each.of_parameters()}
        return differing(found, self._group)

    def remove(self) -> None:
        """Have gathers send parameters as they are, and drop the copies."""
        stop_observing(self)
        while self._hooks:
            self._hooks.pop().remove()
        for each in self._copies:
            each.retire()

    def about_to_take(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what somebody else has written before this optimizer steps."""
        at, now = self._of(optimizer)
        self._written[at] |= (now != self._known[at]).any(dim=1)

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
            self._outermost = weakref.ref(module)
            self._agree()

    @untraced  # nor does Dynamo trace FSDP's own hooks
    def _after_forward(self, module: nn.Module, inputs: object, output: object) -> None:
        if self._outermost and self._outermost() is module:
            self._outermost = None

    def _agree_outside(self) -> None:
        """Agree if somebody gathers outside of any forward and backward pass, as `module.unshard()` does."""
        if self._outermost is None and not _in_backward():
            self._agree()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _agree(self) -> None:
        """Agree on what every parameter's next gather sends."""
        now = self._digests(list(self._place))
        spoilt = torch.cat([each.spoilt().expand(len(each.parameters)) for each in self._copies])
        exact = self._written | spoilt | (now != self._known).any(dim=1)
        changed = (now != self._gathered).any(dim=1)
        mine = torch.where(exact, EXACT, changed * DIFFERENCE).to(torch.uint8)
        everyone = mine.new_empty(self._group.size() * len(mine))
        all_gather(everyone, mine, self._group).wait()
        self._agreements += (nbytes := (self._group.size() - 1) * mine.nbytes)
        trace.count("gathered_bytes", nbytes)
        modes = everyone.view(self._group.size(), -1).amax(dim=0).tolist()
        self._verdict.read()
        self._verdict.clear()
        for each in self._copies:
            each.want([modes[self._place[p]] for p in each.parameters])
        self._known = self._gathered = now
        self._written.zero_()


@final
class _Copy:
    """The copy of what one `fully_shard` gathers; FSDP calls it in place of its all-gather.

    Its `rows` have each rank's shards, one after another and padded, as FSDP gathers them.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        how: Differences,
        group: Group,
        verdict: Verdict,
        prepare: Callable[[], None],
    ) -> None:
        self.parameters, self._how, self._verdict, self._prepare = parameters, how, verdict, prepare
        self._size, self._rank = group.size(), group.rank()
        self._lengths = [-(-p.shape[0] // self._size) * p.shape[1:].numel() for p in parameters]
        self._modes = [EXACT] * len(parameters)
        self._retired, self._spoilt, self.sent_bytes = False, torch.zeros((), dtype=torch.bool), 0
        self.rows: Tensor | None = None
        self._ready: Any = None

    def spoilt(self) -> Tensor:
        """Return whether this rank's last difference was not finite, on the device of its parameters (1)."""
        with self._in_order(self.parameters[0]):
            return self._spoilt.to(self.parameters[0].device)[None]

    def want(self, modes: Sequence[int]) -> None:
        """Note what the next gather is to send for each parameter, unless more is due already."""
        self._modes = [max(pair) for pair in zip(self._modes, modes, strict=True)]

    def of_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Return each parameter with its part of the copy."""
        if self.rows is not None:
            yield from zip(self.parameters, self.rows.split(self._lengths, dim=1), strict=True)

    def retire(self) -> None:
        """Have gathers send parameters as they are from now on."""
        self._retired, self.rows = True, None

    @torch.inference_mode(False)
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Group, async_op: bool = False) -> None:
        """Bring the copy up to date, and give it as what was gathered."""
        if self._retired or group.size() != self._size:  # FSDP gathers what has been gathered, in a smaller mesh
            all_gather(output_tensor, input_tensor, group).wait()
            return
        self._prepare()
        with self._in_order(input_tensor), noting(self._verdict):
            self._bring(output_tensor.view(self._size, -1), input_tensor, group)
            self._modes = [NOTHING] * len(self._modes)

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
            payload = self._how.encode(difference, [self._lengths[i] for i in moved])
            self._spoilt = ~payload.values.isfinite().all()
            values = payload.of_each(self._arrived(payload.to_buffer(), group))
            for place, arrived in self._columns(rows, moved, values):
                place.add_(arrived)
        elif exact:
            self._spoilt = torch.zeros_like(self._spoilt)
        if exact or moved:
            self._keep(rows)

    def _difference(self, parts: Sequence[Tensor], moved: Sequence[int]) -> Tensor:
        assert self.rows is not None  # else all is sent exactly
        wide = torch.promote_types(parts[0].dtype, torch.float32)
        held = self.rows[self._rank].to(parts[0].device, non_blocking=True).split(self._lengths)
        return torch.cat([parts[i].to(wide) - held[i].to(wide) for i in moved])

    def _arrived(self, mine: Tensor, group: Group) -> Tensor:
        """Return what each rank sends, as rows."""
        arriving = mine.new_empty(self._size, mine.numel())
        with trace.span("gather"):
            all_gather(arriving.view(-1), mine, group).wait()
        nbytes = (self._size - 1) * mine.nbytes
        trace.count("gathered_bytes", nbytes)
        self.sent_bytes += nbytes
        return arriving

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

    @contextmanager
    def _in_order(self, x: Tensor) -> Iterator[None]:
        """Have the current stream go on where the last one left the copy."""
        if not x.is_cuda:
            yield
            return
        stream = torch.cuda.current_stream(x.device)
        if self._ready is not None:
            stream.wait_event(self._ready)
        yield
        self._ready = stream.record_event()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0
