"""What a worker process does with the jobs it is sent."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.tools import problems
from thinwire.tools.bench.data_parallel import DataParallel
from thinwire.tools.bench.hybrid import Hybrid
from thinwire.tools.bench.training import RowJob, train
from thinwire.tools.cluster.link import Meter, interface_bytes
from thinwire.tools.cluster.worker import Emit
from thinwire.tools.cluster.workers import join_group


def handle(job: dict[str, Any], emit: Emit) -> None:
    """Join the group at the first job, then train the row that `job` asks for."""
    join_group()
    options = job["problem"]
    data = None if options["data"] is None else Path(options["data"])
    problem = _build(options["name"], options["seed"], data, options["scale"])
    row = RowJob(**job["row"])
    kind = Hybrid if row.stages > 1 else DataParallel
    train(row, kind(row, problem, Meter(_sent_on_interface)), emit)


_build: Callable[..., problems.Problem] = functools.lru_cache(maxsize=1)(
    lambda name, seed, data, scale: problems.build(name, seed=seed, data=data, scale=scale)
)


def _sent_on_interface() -> tuple[int, int] | None:
    counters = interface_bytes()
    return None if counters is None else (counters[0], counters[2])
