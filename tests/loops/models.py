"""Loops whose models are more than one module: averaged, adapted, checkpointed, compiled."""

from functools import partial

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import is_dynamo_supported
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as users call it
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from loops.material import (
    INPUTS,
    MOMENTUM,
    OUTPUTS,
    Attach,
    Outcome,
    Unavailable,
    attached,
    batches,
    network,
    noise,
    train,
)


def ema_teacher(make: Attach, steps: int) -> Outcome:
    """A mean teacher: an average of the student's weights, with which the student is to be consistent."""
    student = DDP(network())
    teacher = AveragedModel(student.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = MOMENTUM(student.parameters())
    make(student, optimizer)

    def loss(step: int, x: Tensor, target: Tensor) -> Tensor:
        output = student(x + 0.1 * noise(step, INPUTS, stream=1))
        with torch.no_grad():
            taught = teacher(x)
        return mse_loss(output, target) + 0.5 * mse_loss(output, taught)

    return train(student, optimizer, steps, loss=loss, after=lambda: teacher.update_parameters(student.module))


class LoRA(nn.Module):
    """A frozen linear layer and a learned difference of low rank."""

    def __init__(self, base: nn.Module, rank: int = 4) -> None:
        super().__init__()
        assert isinstance(base, nn.Linear)
        self.base = base.requires_grad_(False)
        start = torch.linspace(-1, 1, rank * base.in_features, dtype=base.weight.dtype).view(rank, -1)
        self.down = nn.Parameter((37 * start).sin() / base.in_features**0.5)
        self.up = nn.Parameter(base.weight.new_zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def lora_thawed(make: Attach, steps: int) -> Outcome:
    """LoRA on every layer; halfway the last one is thawed, so the module is wrapped in DDP anew and attached again."""
    first, _, second, _, third = network()
    last = LoRA(third)
    module = nn.Sequential(LoRA(first), nn.Tanh(), LoRA(second), nn.Tanh(), last)
    model = DDP(module)
    optimizer = SGD((p for p in module.parameters() if p.requires_grad), lr=0.05, momentum=0.9, weight_decay=1e-4)
    make(model, optimizer)
    seen = Outcome()
    for step, (x, target) in enumerate(batches(steps)):
        if step == steps // 2:
            thawed = list(last.base.requires_grad_(True).parameters())
            model = DDP(module)
            optimizer.add_param_group({"params": thawed, "momentum": 0.9, "weight_decay": 1e-4})
            make(model, optimizer)
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        seen.losses.append(loss.item())
    return seen


def wrapped_anew(make: Attach, steps: int) -> Outcome:
    """Between two epochs the same module is wrapped in DDP anew, and attached again; the optimizer goes on."""
    module = network()
    optimizer = MOMENTUM(module.parameters())
    seen = Outcome()
    for epoch in range(2):
        model = DDP(module)
        make(model, optimizer)
        seen.losses += train(model, optimizer, steps // 2, start=epoch * (steps // 2)).losses
    return seen


class Checkpointed(nn.Module):
    """A block whose activations are computed again in backward; with `turns` 2, a block that is used twice."""

    def __init__(self, *, use_reentrant: bool, turns: int = 1) -> None:
        super().__init__()
        layers = list(network(inputs=INPUTS, outputs=OUTPUTS))
        self.first, self.block, self.last = layers[0], nn.Sequential(*layers[1:4]), layers[4]
        self.use_reentrant, self.turns = use_reentrant, turns

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(self.turns):
            hidden = checkpoint(self.block, hidden, use_reentrant=self.use_reentrant)
        return self.last(hidden)


def checkpointing(make: Attach, steps: int) -> Outcome:
    """Gradient checkpointing as PyTorch recommends it."""
    return train(*attached(make, partial(AdamW, lr=3e-3), Checkpointed(use_reentrant=False)), steps)


def checkpointing_reentrant(make: Attach, steps: int) -> Outcome:
    """The older kind, over a block that is used twice."""
    # Plain DDP refuses it without static_graph: the block's gradients would be ready twice.
    return train(*attached(make, module=Checkpointed(use_reentrant=True, turns=2), static_graph=True), steps)


class TwoHeads(nn.Module):
    """A trunk and two heads, of which each batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = network()
        self.heads = nn.ModuleList(network(seed, inputs=OUTPUTS) for seed in (1, 2))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.trunk(x))


def heads_in_turns(make: Attach, steps: int) -> Outcome:
    """Two heads that take turns, so that each has no gradient in every other step, and momentum all the same."""
    model, optimizer = attached(make, module=TwoHeads(), find_unused_parameters=True)
    return train(model, optimizer, steps, loss=lambda step, x, target: mse_loss(model(x, step % 2), target))


def compiled(make: Attach, steps: int) -> Outcome:
    """torch.compile of the DDP model; forward and backward are traced, and DDP's buckets split the graph."""
    if not is_dynamo_supported():
        raise Unavailable("torch.compile does not run on this machine")
    model, optimizer = attached(make)
    fast = torch.compile(model, backend="aot_eager")  # traced as for Inductor, and no C++ compiler is needed
    return train(fast, optimizer, steps)
