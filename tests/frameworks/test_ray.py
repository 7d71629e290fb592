"""Ray Train: two workers, a failure, and the same next steps from a checkpoint of both."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.train", reason="Ray Train is not installed: pip install -e '.[ray]'")

import torch
from ddp_models import same
from ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from thinwire.frameworks import ray as ours

ROOT = Path(__file__).parents[2]
STEPS = 20


@pytest.mark.slow
@pytest.mark.timeout(900)  # Ray starts its workers twice, a minute each where there is a core for all
def test_workers_go_on_from_what_all_of_them_reported(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the example's model is from transformers, which is not installed")
    text = tmp_path / "text"
    text.write_bytes((ROOT / "CHANGELOG.md").read_bytes() * 4)
    options = ["--steps", str(STEPS), "--storage", str(tmp_path), "--again"]
    done = _run([str(text), *options])
    found = dict(re.findall(r"from (\d+: (?:step \d+|weights)):? ([^\n]*)", done.stdout))
    saved = STEPS // 2
    assert found.keys() == {
        *(f"0: step {step}" for step in (0, saved, STEPS - 1)),
        *(f"{saved}: step {step}" for step in (saved, STEPS - 1)),
        "0: weights",
        f"{saved}: weights",
    }, done.stderr[-3000:]
    for what in (f"step {saved}", f"step {STEPS - 1}", "weights"):
        assert found[f"0: {what}"] == found[f"{saved}: {what}"]
    assert found["0: weights"].endswith("replicas identical")
    first, last = (float(found[f"0: step {step}"].removeprefix("loss ")) for step in (0, STEPS - 1))
    assert last < first - 0.5


def _run(options: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run the example, and again where the machine was so busy that Ray gave up its own start, after 30 s."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "gpt2_ray.py"), *options],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(ours.__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        if "timed out during startup" not in done.stderr:
            break
    return done


def test_ray_shards_in_a_way_that_no_recipe_can_serve() -> None:
    with pytest.raises(ValueError, match="parallel_strategy is 'fsdp'; expected \"ddp\""):
        ours.prepare_model(nn.Linear(2, 2), parallel_strategy="fsdp")


def _sharded(folder: str) -> tuple[int, int]:
    """Save and load what waits for shards. Return the step of both handles."""
    mesh, handles = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), []
    for _ in range(2):
        net = nn.Linear(8, 8)
        fully_shard(net, mesh=mesh["shard"])
        handles.append(tw.shard(net, tw.recipes.topk(density=0.1, minimum_size=0), mesh=mesh))
        if len(handles) == 1:
            net(torch.ones(2, 8)).sum().backward()
            torch.optim.SGD(net.parameters(), lr=0.1).step()
            ours.save(handles[0], folder)
    ours.load(handles[1], folder)
    saved, loaded = (handle.state_dict() for handle in handles)
    assert same(saved["memories"], loaded["memories"])
    assert any("weight" in memory for memory in saved["memories"])
    return saved["step"], loaded["step"]


def test_what_waits_for_shards_is_saved_too(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(4, _sharded, str(tmp_path)) == [(1, 1)] * 4
