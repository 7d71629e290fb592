"""Loops with several models, optimizers or backwards in a step, and those whose optimizer calls a closure."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as users call it
from torch.optim import LBFGS, SGD, Adam, Optimizer

from loops.material import (
    BATCH,
    INPUTS,
    OUTPUTS,
    Attach,
    Outcome,
    attached,
    batches,
    gradient_norm,
    network,
    noise,
    train,
)

MakeOptimizer = Callable[..., Optimizer]
LATENT = 8
PROBED = 5


def gan(make: Attach, steps: int) -> Outcome:
    """A GAN with Adam, as PyTorch's DCGAN tutorial has it."""
    adam = partial(Adam, betas=(0.5, 0.999))
    return _play(make, partial(adam, lr=1e-5), partial(adam, lr=1e-3), steps)


def gan_sgd(make: Attach, steps: int) -> Outcome:
    """The same GAN with SGD and momentum."""
    sgd = partial(SGD, momentum=0.5)
    return _play(make, partial(sgd, lr=1e-4), partial(sgd, lr=0.05, weight_decay=1e-4), steps)


def _play(make: Attach, generating: MakeOptimizer, telling: MakeOptimizer, steps: int) -> Outcome:
    """The tutorial's order; the generator's backward leaves gradients in the discriminator, which zero_grad drops."""
    generator, optimizer_g = attached(make, generating, network(1, inputs=LATENT, outputs=INPUTS))
    discriminator, optimizer_d = attached(make, telling, network(2, outputs=1))
    seen, real, fake = Outcome(), torch.ones(BATCH, 1).double(), torch.zeros(BATCH, 1).double()
    for x, _ in batches(steps):
        discriminator.zero_grad()
        error_real = bce(discriminator(0.5 * x + 0.5), real)
        error_real.backward()
        made = generator(x[:, :LATENT])
        error_fake = bce(discriminator(made.detach()), fake)
        error_fake.backward()
        optimizer_d.step()
        generator.zero_grad()
        bce(discriminator(made), real).backward()
        optimizer_g.step()
        seen.losses.append((error_real + error_fake).item())
    return seen


def gradient_penalty(make: Attach, steps: int) -> Outcome:
    """A critic whose loss has the norm of its own gradient in it (WGAN-GP): one backward through a backward."""
    critic, optimizer = attached(make, partial(SGD, lr=0.01, momentum=0.9, weight_decay=1e-3), network(outputs=1))

    def loss(step: int, x: Tensor, _: Tensor) -> Tensor:
        real, fake = x + 0.5, noise(step, INPUTS, stream=1)
        wasserstein: Tensor = critic(fake).mean() - critic(real).mean()
        return wasserstein + _penalty(critic, real, fake)

    return train(critic, optimizer, steps, loss=loss)


def gradient_penalty_apart(make: Attach, steps: int) -> Outcome:
    """The same critic with a backward for each term, as the paper's code has it."""
    head = nn.Linear(OUTPUTS, 1, bias=False).double()
    nn.init.constant_(head.weight, 0.5)
    # Plain DDP waits for every parameter in every backward; the penalty does not depend on a bias after the last Tanh.
    module = nn.Sequential(network(), nn.Tanh(), head)
    critic, optimizer = attached(make, partial(Adam, lr=1e-3, betas=(0.5, 0.9)), module)
    seen = Outcome()
    for step, (x, _) in enumerate(batches(steps)):
        optimizer.zero_grad()
        real, fake = x + 0.5, noise(step, INPUTS, stream=1)
        loss_real = -critic(real).mean()
        loss_real.backward()
        loss_fake = critic(fake).mean()
        loss_fake.backward()
        penalty = _penalty(critic, real, fake)
        penalty.backward()
        optimizer.step()
        seen.losses.append((loss_real + loss_fake + penalty).item())
    return seen


def _penalty(critic: DDP, real: Tensor, fake: Tensor) -> Tensor:
    mixed = ((real + fake) / 2).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return 10 * (slope.norm(dim=1) - 1).square().mean()


def two_losses(make: Attach, steps: int) -> Outcome:
    """Two losses, two backwards; the second goes through the first one's graph again."""
    model, optimizer = attached(make)
    seen = Outcome()
    for step, (x, target) in enumerate(batches(steps)):
        optimizer.zero_grad()
        output = model(x)
        loss = mse_loss(output, target)
        loss.backward(retain_graph=True)
        # Plain DDP reduces one backward per forward: after a second one alone the replicas would differ, unseen.
        consistency = 0.1 * mse_loss(model(x + 0.1 * noise(step, INPUTS, stream=1)), output)
        consistency.backward()
        optimizer.step()
        seen.losses.append(loss.item())
    return seen


def two_optimizers(make: Attach, steps: int) -> Outcome:
    """The body and the head of a model have an optimizer each."""
    model, body, head = body_and_head(make)
    return train(model, [body, head], steps)


def head_every_other_step(make: Attach, steps: int) -> Outcome:
    """The same, and the body is stepped only every other time; what it missed is thrown away."""
    model, body, head = body_and_head(make)
    seen = Outcome()
    for step, (x, target) in enumerate(batches(steps)):
        model.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        head.step()
        if step % 2:
            body.step()
        seen.losses.append(loss.item())
    return seen


def body_and_head(make: Attach, decay: float = 1e-3, **options: torch.amp.GradScaler) -> tuple[DDP, SGD, SGD]:
    """Return the network in DDP, and an optimizer for its body and one for its head, which decays as much."""
    model = DDP(network())
    body = SGD(model.module[:-1].parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    head = SGD(model.module[-1].parameters(), lr=0.02, momentum=0.9, weight_decay=decay)
    make(model, body, head, **options)
    return model, body, head


def probing(make: Attach, steps: int) -> Outcome:
    """Every few steps another loss's gradient is looked at, for a log, and thrown away."""
    model, optimizer = attached(make)
    sizes = list[float]()

    def loss(step: int, x: Tensor, target: Tensor) -> Tensor:
        if step % PROBED == 0:
            model(noise(step, INPUTS, stream=1)).square().mean().backward()
            sizes.append(gradient_norm(model))
            optimizer.zero_grad()
        return mse_loss(model(x), target)

    return train(model, optimizer, steps, loss=loss)


def lbfgs(make: Attach, steps: int) -> Outcome:
    """L-BFGS over one large batch: its closure is called several times a step."""
    model, optimizer = attached(make, partial(LBFGS, lr=0.5, max_iter=4, history_size=6))
    samples = list(batches(4))
    x, target = torch.cat([x for x, _ in samples]), torch.cat([target for _, target in samples])
    return Outcome(losses=[_by_closure(model, optimizer, x, target) for _ in range(steps // 4)])


def sgd_closure(make: Attach, steps: int) -> Outcome:
    """SGD that calls a closure, as frameworks do it: backward runs within the optimizer's step."""
    model, optimizer = attached(make)
    return Outcome(losses=[_by_closure(model, optimizer, *sample) for sample in batches(steps)])


def adam_closure(make: Attach, steps: int) -> Outcome:
    """The same with Adam."""
    model, optimizer = attached(make, partial(Adam, lr=3e-3))
    return Outcome(losses=[_by_closure(model, optimizer, *sample) for sample in batches(steps)])


def _by_closure(model: DDP, optimizer: Optimizer, x: Tensor, target: Tensor) -> float:
    def closure() -> float:
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        return loss.item()

    loss = optimizer.step(closure)
    assert loss is not None
    return loss
