"""On a GPU a step is read once, when the next one begins. Main memory is read so here, and no GPU is needed."""

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


def _trained(recipe: str, scenario: str, taken: bool, gpu: bool) -> tuple[str, list[Tensor], int, list[int]]:
    """Train, with one step that is not finite; is it taken? Return model, what waits, step, and how often was read."""
    reads, read = [0], outcomes.Sent.read

    def counted(sent: outcomes.Sent) -> Any:
        reads[-1] += 1
        return read(sent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_ONLY_REFERENCE", True)
        patch.setattr(outcomes.Sent, "read", counted)
        if gpu:
            patch.setattr(waits, "HOST", frozenset())
            patch.setattr(orthogonal_momentum, "on_host", lambda x: True)  # a GPU's products round differently
        training = Training(scenario, recipe)
        for step in range(STEPS):
            if step == 3 and dist.get_rank() == 0:
                hook = training.model.module[2].weight.register_hook(lambda g: g * torch.inf)
            training.step(step)
            if step == 3 and taken:
                training.optimizer.step()
            if step == 3 and dist.get_rank() == 0:
                hook.remove()
            reads.append(0)
        training.attachment.steps.close_if_done()
        return digest(training.model), _waiting(training), training.attachment.step, reads


@pytest.mark.grid
@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("scenario", ["several buckets", "no_sync"])
@pytest.mark.parametrize("recipe", ONE_COLLECTIVE)
def test_what_is_read_later_is_no_different(ranks: Ranks, recipe: str, scenario: str, taken: bool) -> None:
    plain, unread = (ranks.run(2, _trained, recipe, scenario, taken, gpu) for gpu in (False, True))
    for (model, waiting, step, _), (now, waits_now, step_now, reads) in zip(plain, unread, strict=True):
        assert model == now
        assert step == step_now
        assert all(torch.equal(a, b) for a, b in zip(waiting, waits_now, strict=True))
        assert sum(reads) <= STEPS, "once a step, however many buckets"


def _malformed(buckets: int, asked: str) -> tuple[str, bool, bool, bool]:
    """Receive a wrong byte in the first `buckets` of a step. Return what is said when somebody asks."""
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
        training.attachment.steps.close_if_done()
        waiting, damage = _waiting(training), buckets
        training.step(2)
        zeros = [name for name, gradient in training.gradients().items() if not gradient.any()]
        stepped, damage = digest(training.model), 0
        with pytest.raises(PayloadError) as raised:
            training.step(3) if asked == "the next step" else training.attachment.state_dict()
        unchanged = digest(training.model) == stepped
        rolled_back = all(map(torch.equal, waiting, _waiting(training)))
        training.step(3)
        training.attachment.steps.close_if_done()
        goes_on = not all(map(torch.equal, waiting, _waiting(training)))
        return str(raised.value), unchanged and len(zeros) >= min(buckets, 2), rolled_back, goes_on


@pytest.mark.parametrize("asked", ["the next step", "the state"])
@pytest.mark.parametrize("buckets", [1, 99])
def test_malformed_payloads_count_as_zeros_until_somebody_asks(ranks: Ranks, buckets: int, asked: str) -> None:
    for said, zeros, rolled_back, goes_on in ranks.run(2, _malformed, buckets, asked):
        assert said.startswith("rank 1 sent a header with ")
        assert zeros
        assert rolled_back
        assert goes_on
