"""FFT-based sparsification and the offset float (Wang et al. 2020): what reaches the other side."""

import math

import torch
from torch import Tensor

from fidelity_parts.claims import Finding, claim
from fidelity_parts.grids import ieee_error, logarithmic_error, offset_error, uniform_error
from fidelity_parts.material import Material, error
from fidelity_parts.reconstruction import FOUR, absolute_errors, distribution, four_restored
from thinwire.codecs import FFT, BlockTopK, Cast, TopK
from thinwire.payloads import spectral


@claim("F3", "Gradients crowd around zero (roughly normal)")
def crowd(material: Material) -> Finding:
    tensors = [x.double() for _, x in material.tensors(least=512)]
    kurtosis = [float(((x - x.mean()) ** 4).mean() / x.var() ** 2) - 3 for x in tensors]
    crowded = [float((x.abs() < x.std() / 2).double().mean()) for x in tensors]
    # Both laws have two parameters here, so the better likelihood has the better AIC.
    laplace = sum(_laplace_loss(x) < _normal_loss(x) for x in tensors) / len(tensors)
    median = sorted(kurtosis)[len(kurtosis) // 2]
    inside = sum(crowded) / len(crowded)
    figure = (
        f"{inside:.0%} within half a s.d. of 0 (38 % if normal), median excess kurtosis {median:.1f}; Laplace "
        f"fits better on {laplace:.0%}"
    )
    how = (
        f"{len(tensors)} tensors; holds if they crowd as a normal law does or more, and normal is beaten on "
        "less than half"
    )
    return Finding(holds=inside >= 0.38 and laplace < 0.5, figure=figure, how=how)


def _normal_loss(x: Tensor) -> float:
    return 0.5 * math.log(2 * math.pi * math.e * float(x.var()))


def _laplace_loss(x: Tensor) -> float:
    return 1 + math.log(2 * float((x - x.median()).abs().mean()))


@claim("F4", "At equal sparsity frequency Top-k has the smaller error")
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
    how = "err2, float32 values, blocks of 4096; holds if smaller on most tensors and on every whole gradient"
    return Finding(holds=min(better) > 0.5 and all(f < d for f, d in whole), figure=figure, how=how)


def _both(x: Tensor, density: float, bytes_alike: bool = False) -> tuple[float, float]:
    """Return the errors of frequency and direct Top-k. Alike in bytes, a bit for each element costs 1/64 of density."""
    direct = BlockTopK(density=density - 1 / 64, block=1) if bytes_alike else TopK(density=density)
    return error(x, FFT(density=density).encode(x).dense()), error(x, direct.encode(x).dense())


@claim("F7", "Given N bits, the offset float fits gradients better than uniform steps or a plain N-bit IEEE split")
def best_format(material: Material) -> Finding:
    samples = _samples(material)
    found = {bits: [_beats(x, bits) for x in samples] for bits in (4, 6, 8, 10)}
    shares = {bits: [sum(kind) / len(samples) for kind in zip(*rows, strict=True)] for bits, rows in found.items()}
    listed = ", ".join(f"{plain:.0%} at {bits} bits" for bits, (plain, _, _) in shares.items())
    scaled, logs = (sum(share[kind] for share in shares.values()) / len(shares) for kind in (1, 2))
    figure = (
        f"least error of offset float, uniform and plain IEEE on {listed}; beats uniform and IEEE scaled to max "
        f"on {scaled:.0%}, a log-uniform grid on {logs:.0%} overall"
    )
    how = (
        f"{len(samples)} samples of tensors and spectra, best mantissa each, nearest; holds if at least 80 % at each N"
    )
    return Finding(holds=min(plain for plain, _, _ in shares.values()) >= 0.8, figure=figure, how=how)


def _beats(x: Tensor, bits: int) -> tuple[bool, bool, bool]:
    ours, uniform = offset_error(x, bits), uniform_error(x, bits)
    plain, scaled = (min(uniform, ieee_error(x, bits, scaled=scaled)) for scaled in (False, True))
    return ours <= plain, ours <= scaled, ours <= logarithmic_error(x, bits)


def _samples(material: Material) -> list[Tensor]:
    every = [x for _, x in material.tensors(least=512)]
    chosen = every[:: max(1, len(every) // material.many(4, 16))]
    found = []
    for x in chosen:
        part = x[:: max(1, x.numel() // 4096)]
        found += [part, spectral.forward(x, 4096).reshape(-1)[:4096]]
    return [x[x != 0] for x in found if bool((x != 0).sum() > 64)]


@claim("F12", "Half precision before the FFT loses next to nothing")
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
    how = "every tensor, no loss scaling; holds if err2 < 1e-5 and no element becomes 0 or infinite"
    return Finding(holds=max(errors) < 1e-5 and zeroed == 0 and infinite == 0, figure=figure, how=how)


@claim("F14", "|v - v_bar| / |v| stays in [0, 1]")
def alpha(material: Material) -> Finding:
    found = [(run.model, a) for run in material.recorded() for a in run.alphas]
    worst = {theta: max(a.value for _, a in found if a.theta == theta) for theta in sorted({a.theta for _, a in found})}
    added = max(abs(a.value - b.value) for (_, a), (_, b) in zip(found[::2], found[1::2], strict=True))
    figure = "largest " + ", ".join(f"{value:.3f} at {theta:g}" for theta, value in worst.items())
    how = f"P = 4 simulated workers over training, v_bar their mean; 10-bit numbers change it by at most {added:.4f}"
    return Finding(holds=max(worst.values()) <= 1, figure=figure, how=how)


@claim("F22", "FFT keeps the histogram's shape; Top-k loses the centre; QSGD shows 7 clusters, TernGrad 3")
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
    how = "Wasserstein distance over mean |g|, per model; holds if FFT's is smallest and levels are at most 7 and 3"
    fits = best == "fft" and levels["qsgd 3 bits"] <= 7 and levels["terngrad"] <= 3
    return Finding(holds=fits, figure=f"distance {figure}; {counted}", how=how)


@claim("F23", "FFT has the lowest error in the range 1e-5 to 1e-2")
def lowest_error(material: Material) -> Finding:
    ahead, squares = [], []
    for run in material.recorded():
        curves = {name: distribution(values) for name, values in absolute_errors(run).items()}
        others = torch.stack([curve for name, curve in curves.items() if name != "fft"]).amax(dim=0)
        ahead.append((run.model, float((curves["fft"] >= others).float().mean())))
        squares.append({name: error(x, restored) for name, (x, restored) in four_restored(run).items()})
    figure = ", ".join(f"{model}: ahead at {share:.0%} of the range" for model, share in ahead)
    figure += "; err2 " + "; ".join(", ".join(f"{n} {v:.2f}" for n, v in found.items()) for found in squares)
    how = (
        "empirical distribution of |g - g'|, late gradients, theta 0.85; holds if FFT's lies above the "
        "others throughout"
    )
    return Finding(holds=all(share == 1 for _, share in ahead), figure=figure, how=how)


@claim("F26", "Re-broadcasting parameters every 10 iterations is enough against drift of replicas")
def drift(material: Material) -> Finding:
    codec, generator = FOUR["fft"], torch.Generator().manual_seed(0)
    replicas = [torch.zeros(5000) for _ in range(4)]
    for step in range(20):
        sent = [codec.encode(torch.randn(5000, generator=generator), seed=step) for _ in replicas]
        rows = torch.stack([payload.to_buffer() for payload in sent])
        for replica, own in zip(replicas, sent, strict=True):
            replica.add_(own.from_rows(rows).dense(), alpha=-0.1)
    apart = max(float((replica - replicas[0]).abs().max()) for replica in replicas)
    figure = f"replicas differ by {apart:g} after 20 steps without any broadcast"
    return Finding(
        holds=apart == 0, figure=figure, how="4 ranks decode the same buffers; trivially enough if the drift is 0"
    )
