"""torchtitan's own model and parallelize_fn, on the CPU: against its HSDP, and with a recipe."""

import copy
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install -e '.[torchtitan]'")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn

import thinwire as tw
from thinwire.frameworks.torchtitan import compressed
from thinwire.integrations.training.gradients import local

_distributed: Any = dist  # whose names are not all exported, as mypy has it
_dcp: Any = dcp
_multiprocessing: Any = mp
pytestmark = pytest.mark.filterwarnings("default")  # torchtitan imports what torch has deprecated
SIZE, CONTEXT, STEPS, SAVED = 2, 16, 6, 3
RECIPES = {
    "": None,
    "dense": tw.recipes.dense,
    "dgc": lambda: tw.recipes.dgc(density=0.05),
}


def _model_spec() -> Any:
    """Return a small Llama. Its attention is torch's own, as torchtitan's needs a compiler or a GPU."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:1]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def _built(spec: Any, dims: Any, parallelism: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build model and optimizer in the order of torchtitan's Trainer."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.config import CompileConfig, TrainingConfig

    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # Gloo knows no other sum with a factor
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if spec.post_optimizer_build_fn is not None:
        spec.post_optimizer_build_fn([optimizer], [model], dims)
    return model, optimizer


def _dims(replicas: int) -> tuple[Any, Any]:
    import torchtitan.distributed.parallel_dims as module
    from torchtitan.config import ParallelismConfig

    module.device_type = "cpu"
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=replicas, data_parallel_shard_degree=SIZE, spmd_backend="partial_dtensor"
    )
    dims = module.ParallelDims.from_config(parallelism, SIZE * replicas)
    dims.build_mesh()
    return dims, parallelism


def _train(rank: int, folder: str, out: Any) -> None:
    """Train with torchtitan's own HSDP and with each recipe, in one set of processes: importing takes longest."""
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo", store=_distributed.FileStore(f"{folder}/store", 2 * SIZE), rank=rank, world_size=2 * SIZE
    )
    dims, parallelism = _dims(2)
    out.put((rank, {recipe: _losses(rank, recipe, folder, dims, parallelism) for recipe in RECIPES}))
    dist.destroy_process_group()


def _losses(rank: int, recipe: str, folder: str, dims: Any, parallelism: Any) -> list[tuple[int, float, str]]:
    """Return step, loss and weights of each step. With a recipe, the steps after a checkpoint are done twice."""
    handles: list[tw.integrations.Shards] = []
    make = RECIPES[recipe]
    spec = _model_spec() if make is None else compressed(_model_spec(), make, attached=handles.append)
    model, optimizer = _built(spec, dims, parallelism)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    parts: list[Any] = [model, optimizer]
    waiting = f"{folder}/{recipe}"
    found, saved = [], list[Any]()
    for step in [*range(STEPS), *range(SAVED, STEPS)]:
        if step == SAVED and saved:
            for part, state in zip(parts, saved, strict=True):
                part.load_state_dict(state)
            for handle in handles:
                _dcp.load({"thinwire": tw.Checkpoint(handle, waiting)}, checkpoint_id=waiting)
        elif step == SAVED:
            saved = [copy.deepcopy(part.state_dict()) for part in parts]
            for handle in handles:
                _dcp.save({"thinwire": tw.Checkpoint(handle)}, checkpoint_id=waiting)
        generator = torch.Generator().manual_seed(100 * step + rank)
        windows = text[torch.randint(len(text) - CONTEXT - 1, (2, 1), generator=generator) + torch.arange(CONTEXT + 1)]
        optimizer.zero_grad()
        scores = model(windows[:, :-1]).flatten(0, 1).float()
        loss = nn.functional.cross_entropy(scores, windows[:, 1:].flatten(), reduction="sum") / (4 * SIZE * CONTEXT)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        shards = b"".join(local(p).detach().numpy().tobytes() for p in model.parameters())
        found.append((step, total.item(), hashlib.sha256(shards).hexdigest()))
    assert all(handle.verify_replicas() for handle in handles)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    out = mp.get_context("spawn").SimpleQueue()
    _multiprocessing.spawn(_train, (str(tmp_path_factory.mktemp("run")), out), nprocs=2 * SIZE)
    return dict(out.get() for _ in range(2 * SIZE))


@pytest.mark.slow
def test_dense_is_torchtitans_own_hsdp_to_the_last_bit(found: dict[int, Any]) -> None:
    for by_recipe in found.values():
        assert by_recipe["dense"] == by_recipe[""]


@pytest.mark.slow
def test_it_learns_and_goes_on_from_a_checkpoint_to_the_last_bit(found: dict[int, Any]) -> None:
    for rank in range(2 * SIZE):
        losses = found[rank]["dgc"]
        assert losses[STEPS:] == losses[SAVED:STEPS]
        assert losses[STEPS - 1][1] < losses[0][1]
        assert losses == found[rank % SIZE]["dgc"]


class _Dims:
    dp_replicate, dp_shard, spmd_backend, pp, tp, cp, ep = 2, 2, "partial_dtensor", 1, 1, 1, 1

    def __init__(self, **changes: object) -> None:
        self.__dict__.update(changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dp_replicate": 1}, "data_parallel_replicate_degree is 1; expected 2 or more"),
        ({"spmd_backend": "spmd_types"}, "spmd_backend is 'spmd_types'; expected \"partial_dtensor\""),
        ({"tp": 2}, "tensor_parallel_degree is 2; expected 1"),
        ({"pp": 4}, "pipeline_parallel_degree is 4; expected 1"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, object], message: str) -> None:
    spec = compressed(_model_spec(), tw.recipes.dense)
    with pytest.raises(ValueError, match=message):
        spec.parallelize_fn(nn.Linear(2, 2), parallel_dims=_Dims(**changes))


def test_a_recipe_is_made_when_the_model_is() -> None:
    with pytest.raises(TypeError, match="expected a function that makes one"):
        compressed(_model_spec(), tw.recipes.dense())  # type: ignore[arg-type]  # what is refused
