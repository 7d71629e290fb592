"""A row in data parallelism: every worker has the whole model."""

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from thinwire import trace
from thinwire.integrations.training.drift import differing
from thinwire_lab.bench.methods import BENCHED
from thinwire_lab.bench.options import RowJob
from thinwire_lab.cluster.link import Meter
from thinwire_lab.cluster.workers import wrapped
from thinwire_lab.problems import Problem
from thinwire_lab.problems.base import held_out_loss
from thinwire_lab.problems.optimizers import optimizers, step_all, zero_all


@final
class Slowness:
    """Within `with`, work takes `factor` times as long: it first sleeps by what this thread computed the last time."""

    def __init__(self, factor: float) -> None:
        self._factor, self._busy, self._start = factor, 0.0, 0.0

    def __enter__(self) -> None:
        time.sleep((self._factor - 1) * self._busy)
        self._start = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._busy = time.thread_time() - self._start


@final
class DataParallel:
    """See `worker.Run`."""

    def __init__(self, job: RowJob, problem: Problem, meter: Meter) -> None:
        method = BENCHED[job.recipe]
        self.meter, self.seconds = meter, 0.0
        self._problem = problem
        cap = 1 << 20 if method.one_bucket else None
        self._model = wrapped(copy.deepcopy(problem.model), bucket_cap_mb=cap)
        self._optimizers = optimizers(job.optimizer, self._model.module, problem)
        self.handle = method.install(self._model, self._optimizers, job.scheduled_density)
        self._slowness = Slowness(job.slowness(dist.get_rank()))

    def step(self, step: int) -> dict[str, float]:
        """Take one step; the batch is ready before the clock starts."""
        batch = self._problem.batch(step, dist.get_rank(), dist.get_world_size())
        zero_all(self._optimizers)
        self._model.train()
        with self._slowness:
            times = timed_step(lambda: self._problem.loss(self._model, batch), lambda: step_all(self._optimizers))
        self.seconds += times["total"]
        dense = dense_bytes(self._model.module, dist.get_world_size())
        return times | {"dense_bytes": dense} | self.meter.read(times["sent_bytes"])

    def held_out_loss(self) -> float:
        """Return the mean loss over every rank's share."""
        return mean_held_out(self._problem, self._model.module, self.meter)

    def differing(self) -> list[str]:
        """Compare the replicas."""
        return differing(dict(self._model.module.named_parameters()), self._model.process_group)


def mean_held_out(problem: Problem, model: nn.Module, meter: Meter) -> float:
    """Return the mean over ranks of the loss of each one's model on its share of the held-out set."""
    mean = held_out_loss(problem, model, dist.get_rank(), dist.get_world_size())
    dist.all_reduce(mean)
    meter.skip()
    return float(mean) / dist.get_world_size()


def dense_bytes(model: nn.Module, world: int) -> float:
    """Return the bytes that each of `world` ranks sends in a ring all-reduce of float32 gradients."""
    return 2 * (world - 1) / world * 4.0 * sum(p.numel() for p in model.parameters())


def parts(total: float, *, encode: float, exchange: float, decode: float = 0.0) -> dict[str, float]:
    """Return where the seconds of a step went; what is left is computing."""
    compute = max(0.0, total - encode - exchange - decode)
    return {"compute": compute, "encode": encode, "exchange": exchange, "decode": decode, "total": total}


def timed_step(forward: Callable[[], Tensor], update: Callable[[], Any]) -> dict[str, float]:
    """Run forward, backward and update, and return where the time went, and the bytes that payloads declared.

    `exchange` is the communication that backward could not hide: from the last gradient until backward returns, less
    the decoding in between. Work inside callbacks of PyTorch's own hooks counts there too.
    """
    computed, when_over = list[float](), Variable._execution_engine.queue_callback
    with trace.listen(trace.Recorder()) as recorder:
        start = time.perf_counter()
        loss = forward()
        # Queued before DDP's own callback, so it runs when the last gradient is there and before backward waits.
        loss.register_hook(lambda _: when_over(lambda: computed.append(time.perf_counter())))
        loss.backward()
        reduced = time.perf_counter()
        update()
        end = time.perf_counter()
    encode = recorder.seconds("encode")
    decode = recorder.seconds("decode", since=computed[0])
    exchange = reduced - computed[0] - decode - recorder.seconds("encode", since=computed[0])
    sent = {"sent_bytes": recorder.totals.get("sent_bytes", 0.0)}
    return parts(end - start, encode=encode, exchange=exchange, decode=decode) | sent


@dataclass
class OfThread(trace.Recorder):
    """A recorder that tells this thread's spans from those of others, such as the communication thread's."""

    own: float = 0.0
    _thread: int = field(default_factory=threading.get_ident)

    def took(self, name: str, start: float, end: float) -> None:
        """Keep the span."""
        super().took(name, start, end)
        if name in ("encode", "decode") and threading.get_ident() == self._thread:
            self.own += end - start

    def split(self, total: float, busy: float) -> dict[str, float]:
        """Return the parts of a step in which this thread used the processor for `busy` seconds."""
        encode, decode = self.seconds("encode"), self.seconds("decode")
        compute = max(0.0, min(busy, total) - self.own)
        waiting = max(0.0, total - compute - encode - decode)
        return {"compute": compute, "encode": encode, "exchange": waiting, "decode": decode, "total": total}
