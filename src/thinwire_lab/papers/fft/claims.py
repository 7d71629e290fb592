"""What arrives at the other side, and in how many bytes? And statements on convergence."""

import math
import operator
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import FFT, BlockTopK, Cast, Codec, TopK
from thinwire.formats import Levels, Ternary
from thinwire_lab.papers.shared.claims import FFT_PAPER, Finding
from thinwire_lab.papers.shared.errors import offset
from thinwire_lab.papers.shared.material import Logistic, Material, Run, error, ratio, seconds

THETA = 0.85
FOUR: dict[str, Codec] = {
    "fft": FFT(density=1 - THETA, values=offset(10, 5)),
    "topk": TopK(density=1 - THETA),
    "qsgd 3 bits": Cast(values=Levels(bits=3, norm="max", group_size=None)),
    "terngrad": Cast(values=Ternary()),
}
RANGE = torch.logspace(-5, -2, 61)
"""Of absolute errors: which share of elements is below each of these?"""


@lru_cache(maxsize=2)
def four_restored(run: Run) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the late gradient and each method's reconstruction of it, tensor by tensor."""
    tensors = list(run.late.mean.values())
    whole = torch.cat([x.reshape(-1) for x in tensors])
    return {name: (whole, torch.cat([codec.encode(x).dense() for x in tensors])) for name, codec in FOUR.items()}


