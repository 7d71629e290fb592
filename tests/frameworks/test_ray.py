"""Ray Train: two workers, a failure, and the same next steps from a checkpoint of both."""

import os
import tempfile
from pathlib import Path
from typing import Any

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

STEPS, SAVED = 24, 12


def _train(config: dict[str, Any]) -> None:
    """Train to the end, fail, and train again from the checkpoint. Each time, write what came out."""
    import hashlib
    import json

    import ray.train

    import thinwire as tw

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ours.prepare_model(
        nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 256))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = tw.attach(model, tw.recipes.dgc(density=0.05, minimum_size=0), optimizer=optimizer)
    rank, first, losses = ray.train.get_context().get_world_rank(), 0, []
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            saved = torch.load(Path(directory, "state.pt"))
            model.module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            first = saved["step"]
            ours.load(handle, directory)
    text = torch.frombuffer(bytearray(config["text"]), dtype=torch.uint8).long()
    for step in range(first, STEPS):
        if step == SAVED and not checkpoint:
            with tempfile.TemporaryDirectory() as directory:
                if rank == 0:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, Path(directory, "state.pt"))
                ours.save(handle, directory)
                ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(directory))
        generator = torch.Generator().manual_seed(2 * step + rank)
        windows = text[torch.randint(len(text) - 9, (32, 1), generator=generator) + torch.arange(9)]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(windows[:, :8]), windows[:, 8])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    found = {"first": first, "losses": losses, "same": handle.verify_replicas()}
    path = Path(config["folder"], f"{rank} from {first}.json")
    path.write_text(json.dumps(found | {"weights": hashlib.sha256(weights).hexdigest()}))
    if not checkpoint:
        raise RuntimeError("by hand, so that Ray starts the workers again")


@pytest.mark.slow
@pytest.mark.timeout(900)  # Ray starts its workers twice, a minute each where there is a core for all
@pytest.mark.filterwarnings("default")  # Ray warns of its own deprecated names, and leaves sockets to the collector
def test_workers_go_on_from_what_all_of_them_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(ours.__file__).parents[2]), str(Path(__file__).parent)]))
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    try:
        text = Path(__file__).read_bytes() * 4
        trainer = TorchTrainer(
            _train,
            train_loop_config={"text": text, "folder": str(tmp_path)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(tmp_path), name="run", failure_config=FailureConfig(max_failures=1)),
        )
        trainer.fit()
    finally:
        ray.shutdown()
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert sorted(found) == ["0 from 0", f"0 from {SAVED}", "1 from 0", f"1 from {SAVED}"]
    assert all(each["same"] for each in found.values())
    assert len({each["weights"] for each in found.values()}) == 1
    for rank in (0, 1):
        assert found[f"{rank} from 0"]["losses"][SAVED:] == found[f"{rank} from {SAVED}"]["losses"]
    losses = found["0 from 0"]["losses"]
    assert losses[-1] < losses[0] - 1


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
