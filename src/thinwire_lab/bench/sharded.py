"""A row on sharded models: FSDP2 shards within an island, and islands exchange gradients; or there is one island."""

import copy
import gc
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire import trace
from thinwire.integrations.training.drift import differing
from thinwire_lab.bench.data_parallel import OfThread, dense_bytes, mean_held_out
from thinwire_lab.bench.methods import BENCHED
from thinwire_lab.bench.options import RowJob
from thinwire_lab.cluster.link import Meter
from thinwire_lab.cluster.workers import mesh
from thinwire_lab.problems import Problem
from thinwire_lab.problems.optimizers import optimizers, step_all, zero_all


@final
class Sharded:
    """See `worker.Run`. Islands × shards, in the order of ranks: the workers of an island are neighbours.

    Bytes are an island's: what its link carries to the others. If there is one alone, each of its workers has a link,
    and bytes are this worker's.
    """

    def __init__(self, job: RowJob, problem: Problem, meter: Meter) -> None:
        self._before = _tensor_bytes()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        method, whole = BENCHED[job.recipe], mesh(job.shards, ("replicate", "shard"))
        self.meter, self.seconds = meter, 0.0
        self._keeps, self._owed = job.gathers.startswith("differences"), 0.0
        self._problem, self._islands = problem, whole.size(0)
        self._replicas, self._island = whole.get_group("replicate"), whole.get_group("shard")
        self._model: Any = copy.deepcopy(problem.model)
        over = whole if method.shards_natively and self._islands > 1 else whole["shard"]
        _shard(self._model, over, narrow=job.recipe == "fsdp_bf16", gathered=bool(job.gathers))
        self._optimizers = optimizers(job.optimizer, self._model, problem)
        assert method.install_sharded is not None  # options have seen to that
        density = job.scheduled_density
        self.handle = method.install_sharded(self._model, whole, self._optimizers, density, job.gathers)

    def step(self, step: int) -> dict[str, float]:
        """Take one step; the batch is ready before the clock starts.

        Whenever this worker did not compute, it waited: for a link, a neighbour or the processor.
        """
        batch = self._problem.batch(step, dist.get_rank(), dist.get_world_size())
        zero_all(self._optimizers)
        self._model.train()
        recorder = OfThread()
        with trace.listen(recorder):
            start, busy = time.perf_counter(), time.thread_time()
            self._problem.loss(self._model, batch).backward()
            step_all(self._optimizers)
            total, busy = time.perf_counter() - start, time.thread_time() - busy
        self.seconds += total
        sent, dense = self._declared(recorder.totals.get("sent_bytes", 0.0))
        read = self.meter.read(sent)
        if "measured" in read:  # an evaluation has gathered what this step would have
            read["measured"] += round(self._owed)
            self.meter.total += round(self._owed)
        self._owed = 0.0
        return recorder.split(total, busy) | {"sent_bytes": sent, "dense_bytes": dense} | read

    def _declared(self, mine: float) -> tuple[float, float]:
        """Return the bytes that gradients took on the link, and what uncompressed ones would have taken."""
        if self._islands == 1:
            return mine, dense_bytes(self._model, self._island.size()) / 2
        declared = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(declared, group=self._island)
        return float(declared), dense_bytes(self._model, self._islands)

    def held_out_loss(self) -> float:
        """Return the mean loss over every rank's share."""
        recorder = trace.Recorder()
        with trace.listen(recorder):
            mean = mean_held_out(self._problem, self._model, self.meter)
        self._owed += recorder.totals.get("gathered_bytes", 0.0) if self._keeps else 0.0
        for module in self._model.modules():
            if hasattr(module, "reshard"):
                module.reshard()  # FSDP leaves the root whole after an evaluation
        return mean

    def process(self) -> dict[str, int | None]:
        """Return the fields of `Process`."""
        told = dict[str, int]()
        with suppress(OSError):
            lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
            told = {line[0]: 1024 * int(line[1]) for line in lines if line[0] in ("VmRSS:", "VmHWM:")}
        return {"tensors": _tensor_bytes() - self._before, "resident": told.get("VmRSS:"), "peak": told.get("VmHWM:")}

    def differing(self) -> list[str]:
        """Compare this worker's shards with their replicas, and what it gathers with what all others do."""
        found = differing(dict(self._model.named_parameters()), self._replicas)
        for module in self._model.modules():
            if hasattr(module, "unshard"):
                module.unshard()
        whole = differing(dict(self._model.named_parameters()), self._island, self._replicas)
        return sorted({*found, *whole})


def _shard(model: nn.Module, over: Any, *, narrow: bool, gathered: bool) -> None:
    """Make a group of each block in a list of them, and one of the rest. `gathered` in bfloat16, `narrow` all of it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes seconds

    param_dtype = torch.bfloat16 if narrow or gathered else None
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.bfloat16 if narrow else torch.float32)
    blocks = [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]
    for block in blocks:
        fully_shard(block, mesh=over, mp_policy=policy)
    fully_shard(model, mesh=over, mp_policy=replace(policy, output_dtype=torch.float32))  # bfloat16 cuts losses short


def _tensor_bytes() -> int:
    """Return the bytes of all tensors of this process."""
    gc.collect()
    found = [
        x.untyped_storage() for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu"
    ]
    return sum({each.data_ptr(): each.nbytes() for each in found}.values())