@FFT_PAPER.claim("F3")
def crowd(material: Material) -> Finding:
    tensors = [x.double() for _, x in material.tensors(least=512)]
    kurtosis = [float(((x - x.mean()) ** 4).mean() / x.var() ** 2) - 3 for x in tensors]
    crowded = [float((x.abs() < x.std() / 2).double().mean()) for x in tensors]
    # Both laws have two parameters here, so the better likelihood has the better AIC.
    normal_losses = [0.5 * math.log(2 * math.pi * math.e * float(x.var())) for x in tensors]
    laplace_losses = [1 + math.log(2 * float((x - x.median()).abs().mean())) for x in tensors]
    laplace = sum(map(operator.lt, laplace_losses, normal_losses)) / len(tensors)
    median = sorted(kurtosis)[len(kurtosis) // 2]
    inside = sum(crowded) / len(crowded)
    figure = (
        f"{inside:.0%} within half a s.d. of 0 (38 % if normal), median excess kurtosis {median:.1f}; Laplace "
        f"fits better on {laplace:.0%}"
    )
    return Finding(holds=inside >= 0.38 and laplace < 0.5, figure=figure, said={"tensors": len(tensors)})


@FFT_PAPER.claim("F6")
def packing(material: Material) -> Finding:
    x = torch.randn(material.many(1 << 16, 1 << 24), generator=torch.Generator().manual_seed(0))
    copied = torch.empty_like(x)
    copy = x.numel() / seconds(lambda: copied.copy_(x))
    few = x[: x.numel() >> 6].tolist()
    rates = {
        "a Python loop": len(few) / seconds(lambda: [value for value in few if abs(value) >= 1.44], repeats=1),
        "torch's mask": x.numel() / seconds(lambda: x[x.abs() >= 1.44]),
        "ours": x.numel() / seconds(lambda: kernels.select(x, torch.tensor(1.44), x.numel())),
    }
    figure = ", ".join(f"{name} {4e-9 * rate:.2g} GB/s" for name, rate in rates.items())
    return Finding(
        holds=rates["ours"] >= 0.5 * copy,
        figure=figure,
        said={"numel": x.numel(), "copy": 4e-09 * copy, "times": rates["ours"] / rates["a Python loop"]},
    )


@FFT_PAPER.claim("F4")
def frequency_or_direct(material: Material) -> Finding:
    better, whole, figures = [], [], []
    cheaper = [_both(x, 0.15, bytes_alike=True) for _, x in material.tensors(least=64)]
    for density in (0.05, 0.15, 0.5):
        pairs = [_both(x, density) for _, x in material.tensors(least=64)]
        better.append(sum(f < d for f, d in pairs) / len(pairs))
        for run in material.recorded():
            x = torch.cat([g.reshape(-1) for g in run.late.mean.values()])
            whole.append(_both(x, density))
            figures.append(f"{run.model} {density:g}: {whole[-1][0]:.2g}/{whole[-1][1]:.2g}")
    shares = ", ".join(f"{share:.0%}" for share in better)
    alike = sum(f < d for f, d in cheaper) / len(cheaper)
    figure = (
        f"smaller on {shares} of the tensors at density 0.05, 0.15, 0.5 ({alike:.0%} at 0.15 and equal bytes); "
        f"whole gradient frequency/direct {'; '.join(figures)}"
    )
    return Finding(holds=min(better) > 0.5 and all(f < d for f, d in whole), figure=figure)


def _both(x: Tensor, density: float, bytes_alike: bool = False) -> tuple[float, float]:
    """Return the errors of frequency and direct Top-k. At equal bytes, a bit per element costs 1/64 of density."""
    direct = BlockTopK(density=density - 1 / 64, block=1) if bytes_alike else TopK(density=density)
    return error(x, FFT(density=density).encode(x).dense()), error(x, direct.encode(x).dense())


@FFT_PAPER.claim("F12")
def half(material: Material) -> Finding:
    errors, zeroed, infinite, count = [], 0, 0, 0
    for _, x in material.tensors():
        restored = Cast(values=torch.float16).encode(x).dense().float()
        errors.append(error(x, restored))
        zeroed += int(((restored == 0) & (x != 0)).sum())
        infinite += int(restored.isinf().sum())
        count += int((x != 0).sum())
    figure = (
        f"largest err2 {max(errors):.1e}; {zeroed / count:.2%} of the non-zero elements become 0, {infinite} infinite"
    )
    return Finding(holds=max(errors) < 1e-5 and zeroed == 0 and infinite == 0, figure=figure)


@FFT_PAPER.claim("F14")
def alpha(material: Material) -> Finding:
    found = [(run.model, a) for run in material.recorded() for a in run.alphas]
    worst = {theta: max(a.value for _, a in found if a.theta == theta) for theta in sorted({a.theta for _, a in found})}
    added = max(abs(a.value - b.value) for (_, a), (_, b) in zip(found[::2], found[1::2], strict=True))
    figure = "largest " + ", ".join(f"{value:.3f} at {theta:g}" for theta, value in worst.items())
    return Finding(holds=max(worst.values()) <= 1, figure=figure, said={"added": added})


@FFT_PAPER.claim("F22")
def histogram(material: Material) -> Finding:
    distances, levels = dict.fromkeys(FOUR, 0.0), {}
    for run in material.recorded():
        for method, (x, restored) in four_restored(run).items():
            distances[method] += float((x.sort().values - restored.sort().values).abs().mean() / x.abs().mean())
    name, largest = max(run.late.mean.items(), key=lambda item: item[1].numel())
    for method, codec in FOUR.items():
        levels[method] = len(codec.encode(largest.reshape(-1)[:512]).dense().unique())
    figure = ", ".join(f"{method} {value / len(material.runs):.3f}" for method, value in distances.items())
    workers = [FOUR["terngrad"].encode(w[name].reshape(-1)[:512], seed=i) for i, w in enumerate(run.late.workers[:4])]
    summed = len(torch.stack([payload.dense() for payload in workers]).sum(dim=0).unique())
    counted = f"QSGD {levels['qsgd 3 bits']} levels, TernGrad {levels['terngrad']}, {summed} summed over {len(workers)}"
    best = min(distances, key=lambda method: distances[method])
    fits = best == "fft" and levels["qsgd 3 bits"] <= 7 and levels["terngrad"] <= 3
    return Finding(holds=fits, figure=f"distance {figure}; {counted}")


@FFT_PAPER.claim("F23")
def lowest_error(material: Material) -> Finding:
    ahead = []
    for run in material.recorded():
        errors = {name: (x - restored).abs().sort().values for name, (x, restored) in four_restored(run).items()}
        curves = {name: torch.searchsorted(each, RANGE, right=True) / each.numel() for name, each in errors.items()}
        others = torch.stack([curve for name, curve in curves.items() if name != "fft"]).amax(dim=0)
        ahead.append((run.model, float((curves["fft"] >= others).float().mean())))
    figure = ", ".join(f"{model}: ahead at {share:.0%} of the range" for model, share in ahead)
    return Finding(holds=all(share == 1 for _, share in ahead), figure=figure)


@FFT_PAPER.claim("F26")
def drift(material: Material) -> Finding:
    codec, generator = FOUR["fft"], torch.Generator().manual_seed(0)
    replicas = [torch.zeros(5000) for _ in range(4)]
    for step in range(20):
        sent = [codec.encode(torch.randn(5000, generator=generator), seed=step) for _ in replicas]
        rows = torch.stack([payload.to_buffer() for payload in sent])
        for replica, own in zip(replicas, sent, strict=True):
            replica.add_(own.from_buffers(rows).dense(), alpha=-0.1)
    apart = max(float((replica - replicas[0]).abs().max()) for replica in replicas)
    figure = f"replicas differ by {apart:g} after 20 steps without any broadcast"
    return Finding(holds=apart == 0, figure=figure)


@FFT_PAPER.claim("F5")
def bitmap(material: Material) -> Finding:
    shares = {nominal: 1 / (1 + 32 / nominal) for nominal in (5, 10, 20, 50)}
    listed = ", ".join(f"{share:.0%} at {nominal}" for nominal, share in shares.items())
    figure = f"one bit per scalar is {listed} of the bytes"
    return Finding(holds=shares[20] >= 1 / 3, figure=figure)


@FFT_PAPER.claim("F21")
def ratios(material: Material) -> Finding:
    rows = {
        "FFT": (21.3, FFT(density=0.15, values=offset(10, 5))),
        "Top-k": (6.67, TopK(density=0.15)),
        "Top-k with a bitmap": (6.67, BlockTopK(density=0.15, block=1)),
        "TernGrad": (16.0, Cast(values=Ternary())),
        "QSGD": (10.6, Cast(values=Levels(bits=3))),
    }
    real = {name: (published, ratio(codec)) for name, (published, codec) in rows.items()}
    figure = ", ".join(f"{name} {found:.2f} ({published:g})" for name, (published, found) in real.items())
    return Finding(holds=all(abs(found / p - 1) < 0.02 for p, found in real.values()), figure=figure)


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
