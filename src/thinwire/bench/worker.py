"""What a worker process does with the jobs it is sent."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.bench import problems
from thinwire.bench.cluster import interface_bytes
from thinwire.bench.data_parallel import DataParallel
from thinwire.bench.hybrid import Hybrid
from thinwire.bench.meter import Meter
from thinwire.bench.training import Emit, RowJob, train


def handle(job: dict[str, Any], emit: Emit) -> None:
    """Join the group at the first job, then train the row that `job` asks for."""
    join_group()
    options = job["problem"]
    data = None if options["data"] is None else Path(options["data"])
    problem = _build(options["name"], options["seed"], data, options["scale"])
    row = RowJob(**job["row"])
    kind = Hybrid if row.stages > 1 else DataParallel
    train(row, kind(row, problem, Meter(_sent_on_interface)), emit)


@functools.cache
def join_group() -> None:
    """Join the process group that the environment describes, once."""
    dist.init_process_group("gloo")


_build: Callable[..., problems.Problem] = functools.lru_cache(maxsize=1)(
    lambda name, seed, data, scale: problems.build(name, seed=seed, data=data, scale=scale)
)


def _sent_on_interface() -> tuple[int, int] | None:
    counters = interface_bytes()
    return None if counters is None else (counters[0], counters[2])
