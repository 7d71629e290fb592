"""Statements on convergence, on a convex problem with known smoothness."""

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.codecs import FFT
from thinwire_lab.papers.fft import FFT_PAPER
from thinwire_lab.papers.shared.claims import Finding
from thinwire_lab.papers.shared.logistic import Logistic
from thinwire_lab.papers.shared.material import Material


def _sent(x: Tensor, theta: float) -> Tensor:
    return x if theta <= 0 else FFT(density=1 - theta).encode(x).dense().view_as(x)


@FFT_PAPER.claim("F17")
def schedule(material: Material) -> Finding:
    problem, steps = Logistic.mnist(material), material.many(60, 5000)

    def trained(theta: Callable[[float], float]) -> list[float]:
        return _train(problem, steps, theta, material.seed)

    constant = {theta: trained(lambda eta, theta=theta: theta) for theta in (0.0, 0.9, 0.99)}  # type: ignore[misc]
    scheduled = trained(lambda eta: (problem.smoothness * eta) ** 0.5)
    listed = ", ".join(f"{theta:g}: {norms[-1]:.1e}" for theta, norms in constant.items())
    figure = (
        f"|grad f|^2 falls from {scheduled[0]:.1e} to {scheduled[1]:.1e} and {scheduled[-1]:.1e}; with "
        f"constant theta {listed}"
    )
    falls = scheduled[0] > 20 * scheduled[-1] and scheduled[1] > scheduled[-1]
    stalls = max(norms[-1] for norms in constant.values()) > 2 * scheduled[-1]
    rises = scheduled[-1] > scheduled[0]
    return Finding(holds=False if rises else (falls and stalls) or None, figure=figure, said={"steps": steps})


def _train(problem: Logistic, steps: int, theta: Callable[[float], float], seed: int) -> list[float]:
    """Return ‖∇f‖² at the start, halfway and at the end."""
    w, norms, generator = problem.zeros(), [], torch.Generator().manual_seed(seed)
    for step in range(steps + 1):
        if step % (steps // 2) == 0:
            norms.append(float(problem.gradient(w).square().sum()))
        eta = 1 / (4 * problem.smoothness) / (1 + 10 * step / steps)
        draws = torch.randint(len(problem.labels), (4, 16), generator=generator)
        sent = [_sent(problem.gradient(w, draw), theta(eta)) for draw in draws]
        w = w - eta * torch.stack(sent).mean(dim=0)
    return norms


@FFT_PAPER.claim("F18")
def descent(material: Material) -> Finding:
    problem, steps = Logistic.mnist(material), material.many(10, 60)
    eta = 1 / (4 * problem.smoothness)
    violated = {theta: _violations(problem, steps, eta, theta) for theta in (0.25, 0.5, 0.85, 0.99)}
    figure = ", ".join(f"{count} of {steps} at {theta:g}" for theta, count in violated.items())
    return Finding(holds=violated[0.25] + violated[0.5] == 0, figure=f"violated in {figure}")


def _violations(problem: Logistic, steps: int, eta: float, theta: float) -> int:
    w, count = problem.zeros(), 0
    for _ in range(steps):
        gradient, before = problem.gradient(w), problem.loss(w)
        w = w - eta * _sent(gradient, theta)
        count += eta / 4 * float(gradient.square().sum()) > before - problem.loss(w) + 1e-6
    return count
