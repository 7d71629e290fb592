"""The lemmas of Appendix A."""

import math

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import HashedSlots
from thinwire_lab.papers.dragonn import DRAGONN
from thinwire_lab.papers.shared.claims import Finding
from thinwire_lab.papers.shared.logistic import Logistic
from thinwire_lab.papers.shared.material import Material

_SPACE = 126_720_000
"""Elements of the vector whose indices are hashed."""


@DRAGONN.claim("D21")
def survival(material: Material) -> Finding:
    n, draws = 4, material.many(5_000, 100_000)
    expected = torch.tensor([((n - 1) / n) ** (n - i) for i in range(1, n + 1)])
    lots = torch.randint(n, (draws, n), generator=torch.Generator().manual_seed(material.seed))
    lost = (lots[:, :, None] == lots[:, None, :]).triu(1).any(dim=2)
    picks = torch.arange(n, dtype=torch.int32)
    ours = torch.zeros(n)
    for seed in range(draws):
        slots = kernels.hashed_slots.cpu(picks, picks, n, _SPACE, seed)
        ours[slots[slots >= 0].long()] += 1
    spread = 4 * (expected * (1 - expected) / draws).sqrt() + 1e-9
    random, family = ((~lost).float().mean(dim=0) - expected).abs(), (ours / draws - expected).abs()
    figure = (
        f"largest deviation {random.max():.4f} for a random hash, {family.max():.4f} for ours; i = 1: "
        f"{ours[0] / draws:.4f}"
    )
    return Finding(holds=bool((random <= spread).all()), figure=figure, said={"draws": draws})


@DRAGONN.claim("D22")
def hashing_error(material: Material) -> Finding:
    rows = [_bound(x, seeds=material.many(5, 20)) for _, x in material.tensors(least=512)]
    kept = sorted(bound - mean for mean, bound in rows)
    worst = max(mean - bound for mean, bound in rows)
    tight = sum(bound > 0.99 for _, bound in rows) / len(rows)
    figure = (
        f"never violated on {len(rows)} tensors by more than {max(0.0, worst):.1g}; bound above 0.99 on {tight:.0%}"
    )
    return Finding(holds=worst <= 1e-3, figure=figure, said={"more": kept[len(kept) // 2]})


def _bound(x: Tensor, seeds: int) -> tuple[float, float]:
    n = max(2, round(0.05 * x.numel()))
    top = x.abs().topk(n)
    picks = top.indices.to(torch.int32)
    tau = float(top.values[0] / top.values[-1].clamp(min=1e-30))
    kept = [x[slots[slots >= 0].long()] for seed in range(seeds) for slots in [_slots(picks, seed)]]
    mean = 1 - sum(float(k.double().square().sum()) for k in kept) / seeds / float(x.double().square().sum())
    return mean, 1 - n * (1 - ((n - 1) / n) ** n) / (x.numel() * tau**2)


def _slots(picks: Tensor, seed: int) -> Tensor:
    return kernels.hashed_slots.cpu(picks, torch.zeros_like(picks), len(picks), _SPACE, seed)


@DRAGONN.claim("D24")
def empty_share(material: Material) -> Finding:
    draws = material.many(1_000, 10_000)
    first, second = _empty(1024, 1024, draws), _empty(512, 1024, draws)
    p, q = (float(((e >= lo) & (e <= hi)).float().mean()) for e, lo, hi in ((first, 0.36, 0.38), (second, 0.13, 0.14)))
    ours = _empty_ours(1024, 1024, min(draws, 2000))
    figure = (
        f"probability {p:.2f} and {q:.2f}; mean {first.mean():.5f} (s.d. {first.std():.5f}) and {second.mean():.5f} "
        f"(s.d. {second.std():.5f}); our hash {ours.mean():.5f}"
    )
    return Finding(holds=p >= 0.95 and q >= 0.8, figure=figure, said={"draws": draws})


def _empty(m: int, n: int, draws: int) -> Tensor:
    slots = torch.randint(m, (draws, n), generator=torch.Generator().manual_seed(1))
    return 1 - torch.zeros(draws, m).scatter_(1, slots, 1.0).mean(dim=1)


def _empty_ours(m: int, n: int, draws: int) -> Tensor:
    picks = torch.arange(n, dtype=torch.int32)
    return torch.tensor(
        [float((kernels.hashed_slots.cpu(picks, picks, m, _SPACE, seed) < 0).float().mean()) for seed in range(draws)]
    )


@DRAGONN.claim("D23")
def descent_floor(material: Material) -> Finding:
    problem, steps, k = Logistic.mnist(material), material.many(30, 150), 4
    w, norms, epsilons, start = problem.zeros(), [], [], problem.loss(problem.zeros())
    for step in range(steps):
        shares = [problem.gradient(w, slice(rank, None, k)).view(-1) for rank in range(k)]
        norms.append(float(problem.gradient(w).square().sum()))
        w = w - torch.stack([HashedSlots(density=0.05).encode(g, seed=step).dense() for g in shares]).mean(0).view_as(
            w
        ) / (2 * problem.smoothness)
        epsilons += [1 - _bound(g, seeds=1)[1] for g in shares]
    g2 = 2 * problem.largest_norm**2
    d, eps = w.numel(), min(epsilons)
    bound = 8 * problem.smoothness * start / steps + 2 * g2 / (k * d) + (8 / eps**2 - 6) * g2
    figure = (
        f"|grad f|^2 ends at {norms[-1]:.2e}; the bound is {bound:.1e}, "
        f"10^{math.log10(bound / norms[-1]):.0f} times more"
    )
    return Finding(
        holds=min(norms) <= bound,
        figure=figure,
        said={"steps": steps},
    )
