"""What do selecting and decoding cost? And the lemmas of Appendix A."""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import HashedSlots, TopK
from thinwire.payloads import Sparse
from thinwire.signals import Plain
from thinwire_lab.papers.shared.claims import DRAGONN, Finding
from thinwire_lab.papers.shared.material import Logistic, Material, seconds


@DRAGONN.claim("D5")
def operations(material: Material) -> Finding:
    wrong, sizes = [], [2**power for power in range(4, 13)]
    for d in sizes:
        x = torch.randn(d, generator=torch.Generator().manual_seed(d)).abs().tolist()
        chosen, counts = by_prefix_sum(x, 1.5)
        right = chosen == [i for i, value in enumerate(x) if value >= 1.5]
        hashed = sum(value >= 1.5 for value in x) == len(chosen)  # a comparison a value, a hash a value that passes
        if not (right and hashed and counts == {"compare": 2 * d, "add": 2 * (d - 1), "swap": d - 1}):
            wrong.append(f"d = {d}: {dict(counts)}")
    figure = f"exact at {len(sizes) - len(wrong)} of {len(sizes)} sizes {'; '.join(wrong)}".strip()
    return Finding(holds=not wrong, figure=figure)


@DRAGONN.claim("D6")
def touches(material: Material) -> Finding:
    d = 4096
    counts = by_prefix_sum(torch.randn(d, generator=torch.Generator().manual_seed(0)).tolist(), 1.5)[1]
    touched = (counts["compare"] + 2 * (counts["add"] + counts["swap"])) / d
    x = torch.randn(material.many(1 << 18, 1 << 22), generator=torch.Generator().manual_seed(0))
    slower = seconds(lambda: (x.abs() >= 3).nonzero()) / seconds(lambda: x.sum())
    figure = f"{touched:.1f} times; on this CPU a mask and nonzero takes {slower:.1f} times one pass"
    return Finding(holds=6 <= touched <= 8, figure=figure)


def by_prefix_sum(values: Sequence[float], threshold: float) -> tuple[list[int], Counter[str]]:
    """Select by a parallel prefix sum (Appendix C). Return the indices and the operations spent.

    The number of values is a power of two.
    """
    counts: Counter[str] = Counter()
    mask = [int(value >= threshold) for value in values]
    counts["compare"] += len(values)
    places = _exclusive_scan(mask, counts)
    ends = [*places[1:], places[-1] + mask[-1]]
    counts["compare"] += len(values)
    return [i for i, (place, end) in enumerate(zip(places, ends, strict=True)) if end > place], counts


def _exclusive_scan(mask: list[int], counts: Counter[str]) -> list[int]:
    tree, reach = list(mask), 1
    while reach < len(tree):
        for right in range(2 * reach - 1, len(tree), 2 * reach):
            tree[right] += tree[right - reach]
            counts["add"] += 1
        reach *= 2
    tree[-1] = 0
    while reach > 1:
        reach //= 2
        for right in range(2 * reach - 1, len(tree), 2 * reach):
            tree[right - reach], tree[right] = tree[right], tree[right - reach]
            counts["swap"] += 1
            tree[right] += tree[right - reach]
            counts["add"] += 1
    return tree


@DRAGONN.claim("D7")
def any_order(material: Material) -> Finding:
    picks, repeats = torch.randperm(100_000)[:2000].to(torch.int32), material.many(10, 50)
    ours, latest, lengths = set(), set(), set()
    for _ in range(repeats):
        shuffled = picks[torch.randperm(len(picks))]
        slots = kernels.hashed_slots(shuffled, torch.zeros_like(shuffled), 1000, 100_000, 0)
        ours.add(tuple(slots.tolist()))
        order = torch.arange(len(picks), dtype=torch.int32)
        last = kernels.hashed_slots(shuffled, order, 1000, 100_000, 0)
        latest.add(tuple(last.tolist()))
        lengths.add(len(slots))
    filled = [value for value in next(iter(ours)) if value >= 0]
    once = len(set(filled)) == len(filled) and set(filled) <= set(picks.tolist())
    figure = (
        f"{len(ours)} distinct payload with a fixed winner, {len(latest)} when the last writer wins, in "
        f"{repeats} orders"
    )
    return Finding(holds=once and len(lengths) == 1 and len(ours) == 1, figure=figure)


