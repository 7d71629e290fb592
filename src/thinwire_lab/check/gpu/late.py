"""Do means wait for what has not arrived yet? A group whose collectives end late, on a stream that nobody else uses.

NCCL's collectives end on a stream of their own, some microseconds later. Here they end milliseconds later, and until
then the place for what arrives holds rubbish. A recipe that looks too early gets other means than with a group whose
collectives are over at once.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from thinwire.kernels import replay
from thinwire_lab.check.findings import Wrong
from thinwire_lab.check.gpu.buckets import WORLD, Case, Work
from thinwire_lab.check.gpu.counting import patched

_CYCLES = 20_000_000  # some ten milliseconds of a GPU
_Group: Any = dist.ProcessGroup  # whose stubs want every old overload of what is overridden


class LateGroup(_Group):  # type: ignore[misc]  # so its base has no type
    """Rank 0 of four, of which the others send what it sends. Collectives end late."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(0, WORLD)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return one that is nobody's."""
        return "late"

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Leave a tensor as it is, as the group without delay does."""
        (x,) = tensors
        sent = x.clone()
        x.view(torch.uint8).fill_(255)
        return self._ended(x, lambda: x.copy_(sent))

    def all_gather_single(self, out: Tensor, mine: Tensor, opts: Any = None) -> dist.Work:
        """Gather equal tensors."""
        out.view(torch.uint8).fill_(255)
        sent = mine.clone()
        return self._ended(out, lambda: out.view(WORLD, -1).copy_(sent.view(1, -1)))

    _allgather_base = all_gather_single  # its name before torch 2.13

    def arrive(self) -> None:
        """Have collectives end that wait for a thread, on a CPU, and wait until they have."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._over.clear()
        self._threads.clear()

    def _ended(self, x: Tensor, work: Callable[[], object]) -> dist.Work:
        future: Future[list[Tensor]] = Future(devices=[x.device] if x.is_cuda else None)
        if self._stream is None:
            self._threads.append(threading.Thread(target=self._later, args=(work, future, x)))
            self._threads[-1].start()
        else:
            self._stream.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(_CYCLES)
                work()
                future.set_result([x])
        return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]  # not in stubs

    def _later(self, work: Callable[[], object], future: "Future[list[Tensor]]", x: Tensor) -> None:
        self._over.wait()
        with torch.no_grad():
            work()
        future.set_result([x])


def check_late(case: Case, device: torch.device, steps: int = 14) -> None:
    """Compare a recipe's means with those of a group without delay, where nothing is captured. Raises Wrong."""
    plain, late = Work(case, device), Work(case, device)
    late.gradients = plain.gradients
    late.group = LateGroup(device)
    for step in range(steps):
        plain.gradients.normal_()
        for work in (plain, late):
            work.prepare()
        with patched((replay, "LANES", {})):
            plain.step()
        future = late.start()
        if device.type == "cpu":
            late.group.arrive()
        future.wait()
        late.end()
        if not torch.equal(late.flat, plain.flat):
            raise Wrong(f"step {step}: {int((late.flat != plain.flat).sum())} elements of the mean differ")
