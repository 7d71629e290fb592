"""Gathers beside the computation: what FSDP starts goes on in a thread until it waits; `Coded` sends fewer bytes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from thinwire import trace
from thinwire.collectives import Group, all_gather, communication_thread
from thinwire.payloads import exponents
from thinwire.waits import refuse_captured

Step = Callable[[Group], None]


@final
class Started(dist.Work):
    """A gather that has been started. FSDP waits for the work that its all-gather returns, if it is one of torch's."""

    def __init__(self, future: "Future[Any]") -> None:
        super().__init__()
        self._future = future

    def check(self, group: Group) -> None:
        """As a step of the same lane, later: raise what it raised."""
        self._future.value()

    def wait(self, timeout: object = None) -> bool:
        """Wait, and raise what it raised; on a GPU, have the current stream wait for it."""
        self._future.wait()
        return True


@final
class Lane:
    """Works through gathers in the order they were started, on the communication thread.

    Making one is a collective. What a gather reads and writes must be kept until it has been waited for.
    """

    def __init__(self, group: Group) -> None:
        self._thread, self.size = communication_thread(group), group.size()

    def start(self, x: Tensor, *steps: Step) -> Started:
        """Start these steps, on the device of `x`, once what the current stream has been given is done.

        Without any, the wait is for all that has been started before.
        """

        @torch.no_grad()
        def take(group: Group) -> Tensor:
            for step in steps:
                step(group)
            return x  # a GPU's future waits for the streams of the tensors it holds

        return Started(self._thread.submit(take, x.device))


class Gather(ABC):
    """What FSDP calls in place of its all-gather; see torch's `FSDPModule.set_custom_all_gather`."""

    def __init__(self, modules: Sequence[Any], lane: Lane, first: Callable[[], Sequence[Step]] = tuple) -> None:
        """Get ready for modules that `fully_shard` was called with. `first` returns what comes before a gather."""
        self._modules, self.lane, self._first, self.sent_bytes, self._retired = modules, lane, first, 0, False

    def begin(self) -> None:
        """Have FSDP call this."""
        for module in self._modules:
            module.set_custom_all_gather(self)

    def retire(self) -> None:
        """Have FSDP gather parameters as they are from now on."""
        self._retired = True

    @torch.inference_mode(False)
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.inference_mode(False)
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Group, async_op: bool = False) -> Started:
        """Start gathering. In main memory, wait for it unless FSDP is to; a GPU's host never waits in here."""
        if self._retired or group.size() != self.lane.size:  # FSDP gathers what has been gathered, in a smaller mesh
            started = Started(all_gather(output_tensor, input_tensor, group))
        else:
            refuse_captured("parameters are gathered", "leave out gathers=")
            bring = partial(self._bring, output_tensor.view(group.size(), -1), input_tensor)
            started = self.lane.start(input_tensor, *self._first(), bring)
        if not async_op and not input_tensor.is_cuda:
            started.wait()
        return started

    @abstractmethod
    def _bring(self, rows: Tensor, x: Tensor, group: Group) -> None:
        """Write every rank's `x` into its row. `x` lies in this rank's."""

    def _arrived(self, mine: Tensor, group: Group) -> Tensor:
        arriving = mine.new_empty(group.size(), mine.numel())
        with trace.span("gather"):
            all_gather(arriving.view(-1), mine, group).wait()
        nbytes = (group.size() - 1) * mine.nbytes
        trace.count("gathered_bytes", nbytes)
        self.sent_bytes += nbytes
        return arriving


@final
class Coded(Gather):
    """Has the all-gathers of `modules`, on which `fully_shard` was called, send parameters coded; see `Lossless`.

    Ranks first tell each other how many bytes they have.
    """

    nbytes = 0

    def __init__(self, modules: Sequence[Any], groups: Sequence[Group]) -> None:
        super().__init__(modules, Lane(groups[0]))

    def refresh(self) -> None:
        """Return at once: every gather sends parameters exactly, so no rank has an outdated copy."""

    def compare(self) -> None:
        """Return at once, for the same reason."""

    def differing(self) -> list[str]:
        """Return nothing: no two ranks hold the same."""
        return []

    def remove(self) -> None:
        """Have gathers send parameters as they are."""
        self.retire()

    @override
    def _bring(self, rows: Tensor, x: Tensor, group: Group) -> None:
        with trace.span("encode"):
            mine = exponents.pack(x)
        longest = int(self._arrived(mine.new_tensor([mine.numel()], dtype=torch.int64), group).max())
        arrived = self._arrived(torch.nn.functional.pad(mine, (0, longest - mine.numel())), group)
        with trace.span("decode"):
            for rank, (out, buffer) in enumerate(zip(rows, arrived, strict=True)):
                if rank != group.rank():
                    exponents.unpack(out, buffer)
