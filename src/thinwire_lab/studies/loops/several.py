"""Loops with several models, optimizers or backwards in a step, and those whose optimizer calls a closure."""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as users call it
from torch.optim import LBFGS, SGD, Adam

from thinwire_lab.studies.loops.material import BATCH, INPUTS, OUTPUTS, Attach, Outcome, batches, network, noise

LATENT = 8
PROBED = 5
Optimizers = tuple[torch.optim.Optimizer, torch.optim.Optimizer]


def gan(make: Attach, steps: int) -> Outcome:
    """A GAN with Adam, as PyTorch's DCGAN tutorial has it."""
    generator, discriminator = DDP(network(1, inputs=LATENT, outputs=INPUTS)), DDP(network(2, outputs=1))
    optimizer_g = Adam(generator.parameters(), lr=1e-5, betas=(0.5, 0.999))
    optimizer_d = Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    make(generator, optimizer_g)
    make(discriminator, optimizer_d)
    return _play(generator, discriminator, (optimizer_g, optimizer_d), steps)


def gan_sgd(make: Attach, steps: int) -> Outcome:
    """The same GAN with SGD and momentum."""
    generator, discriminator = DDP(network(1, inputs=LATENT, outputs=INPUTS)), DDP(network(2, outputs=1))
    optimizer_g = SGD(generator.parameters(), lr=1e-4, momentum=0.5)
    optimizer_d = SGD(discriminator.parameters(), lr=0.05, momentum=0.5, weight_decay=1e-4)
    make(generator, optimizer_g)
    make(discriminator, optimizer_d)
    return _play(generator, discriminator, (optimizer_g, optimizer_d), steps)


def _play(generator: DDP, discriminator: DDP, optimizers: Optimizers, steps: int) -> Outcome:
    """The tutorial's order; the generator's backward leaves gradients in the discriminator, which zero_grad drops."""
    optimizer_g, optimizer_d = optimizers
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
    critic = DDP(network(outputs=1))
    optimizer = SGD(critic.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)
    make(critic, optimizer)
    seen = Outcome()
    for step, (x, _) in enumerate(batches(steps)):
        optimizer.zero_grad()
        real, fake = x + 0.5, noise(step, INPUTS, stream=1)
        wasserstein = critic(fake).mean() - critic(real).mean()
        mixed = ((real + fake) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        loss = wasserstein + 10 * (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        seen.losses.append(loss.item())
    return seen


def gradient_penalty_apart(make: Attach, steps: int) -> Outcome:
    """The same critic with a backward for each term, as the paper's code has it."""
    head = nn.Linear(OUTPUTS, 1, bias=False).double()
    nn.init.constant_(head.weight, 0.5)
    # Plain DDP waits for every parameter in every backward; the penalty does not depend on a bias after the last Tanh.
    critic = DDP(nn.Sequential(network(), nn.Tanh(), head))
    optimizer = Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    make(critic, optimizer)
    seen = Outcome()
    for step, (x, _) in enumerate(batches(steps)):
        optimizer.zero_grad()
        real, fake = x + 0.5, noise(step, INPUTS, stream=1)
        loss_real = -critic(real).mean()
        loss_real.backward()
        loss_fake = critic(fake).mean()
        loss_fake.backward()
        mixed = ((real + fake) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = 10 * (slope.norm(dim=1) - 1).square().mean()
        penalty.backward()
        optimizer.step()
        seen.losses.append((loss_real + loss_fake + penalty).item())
    return seen


def two_losses(make: Attach, steps: int) -> Outcome:
    """Two losses, two backwards; the second goes through the first one's graph again."""
    model = DDP(network())
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    make(model, optimizer)
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
    model = DDP(network())
    body = SGD(model.module[:-1].parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    head = SGD(model.module[-1].parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    make(model, body, head)
    seen = Outcome()
    for x, target in batches(steps):
        body.zero_grad()
        head.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        body.step()
        head.step()
        seen.losses.append(loss.item())
    return seen


def head_every_other_step(make: Attach, steps: int) -> Outcome:
    """The same, and the body is stepped only every other time; what it missed is thrown away."""
    model = DDP(network())
    body = SGD(model.module[:-1].parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    head = SGD(model.module[-1].parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    make(model, body, head)
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


def probing(make: Attach, steps: int) -> Outcome:
    """Every few steps another loss's gradient is looked at, for a log, and thrown away."""
    model = DDP(network())
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    make(model, optimizer)
    seen, sizes = Outcome(), list[float]()
    for step, (x, target) in enumerate(batches(steps)):
        if step % PROBED == 0:
            optimizer.zero_grad()
            model(noise(step, INPUTS, stream=1)).square().mean().backward()
            sizes.append(float(nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)))
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        seen.losses.append(loss.item())
    return seen


def lbfgs(make: Attach, steps: int) -> Outcome:
    """L-BFGS over one large batch: its closure is called several times a step."""
    model = DDP(network())
    optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=6)
    make(model, optimizer)
    samples = list(batches(4))
    x, target = torch.cat([x for x, _ in samples]), torch.cat([target for _, target in samples])

    def closure() -> float:
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        return loss.item()

    return Outcome(losses=[optimizer.step(closure) for _ in range(steps // 4)])


def sgd_closure(make: Attach, steps: int) -> Outcome:
    """SGD that calls a closure, as frameworks do it: backward runs within the optimizer's step."""
    model = DDP(network())
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    make(model, optimizer)
    return _by_closure(model, optimizer, steps)


def adam_closure(make: Attach, steps: int) -> Outcome:
    """The same with Adam."""
    model = DDP(network())
    optimizer = Adam(model.parameters(), lr=3e-3)
    make(model, optimizer)
    return _by_closure(model, optimizer, steps)


def _by_closure(model: DDP, optimizer: torch.optim.Optimizer, steps: int) -> Outcome:
    seen = Outcome()
    for x, target in batches(steps):

        def closure(x: Tensor = x, target: Tensor = target) -> float:
            optimizer.zero_grad()
            loss = mse_loss(model(x), target)
            loss.backward()
            return loss.item()

        loss = optimizer.step(closure)
        assert loss is not None
        seen.losses.append(loss)
    return seen
