"""A payload that is malformed for some ranks of a sharded model stops all, whether it is read at once or later."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import thinwire as tw
from thinwire import waits
from thinwire.errors import PayloadError
from thinwire.exchanges import all_gather
from thinwire.kernels import dispatch
from thinwire.payloads import Payload
from thinwire.reducer import owners

WORLDS = {"scatter": 2, "shard": 4}


def _attached(how: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 80), nn.Tanh(), nn.Linear(80, 8))
    recipe = tw.recipes.topk(density=0.05, minimum_size=64)
    if how == "scatter":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        fully_shard(model, mesh=mesh["shards"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (tw.scatter if how == "scatter" else tw.shard)(model, recipe, mesh=mesh, optimizer=optimizer)
    return model, optimizer


def _held(model: nn.Module) -> list[Tensor]:
    return [p.to_local().clone() for p in map(Tensor.detach, model.parameters()) if isinstance(p, DTensor)]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[str, bool]:
    """Return what was raised, and whether this rank's shard has changed."""
    before, said = _held(model), ""
    try:
        optimizer.zero_grad()
        model(torch.randn(4, 60)).square().mean().backward()
        optimizer.step()
    except (PayloadError, RuntimeError) as error:
        said = f"{type(error).__name__}: {error}"
    return said, any(not torch.equal(a, b) for a, b in zip(before, _held(model), strict=True))


def _damaged(how: str, gpu: bool) -> list[tuple[str, bool]]:
    """Take three steps, of which the third has a wrong byte for some ranks."""
    damage, received = [False], all_gather.received

    def wrong(mine: Payload, buffers: Tensor, *rest: Any) -> Payload:
        buffers[-1, 4] ^= damage[0]
        return received(mine, buffers, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_ONLY_REFERENCE", True)
        patch.setattr(owners, "received", wrong)
        patch.setattr(all_gather, "received", wrong)
        if gpu:
            patch.setattr(waits, "HOST", frozenset())
        model, optimizer = _attached(how)
        steps = [_step(model, optimizer) for _ in range(2)]
        damage[0] = dist.get_rank() == 0 if how == "scatter" else dist.get_rank() % 2 == 0
        steps.append(_step(model, optimizer))
        return steps


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("how", WORLDS)
def test_all_ranks_stop_and_none_moves(ranks: Ranks, how: str, gpu: bool) -> None:
    for first, second, third in ranks.run(WORLDS[how], _damaged, how, gpu):
        assert (first, second) == (("", True), ("", True))
        said, moved = third
        assert said.startswith(("PayloadError: ", "RuntimeError: ")), said
        assert not moved
