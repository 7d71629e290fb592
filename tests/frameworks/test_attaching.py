"""What all front doors share: who may attach, and recipes of one's own."""

from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.frameworks.attaching import attached, check_replicas


def test_a_process_alone_has_nobody_to_exchange_with() -> None:
    with pytest.raises(RuntimeError, match=r"the only process.*torchrun --nproc-per-node 2"):
        check_replicas(nn.Linear(2, 2), 1, "")


def test_a_plain_model_is_refused_with_the_fix() -> None:
    with pytest.raises(TypeError, match="in DistributedDataParallel; got Linear on 2 processes: wrap it"):
        check_replicas(nn.Linear(2, 2), 2, "wrap it")


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(3, 64)).square().mean().backward()
    optimizer.step()


def _waiting(handle: thinwire.integrations.Attachment) -> torch.Tensor:
    held = [memory["weight"]["residual"] for memory in handle.state_dict()["memories"] if "weight" in memory]
    return held[0]


def _twice() -> tuple[bool, bool]:
    torch.manual_seed(0)
    module, recipe = nn.Linear(64, 64), thinwire.recipes.topk(density=0.01, minimum_size=0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    first = DistributedDataParallel(module)
    compiled: Any = torch.compile(first, backend="eager")  # as frameworks may return it; nothing is compiled yet
    check_replicas(compiled, 2, "")
    handle = attached(compiled, recipe, [optimizer], None)
    _step(first, optimizer)
    waited = _waiting(handle)
    again = attached(DistributedDataParallel(module), recipe, [optimizer], None)
    return bool(waited.any()) and torch.equal(waited, _waiting(again)), handle.ended


def test_a_model_that_is_wrapped_anew_goes_on_with_what_waits(ranks: Ranks) -> None:
    assert ranks.run(2, _twice) == [(True, True)] * 2
