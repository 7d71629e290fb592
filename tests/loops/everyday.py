"""Loops with one model, one optimizer and a backward a step, or several that accumulate."""

from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as users call it
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from loops.material import Attach, Outcome, attached, batches, micro_batches, network, train

ACCUMULATED = 4


def ordinary(make: Attach, steps: int) -> Outcome:
    """SGD with momentum and weight decay, and nothing else: what every other loop is measured by."""
    return train(*attached(make), steps)


def adamw(make: Attach, steps: int) -> Outcome:
    """The same steps with AdamW."""
    return train(*attached(make, partial(AdamW, lr=3e-3)), steps)


def accumulation(make: Attach, steps: int) -> Outcome:
    """Four micro-batches a step, each of them reduced: slower than with no_sync, and just as right under DDP."""
    return _accumulate(*attached(make), steps, every_one=True)


def accumulation_no_sync(make: Attach, steps: int) -> Outcome:
    """Four micro-batches a step, of which the last reduces the sum."""
    return _accumulate(*attached(make), steps, every_one=False)


def _accumulate(model: DDP, optimizer: Optimizer, steps: int, *, every_one: bool) -> Outcome:
    seen = Outcome()
    for samples in micro_batches(steps, ACCUMULATED):
        optimizer.zero_grad()
        for number, (x, target) in enumerate(samples, 1):
            with nullcontext() if every_one or number == ACCUMULATED else model.no_sync():
                loss = mse_loss(model(x), target)
                (loss / ACCUMULATED).backward()
        optimizer.step()
        seen.losses.append(loss.item())
    return seen


def accumulation_by_counter(make: Attach, steps: int) -> Outcome:
    """One loop over micro-batches, where every fourth steps and only then are gradients cleared."""
    model, optimizer = attached(make, partial(SGD, lr=0.05, momentum=0.9, nesterov=True))
    seen = Outcome()
    for number, (x, target) in enumerate(batches(steps * ACCUMULATED), 1):
        loss = mse_loss(model(x), target)
        (loss / ACCUMULATED).backward()
        if number % ACCUMULATED == 0:
            optimizer.step()
            optimizer.zero_grad()
            seen.losses.append(loss.item())
    return seen


def clipping(make: Attach, steps: int) -> Outcome:
    """Gradients are clipped by their norm, which is what DDP averaged."""
    return _clipped(*attached(make, partial(SGD, lr=0.1)), steps)


def clipping_with_momentum(make: Attach, steps: int) -> Outcome:
    """The same, and what was clipped goes into momentum."""
    return _clipped(*attached(make), steps)


def _clipped(model: DDP, optimizer: Optimizer, steps: int) -> Outcome:
    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)

    return train(model, optimizer, steps, skips=clip)


def schedule(make: Attach, steps: int) -> Outcome:
    """A learning rate that warms up and falls."""
    model, optimizer = attached(make, partial(SGD, lr=0.1, momentum=0.9, weight_decay=1e-4))
    scheduler = OneCycleLR(optimizer, 0.1, total_steps=steps, cycle_momentum=False)
    return train(model, optimizer, steps, after=scheduler.step)


def zeroed_in_place(make: Attach, steps: int) -> Outcome:
    """Gradients are set to zero and stay allocated."""
    return train(*attached(make, gradient_as_bucket_view=True), steps, set_to_none=False)


def in_eval_mode(make: Attach, steps: int) -> Outcome:
    """Fine-tuning with the model in eval mode, so that dropout is off."""
    model, optimizer = attached(make, module=nn.Sequential(network(), nn.Dropout(0.5)))
    return train(model.eval(), optimizer, steps)


def by_hand(make: Attach, steps: int) -> Outcome:
    """No optimizer: parameters are moved under no_grad."""
    return _without_optimizer(make, steps, on_data=False)


def by_hand_on_data(make: Attach, steps: int) -> Outcome:
    """No optimizer, as PyTorch's first tutorials had it: parameters are moved through `.data`."""
    return _without_optimizer(make, steps, on_data=True)


def _without_optimizer(make: Attach, steps: int, *, on_data: bool) -> Outcome:
    model = DDP(network())
    make(model)

    def move() -> None:
        for p in model.parameters():
            assert p.grad is not None
            if on_data:
                p.data.sub_(p.grad.data * 0.1)
            else:
                with torch.no_grad():
                    p -= 0.1 * p.grad  # type: ignore[misc]  # a parameter minus a tensor, in place, stays one
        model.zero_grad()

    return train(model, [], steps, after=move)