@DRAGONN.claim("D13")
def encode_time(material: Material) -> Finding:
    x = torch.randn(1 << material.many(22, 24))
    densities = (1e-4, 1e-3, 1e-2)
    hashed = [seconds(lambda d=d: HashedSlots(density=d).encode(x)) for d in densities]  # type: ignore[misc]
    ratio = max(hashed) / min(hashed)
    times = ", ".join(f"{1000 * t:.1f} ms at {d:g}" for t, d in zip(hashed, densities, strict=True))
    figure = f"max/min {ratio:.2f} ({times})"
    return Finding(holds=ratio <= 1.2, figure=figure, said={"mib": x.nbytes >> 20, "threads": torch.get_num_threads()})


@DRAGONN.claim("D14")
def batched_decoding(material: Material) -> Finding:
    x = torch.randn(1 << material.many(21, 24))
    one, counts, out = _pick(x, 0.001), (1, 4, 16), torch.empty_like(x)
    batched = [seconds(lambda k=k: Sparse.concat([one] * k).write(out), 4) for k in counts]  # type: ignore[misc]
    dense = [seconds(lambda k=k: _one_by_one(one, k, out), 2) for k in counts]  # type: ignore[misc]
    slope, slope_dense = ((times[-1] - times[0]) / (counts[-1] - counts[0]) for times in (batched, dense))
    gain = dense[-1] / batched[-1]
    figure = f"slope {slope / slope_dense:.1%} of the dense way's; at K = 16 {gain:.1f} times faster"
    return Finding(holds=slope < 0.05 * slope_dense and gain >= counts[-1], figure=figure, said={"mib": x.nbytes >> 20})


def _one_by_one(payload: Sparse, count: int, out: Tensor) -> None:
    scratch = torch.empty_like(out)
    out.zero_()
    for _ in range(count):
        payload.write(scratch)
        out.add_(scratch)


@DRAGONN.claim("D25")
def batched_equals_each(material: Material) -> Finding:
    worst = 0.0
    for seed in range(material.many(20, 200)):
        generator = torch.Generator().manual_seed(seed)
        parts = [_pick(torch.randn(257, generator=generator, dtype=torch.float64), 0.3) for _ in range(1 + seed % 8)]
        together = Sparse.concat(parts[::-1]).dense()
        apart = torch.stack([part.dense() for part in parts]).sum(dim=0)
        worst = max(worst, float((together - apart).abs().max()))
    eps = 2.0**-52
    figure = f"largest difference {worst:.1e}, {worst / eps:.0f} units of float64"
    return Finding(holds=worst <= 64 * eps, figure=figure)


def _pick(x: Tensor, density: float) -> Sparse:
    return TopK(density=density).encode_signal(Plain(x))


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
        slots = kernels.hashed_slots(picks, picks, n, _SPACE, seed)
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
    kept = [
        x[slots[slots >= 0].long()]
        for seed in range(seeds)
        for slots in [kernels.hashed_slots(picks, torch.zeros_like(picks), len(picks), _SPACE, seed)]
    ]
    mean = 1 - sum(float(k.double().square().sum()) for k in kept) / seeds / float(x.double().square().sum())
    return mean, 1 - n * (1 - ((n - 1) / n) ** n) / (x.numel() * tau**2)


@DRAGONN.claim("D24")
def empty_share(material: Material) -> Finding:
    draws = material.many(1_000, 10_000)
    first, second = _empty(1024, 1024, draws), _empty(512, 1024, draws)
    p, q = (float(((e >= lo) & (e <= hi)).float().mean()) for e, lo, hi in ((first, 0.36, 0.38), (second, 0.13, 0.14)))
    figure = f"probability {p:.2f} and {q:.2f}; mean {first.mean():.5f} and {second.mean():.5f}"
    return Finding(holds=p >= 0.95 and q >= 0.8, figure=figure, said={"draws": draws})


def _empty(m: int, n: int, draws: int) -> Tensor:
    slots = torch.randint(m, (draws, n), generator=torch.Generator().manual_seed(1))
    return 1 - torch.zeros(draws, m).scatter_(1, slots, 1.0).mean(dim=1)


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
    g2 = 2 * float(problem.images.norm(dim=1).max()) ** 2
    d, eps = w.numel(), min(epsilons)
    bound = 8 * problem.smoothness * start / steps + 2 * g2 / (k * d) + (8 / eps**2 - 6) * g2
    figure = (
        f"|grad f|^2 ends at {norms[-1]:.2e}; the bound is {bound:.1e}, "
        f"10^{math.log10(bound / norms[-1]):.0f} times more"
    )
    return Finding(holds=min(norms) <= bound, figure=figure, said={"steps": steps})
