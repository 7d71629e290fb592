"""Loops that do not take every step: bad batches, large gradients, loss scales that overflow."""

from collections.abc import Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as users call it
from torch.optim import SGD, AdamW, Optimizer

from loops.material import (
    MOMENTUM,
    Attach,
    Outcome,
    all_finite,
    attached,
    batches,
    gradient_norm,
    micro_batches,
    network,
    train,
)
from loops.several import body_and_head

BAD, PERIOD = 4, 10
"""The batches 4, 14, 24, … are bad."""


def _spoilt(step: int, x: Tensor) -> Tensor:
    """Return the inputs, on one rank with a NaN where the batch is bad."""
    if step % PERIOD == BAD and dist.get_rank() == 1:
        x[0, 0] = torch.nan
    return x


def nan_skipped(make: Attach, steps: int) -> Outcome:
    """A bad batch on one rank makes every rank's gradients NaN; the step is skipped by hand."""
    model, optimizer = attached(make)

    def loss(step: int, x: Tensor, target: Tensor) -> Tensor:
        return mse_loss(model(_spoilt(step, x)), target)

    return train(model, optimizer, steps, loss=loss, skips=lambda: not all_finite(model))


def nan_before_backward(make: Attach, steps: int) -> Outcome:
    """The same found out sooner: ranks agree on whether the loss is finite, and leave out the backward."""
    model, optimizer = attached(make, partial(AdamW, lr=3e-3))
    seen = Outcome()
    for step, (x, target) in enumerate(batches(steps)):
        loss = mse_loss(model(_spoilt(step, x)), target)
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
    return _skip_large(*attached(make, partial(SGD, lr=0.05)), steps)


def norm_skipped_with_momentum(make: Attach, steps: int) -> Outcome:
    """The same, and momentum is not to know of it."""
    return _skip_large(*attached(make, partial(SGD, lr=0.02, momentum=0.9, weight_decay=1e-4)), steps)


def _skip_large(model: DDP, optimizer: Optimizer, steps: int) -> Outcome:
    norms = list[float]()

    def loss(step: int, x: Tensor, target: Tensor) -> Tensor:
        return mse_loss(model(x), target + 1000 if step % PERIOD == BAD else target)

    def is_large() -> bool:
        norm = gradient_norm(model)
        large = bool(norms) and norm > 20 * median(norms)
        norms.extend([] if large else [norm])
        return large

    return train(model, optimizer, steps, loss=loss, skips=is_large)


def accumulation_abandoned(make: Attach, steps: int) -> Outcome:
    """Of four micro-batches the second is bad now and then: what was accumulated is dropped, and the rest left out."""
    model, optimizer = attached(make)
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
    model, scaling = DDP(network()), _scaler()
    optimizer = MOMENTUM(model.parameters())
    make(model, optimizer, scaler=scaling)
    return _scaled(model, [optimizer], scaling, steps)


def scaler_with_clipping(make: Attach, steps: int) -> Outcome:
    """The same, and gradients are unscaled first, to be clipped."""
    model, scaling = DDP(network()), _scaler()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    make(model, optimizer, scaler=scaling)
    return _scaled(model, [optimizer], scaling, steps, clips=True)


def scaler_two_optimizers(make: Attach, steps: int) -> Outcome:
    """A GradScaler skips each optimizer by itself: where the head overflows, the body is stepped all the same."""
    scaling = _scaler()
    model, *both = body_and_head(make, decay=1e-4, scaler=scaling)
    return _scaled(model, both, scaling, steps, overflowing=-1)


def _scaler() -> GradScaler:
    return GradScaler("cpu", init_scale=2.0**16, growth_interval=PERIOD)


def _scaled(
    model: DDP,
    several: Sequence[Optimizer],
    scaling: GradScaler,
    steps: int,
    *,
    clips: bool = False,
    overflowing: int = 0,
) -> Outcome:
    """Train with a scale that is too large for one layer from 2^14 on."""
    model.module[overflowing].weight.register_hook(lambda gradient: _overflowing(gradient, scaling, 2.0**14))
    seen = Outcome()
    for step, (x, target) in enumerate(batches(steps)):
        for each in several:
            each.zero_grad()
        loss = mse_loss(model(x), target)
        before = scaling.get_scale()
        scaling.scale(loss).backward()
        if clips:
            scaling.unscale_(several[0])
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in several:
            scaling.step(each)
        scaling.update()
        if scaling.get_scale() < before:
            seen.skipped.append(step)
        seen.losses.append(loss.item())
    return seen


def _overflowing(gradient: Tensor, scaling: GradScaler, largest: float) -> Tensor:
    """Return infinities where the loss scale is too large: what 16 bits would do, and float64 does not."""
    return gradient * torch.inf if scaling.get_scale() > largest else gradient
