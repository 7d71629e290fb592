"""The workers: they run a loop with a recipe and report, as JSON, how it ended or what it raised."""

import functools
import os
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire_lab.check.findings import first_line
from thinwire_lab.cluster.worker import Emit
from thinwire_lab.studies.loops.material import Unavailable
from thinwire_lab.studies.loops.measure import Ended, identical, measure
from thinwire_lab.studies.loops.recipes import BY_NAME

PATIENCE = timedelta(seconds=30)


def handle(job: dict[str, Any], emit: Emit) -> None:
    """Join a new group, run `job`, and emit one event: the result, or the exception."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(job["store"], world)  # type: ignore[attr-defined]  # torch's stubs do not export it
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
    try:
        emit({"kind": "ended"} | _run(job["loop"], job["way"], job["steps"]))
    except Unavailable as reason:
        emit({"kind": "unavailable", "message": str(reason)})
    except Exception as error:
        emit({"kind": "raised", "message": first_line(error), "traceback": traceback.format_exc()})
    dist.destroy_process_group()


def _run(loop: str, name: str | None, steps: int) -> dict[str, Any]:
    plain = _plain(loop, steps)
    found = plain if name is None else measure(loop, BY_NAME[name], steps)
    return {
        "last_loss": found.last_loss,
        "plain_loss": plain.last_loss,
        "share": found.share(plain),
        "distance": found.distance(plain),
        "identical": identical(found.end),
        "skipped": found.skipped,
        "plain_skipped": plain.skipped,
    }


@functools.lru_cache(maxsize=1)
def _plain(loop: str, steps: int) -> Ended:
    return measure(loop, None, steps)
