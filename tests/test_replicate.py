"""Replicas without DDP: the same training as DDP's, under everything that a step may bring."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import RECIPES
from ddp_models import SCENARIOS, WIDTH, Scenario, Training, batch, digest, mlp, same, sgd, values
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import thinwire as tw
from thinwire.integrations import replicate as module

STEPS = 4
STATEFUL = [name for name, case in RECIPES.items() if any(memory.stateful for memory in case.make().memories())]
# What DDP has to be told about, replicas take as it comes.
USES = {name: use for name, use in SCENARIOS.items() if use.make is not mlp and "static_graph" not in use.options}


class Copies(Training):
    """A model in training that is replicated, unlike on each rank before."""

    def __init__(
        self,
        scenario: Scenario | str,
        recipe: tw.reducer.Reducer | str,
        *,
        dtype: torch.dtype = torch.float32,
        scaler: torch.amp.GradScaler | None = None,
        **options: Any,
    ) -> None:
        self.scenario = SCENARIOS[scenario] if isinstance(scenario, str) else scenario
        self.dtype, self.scaler = dtype, scaler
        torch.manual_seed(dist.get_rank())
        self.module = self.scenario.make(dtype)
        self.optimizer = sgd(self.module, **({"momentum": 0.9} | options))
        recipe = RECIPES[recipe].make() if isinstance(recipe, str) else recipe
        self.replicas = tw.replicate(self.module, recipe, optimizer=self.optimizer, scaler=scaler)
        self.attachment = self.replicas.attachment

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def backward(self, step: int) -> None:
        for loss in self.losses(self.module, step):
            self._scaled(loss()).backward()
        self.replicas.reduce()

    def local_gradients(self, step: int) -> dict[str, Tensor]:
        total = sum(loss() for loss in self.losses(self.module, step))
        assert isinstance(total, Tensor)
        found = torch.autograd.grad(total, list(self.parameters().values()), allow_unused=True)
        return {name: g for name, g in zip(self.parameters(), found, strict=True) if g is not None}


# --- as DDP ---


def _both(scenario: str, recipe: str) -> tuple[str, str, bool, int]:
    copies = Copies(scenario, recipe).run(range(STEPS))
    attached = Training(scenario, recipe).run(range(STEPS))
    attachment = copies.attachment
    return digest(copies.module), digest(attached.model), attachment.verify_replicas(), attachment.step


# Of two ranks a sum has no order; the buckets, one here, are laid out as DDP's.
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_that_of_ddp_to_the_bit(ranks: Ranks, recipe: str) -> None:
    (one, *_), (other, *_) = results = ranks.run(2, _both, "one bucket", recipe)
    assert one == other
    assert results == [(one, one, True, STEPS)] * 2


