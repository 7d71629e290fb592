"""Loops that do not take every step: bad batches, large gradients, loss scales that overflow."""

from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as users call it
from torch.optim import SGD, AdamW

from thinwire_lab.studies.loops.material import Attach, Outcome, all_finite, batches, micro_batches, network

BAD, PERIOD = 4, 10
"""The batches 4, 14, 24, … are bad."""


def nan_skipped(make: Attach, steps: int) -> Outcome:
    """A bad batch on one rank makes every rank's gradients NaN; the step is skipped by hand."""
    model = DDP(network())
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    make(model, optimizer)
    seen = Outcome()
    for step, (x, target) in enumerate(batches(steps)):
        if step % PERIOD == BAD and dist.get_rank() == 1:
            x[0, 0] = torch.nan
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        if not all_finite(model):
            seen.skipped.append(step)
            continue
        optimizer.step()
        seen.losses.append(loss.item())
    return seen


def nan_before_backward(make: Attach, steps: int) -> Outcome:
    """The same found out sooner: ranks agree on whether the loss is finite, and leave out the backward."""
    model = DDP(network())
    optimizer = AdamW(model.parameters(), lr=3e-3)
    make(model, optimizer)
    seen = Outcome()
    for step, (x, target) in enumerate(batches(steps)):
        if step % PERIOD == BAD and dist.get_rank() == 1:
            x[0, 0] = torch.nan
        loss = mse_loss(model(x), target)
        dist.all_reduce(worst := loss.detach().clone())
        if not worst.isfinite():
            seen.skipped.append(step)
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.losses.append(loss.item())
    return seen


def norm_skipped(make: Attach, steps: int) -> Outcome:
    """A step whose gradient is far larger than usual is skipped by hand."""
    model = DDP(network())
    optimizer = SGD(model.parameters(), lr=0.05)
    make(model, optimizer)
    return _skip_large(model, optimizer, steps)


def norm_skipped_with_momentum(make: Attach, steps: int) -> Outcome:
    """The same, and momentum is not to know of it."""
    model = DDP(network())
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    make(model, optimizer)
    return _skip_large(model, optimizer, steps)


def _skip_large(model: DDP, optimizer: torch.optim.Optimizer, steps: int) -> Outcome:
    seen, norms = Outcome(), list[float]()
    for step, (x, target) in enumerate(batches(steps)):
        if step % PERIOD == BAD:
            target = target + 1000
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        norm = float(nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None))
        if norms and norm > 20 * median(norms):
            seen.skipped.append(step)
            continue
        norms.append(norm)
        optimizer.step()
        seen.losses.append(loss.item())
    return seen


def accumulation_abandoned(make: Attach, steps: int) -> Outcome:
    """Of four micro-batches the second is bad now and then: what was accumulated is dropped, and the rest left out."""
    model = DDP(network())
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    make(model, optimizer)
    seen = Outcome()
    for step, samples in enumerate(micro_batches(steps, 4)):
        optimizer.zero_grad()
        for number, (x, target) in enumerate(samples):
            loss = mse_loss(model(x), target)
            (loss / 4).backward()
            if step % PERIOD == BAD and number == 1:
                seen.skipped.append(step)
                break
        else:
            optimizer.step()
            seen.losses.append(loss.item())
    return seen


def scaler(make: Attach, steps: int) -> Outcome:
    """A GradScaler whose scale is too large at first, and grows too large again."""
    model = DDP(network())
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scaling = GradScaler("cpu", init_scale=2.0**16, growth_interval=PERIOD)
    make(model, optimizer, scaler=scaling)
    model.module[0].weight.register_hook(lambda gradient: _overflowing(gradient, scaling, 2.0**14))
    seen = Outcome()
    for step, (x, target) in enumerate(batches(steps)):
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        before = scaling.get_scale()
        scaling.scale(loss).backward()
        scaling.step(optimizer)
        scaling.update()
        if scaling.get_scale() < before:
            seen.skipped.append(step)
        seen.losses.append(loss.item())
    return seen


def scaler_with_clipping(make: Attach, steps: int) -> Outcome:
    """The same, and gradients are unscaled first, to be clipped."""
    model = DDP(network())
    optimizer = AdamW(model.parameters(), lr=3e-3)
    scaling = GradScaler("cpu", init_scale=2.0**16, growth_interval=PERIOD)
    make(model, optimizer, scaler=scaling)
    model.module[0].weight.register_hook(lambda gradient: _overflowing(gradient, scaling, 2.0**14))
    seen = Outcome()
    for x, target in batches(steps):
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        scaling.scale(loss).backward()
        scaling.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaling.step(optimizer)
        scaling.update()
        seen.losses.append(loss.item())
    return seen


def scaler_two_optimizers(make: Attach, steps: int) -> Outcome:
    """A GradScaler skips each optimizer by itself: where the head overflows, the body is stepped all the same."""
    model = DDP(network())
    body = SGD(model.module[:-1].parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    head = SGD(model.module[-1].parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    scaling = GradScaler("cpu", init_scale=2.0**16, growth_interval=PERIOD)
    make(model, body, head, scaler=scaling)
    model.module[-1].weight.register_hook(lambda gradient: _overflowing(gradient, scaling, 2.0**14))
    seen = Outcome()
    for step, (x, target) in enumerate(batches(steps)):
        body.zero_grad()
        head.zero_grad()
        loss = mse_loss(model(x), target)
        before = scaling.get_scale()
        scaling.scale(loss).backward()
        scaling.step(body)
        scaling.step(head)
        scaling.update()
        if scaling.get_scale() < before:
            seen.skipped.append(step)
        seen.losses.append(loss.item())
    return seen


def _overflowing(gradient: Tensor, scaling: GradScaler, largest: float) -> Tensor:
    """Return infinities where the loss scale is too large: what 16 bits would do, and float64 does not."""
    return gradient * torch.inf if scaling.get_scale() > largest else gradient
