"""Loops with one model, one optimizer and a backward a step, or several that accumulate."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as users call it
from torch.optim import SGD, AdamW

from thinwire_lab.studies.loops.material import Attach, Outcome, batches, micro_batches, network

ACCUMULATED = 4


def train(model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, steps: int) -> Outcome:
    """Take steps as everybody does: forward, backward, step."""
    seen = Outcome()
    for x, target in batches(steps):
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        seen.losses.append(loss.item())
    return seen


def ordinary(make: Attach, steps: int) -> Outcome:
    """SGD with momentum and weight decay, and nothing else: what every other loop is measured by."""
    model = DDP(network())
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    make(model, optimizer)
    return train(model, optimizer, steps)


def adamw(make: Attach, steps: int) -> Outcome:
    """The same steps with AdamW."""
    model = DDP(network())
    optimizer = AdamW(model.parameters(), lr=3e-3)
    make(model, optimizer)
    return train(model, optimizer, steps)


def accumulation(make: Attach, steps: int) -> Outcome:
    """Four micro-batches a step, each of them reduced: slower than with no_sync, and just as right under DDP."""
    model = DDP(network())
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    make(model, optimizer)
    seen = Outcome()
    for samples in micro_batches(steps, ACCUMULATED):
        optimizer.zero_grad()
        for x, target in samples:
            loss = mse_loss(model(x), target)
            (loss / ACCUMULATED).backward()
        optimizer.step()
        seen.losses.append(loss.item())
    return seen


def accumulation_no_sync(make: Attach, steps: int) -> Outcome:
    """Four micro-batches a step, of which the last reduces the sum."""
    model = DDP(network())
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    make(model, optimizer)
    seen = Outcome()
    for samples in micro_batches(steps, ACCUMULATED):
        optimizer.zero_grad()
        for number, (x, target) in enumerate(samples, 1):
            with nullcontext() if number == ACCUMULATED else model.no_sync():
                loss = mse_loss(model(x), target)
                (loss / ACCUMULATED).backward()
        optimizer.step()
        seen.losses.append(loss.item())
    return seen


def accumulation_by_counter(make: Attach, steps: int) -> Outcome:
    """One loop over micro-batches, where every fourth steps and only then are gradients cleared."""
    model = DDP(network())
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    make(model, optimizer)
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
    model = DDP(network())
    optimizer = SGD(model.parameters(), lr=0.1)
    make(model, optimizer)
    seen = Outcome()
    for x, target in batches(steps):
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        optimizer.step()
        seen.losses.append(loss.item())
    return seen


def clipping_with_momentum(make: Attach, steps: int) -> Outcome:
    """The same, and what was clipped goes into momentum."""
    model = DDP(network())
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    make(model, optimizer)
    seen = Outcome()
    for x, target in batches(steps):
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        optimizer.step()
        seen.losses.append(loss.item())
    return seen


def schedule(make: Attach, steps: int) -> Outcome:
    """A learning rate that warms up and falls."""
    model = DDP(network())
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    make(model, optimizer)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps, cycle_momentum=False)
    seen = Outcome()
    for x, target in batches(steps):
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        scheduler.step()
        seen.losses.append(loss.item())
    return seen


def zeroed_in_place(make: Attach, steps: int) -> Outcome:
    """Gradients are set to zero and stay allocated."""
    model = DDP(network(), gradient_as_bucket_view=True)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    make(model, optimizer)
    seen = Outcome()
    for x, target in batches(steps):
        optimizer.zero_grad(set_to_none=False)
        loss = mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        seen.losses.append(loss.item())
    return seen


def in_eval_mode(make: Attach, steps: int) -> Outcome:
    """Fine-tuning with the model in eval mode, so that dropout is off."""
    model = DDP(nn.Sequential(network(), nn.Dropout(0.5)))
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    make(model, optimizer)
    model.eval()
    return train(model, optimizer, steps)


def by_hand(make: Attach, steps: int) -> Outcome:
    """No optimizer: parameters are moved under no_grad."""
    model = DDP(network())
    make(model)
    seen = Outcome()
    for x, target in batches(steps):
        model.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= 0.1 * p.grad  # type: ignore[misc]  # a parameter minus a tensor, in place, stays one
        seen.losses.append(loss.item())
    return seen


def by_hand_on_data(make: Attach, steps: int) -> Outcome:
    """No optimizer, as PyTorch's first tutorials had it: parameters are moved through `.data`."""
    model = DDP(network())
    make(model)
    seen = Outcome()
    for x, target in batches(steps):
        model.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            p.data.sub_(p.grad.data * 0.1)
        seen.losses.append(loss.item())
    return seen
