"""On a GPU a step is read once, before the optimizer takes it. Main memory is read so here, and no GPU is needed."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import RECIPES
from ddp_models import Training, digest
from ranks import Ranks
from torch import Tensor

from thinwire import waits
from thinwire.codecs import SampledThreshold
from thinwire.errors import PayloadError
from thinwire.exchanges import AllGather, all_gather
from thinwire.integrations.training import outcomes
from thinwire.kernels import dispatch
from thinwire.memories import ErrorFeedback, orthogonal_momentum
from thinwire.payloads import Payload
from thinwire.reducer import Compressed

STEPS = 6
ONE_COLLECTIVE = [name for name, case in RECIPES.items() if not case.rounds]


def _waiting(training: Training) -> list[Tensor]:
    held = [memory.state() for memory in training.attachment.recipe.memories()]
    return [x.clone() for state in held for fields in state.values() for x in fields.values()]


def _trained(recipe: str, scenario: str, gpu: bool) -> tuple[str, list[Tensor], int, list[int]]:
    """Train, with one step that is not finite. Return the model, what waits, the step, and how often was read."""
    reads, read = [0], outcomes._numbers

    def counted(found: Any) -> Any:
        reads[-1] += bool(found)
        return read(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_ONLY_REFERENCE", True)
        patch.setattr(outcomes, "_numbers", counted)
        if gpu:
            patch.setattr(waits, "HOST", frozenset())
            patch.setattr(orthogonal_momentum, "on_host", lambda x: True)  # a GPU's products round differently
        training = Training(scenario, recipe)
        for step in range(STEPS):
            if step == 3 and dist.get_rank() == 0:
                hook = training.model.module[2].weight.register_hook(lambda g: g * torch.inf)
            training.step(step)
            if step == 3 and dist.get_rank() == 0:
                hook.remove()
            reads.append(0)
        training.attachment.steps.close_if_done()
        return digest(training.model), _waiting(training), training.attachment.step, reads


@pytest.mark.grid
@pytest.mark.parametrize("scenario", ["several buckets", "no_sync"])
@pytest.mark.parametrize("recipe", ONE_COLLECTIVE)
def test_what_is_read_later_is_no_different(ranks: Ranks, recipe: str, scenario: str) -> None:
    plain, unread = (ranks.run(2, _trained, recipe, scenario, gpu) for gpu in (False, True))
    for (model, waiting, step, _), (now, waits_now, step_now, reads) in zip(plain, unread, strict=True):
        assert model == now
        assert step == step_now
        assert all(torch.equal(a, b) for a, b in zip(waiting, waits_now, strict=True))
        assert sum(reads) <= STEPS, "once a step, however many buckets"


def _malformed(buckets: int) -> tuple[str, bool, bool, bool]:
    """Receive a wrong byte in the first `buckets` of a step."""
    received = all_gather.received
    damage = 0

    def damaged(mine: Payload, buffers: Tensor, *rest: Any) -> Payload:
        nonlocal damage
        if damage:
            buffers[1, 4] ^= 1
            damage -= 1
        return received(mine, buffers, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waits, "HOST", frozenset())
        patch.setattr(dispatch, "_ONLY_REFERENCE", True)
        patch.setattr(all_gather, "received", damaged)
        recipe = Compressed(memory=ErrorFeedback(), codec=SampledThreshold(density=0.1), exchange=AllGather())
        training = Training("several buckets", recipe, momentum=0.9)
        training.run(range(2))
        before, waiting = digest(training.model), _waiting(training)
        damage = buckets
        with pytest.raises(PayloadError) as raised:
            training.step(2)
        unchanged = digest(training.model) == before
        rolled_back = all(map(torch.equal, waiting, _waiting(training)))
        damage = 0
        training.step(3)
        return str(raised.value), unchanged, rolled_back, digest(training.model) != before


@pytest.mark.parametrize("buckets", [1, 99])
def test_malformed_payloads_call_the_step_off(ranks: Ranks, buckets: int) -> None:
    for said, unchanged, rolled_back, goes_on in ranks.run(2, _malformed, buckets):
        assert said.startswith("rank 1 sent a header with ")
        assert unchanged
        assert rolled_back
        assert goes_on
