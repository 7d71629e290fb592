"""`thinwire_lab.studies.gathers`: virtual workers train as real ones do."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from typer.testing import CliRunner

import thinwire as tw
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.cluster.worker import Emit
from thinwire_lab.cluster.workers import join_group, mesh
from thinwire_lab.problems.optimizers import BETAS
from thinwire_lab.studies.gathers import RATE, WAYS, WORKERS, app, batch_of, loss_of, problem_of, schedule_of

TRIED = "bf16;bf16, differences 4;qsgd, lossless"


def real(job: dict[str, Any], emit: Emit) -> None:
    """Train one way as one of four real workers, and emit the held-out losses."""
    join_group()
    problem, way, rank = problem_of(job), WAYS[job["way"]], dist.get_rank()
    model, over = deepcopy(problem.model), mesh(WORKERS, ("replicate", "shard"))["shard"]
    policy = MixedPrecisionPolicy(param_dtype=way.gathered, reduce_dtype=way.reduced)
    for module in (*model.blocks, model):  # type: ignore[misc]  # a ModuleList
        fully_shard(module, mesh=over, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS)
    schedule, losses = schedule_of(optimizer, job["steps"]), []
    if way.recipe:
        tw.scatter(model, tw.recipes.METHODS[way.recipe].make(), mesh=over, gathers=way.gathers)
    for step in range(1, job["steps"] + 1):
        loss_of(model, batch_of(problem, step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % job["every"] == 0:
            with torch.no_grad():
                loss = torch.stack([loss_of(model, batch) for batch in problem.held_out(rank, WORKERS)]).mean()
            dist.all_reduce(loss)
            losses.append(float(loss) / WORKERS)
    emit({"losses": losses})


@pytest.mark.slow
def test_virtual_workers_train_as_real_ones_and_runs_go_on(tmp_path: Path) -> None:
    text, file = tmp_path / "text", tmp_path / "runs.jsonl"
    text.write_bytes(Path(re.__file__).read_bytes() * 8)
    small = ["run", str(file), "--data", str(text), "--seeds", "0", "--steps", "6", "--every", "3", "--scale", "0.3"]
    for ways in (TRIED, "bf16"):
        done = CliRunner().invoke(app, [*small, "--ways", ways])
        assert done.exit_code == 0, done.output
    runs = [json.loads(line) for line in file.read_text().splitlines()]
    virtual = {run["way"]: [loss for _, loss in run["looks"]] for run in runs}
    assert len(runs) == len(virtual) == 3
    job = {"data": str(text), "seed": 0, "steps": 6, "every": 3, "scale": 0.3}
    with Cluster(WORKERS, None, f"{__name__}:real") as workers:
        for way, losses in virtual.items():
            for _, found in workers.run(job | {"way": way}):
                assert found["losses"] == pytest.approx(losses, rel=2e-3)
            assert losses[1] < losses[0]
    assert "| bf16 | virtual | 6 |" in CliRunner().invoke(app, ["table", str(file)]).output
