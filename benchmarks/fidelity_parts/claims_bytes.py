"""The offset float's arithmetic, and bytes on the wire against published ratios."""

import math

import torch

from fidelity_parts.claims import Finding, claim
from fidelity_parts.material import Material
from fidelity_parts.methods import offset
from thinwire.codecs import FFT, BlockTopK, Cast, Codec, TopK
from thinwire.formats import Levels, OffsetFloat, Ternary, balanced_eps, tuned_eps

LONG = 1 << 20


def ratio(codec: Codec) -> float:
    """Return how many times fewer bytes than float32 really travel for a long vector, header and all."""
    return 4 * LONG / codec.encode(torch.randn(LONG, generator=torch.Generator().manual_seed(0))).nbytes


@claim("F5", "The status bitmap becomes a noticeable cost above a ratio of about 20")
def bitmap(material: Material) -> Finding:
    shares = {nominal: 1 / (1 + 32 / nominal) for nominal in (5, 10, 20, 50)}
    real = ratio(FFT(density=0.15, values=offset(10, 5)))
    listed = ", ".join(f"{share:.0%} at {nominal}" for nominal, share in shares.items())
    figure = (
        f"one bit per scalar is {listed} of the bytes; theta 0.85 with 10 bits is {real:.1f} times, "
        f"{32 / 2.5:.1f} with a bit per scalar"
    )
    how = "arithmetic, and a real payload of 2^20 elements; holds if the bitmap is at least a third at 20"
    return Finding(holds=shares[20] >= 1 / 3, figure=figure, how=how)


@claim("F8", "m = 3, eps = 0.125, 8 bits: 0.256 -> 00001001 -> 0.25, base 0x3E0")
def worked_example(material: Material) -> Finding:
    form = OffsetFloat(bits=8, mantissa=3, eps=0.125, max=2.0, scaled=False)
    codes, scales = form.encode(torch.tensor([0.256, -0.256, 2.0, -2.0]), seed=0)
    back = form.decode(codes, scales).tolist()
    used = 1 + form.positives + form.negatives
    fits = codes.tolist() == [9, 42, 33, 66] and back == [0.25, -0.25, 2.0, -2.0] and form.grid.base == 0x3E0
    figure = (
        f"codes {codes.tolist()}, decoded {back}, base {form.grid.base:#x}, P = {form.positives}, {used} of "
        "256 codes used"
    )
    return Finding(holds=fits, figure=figure, how="exact comparison")


@claim("F9", "The grid adapts to [-0.5, 0.5] and [-5, 5]")
def adapts(material: Material) -> Finding:
    fits, figures = True, []
    for top in (0.5, 5.0):
        form = OffsetFloat.balanced(bits=8, mantissa=3, max=top, scaled=False)
        numbers = form.table()[1 : form.positives + 1].double()
        gaps = numbers.diff()
        fits &= bool((gaps[8:] == 2 * gaps[:-8]).all()) and abs(float(numbers[-1]) - top) <= top / 8
        figures.append(f"{top:g}: {len(numbers)} positives from {numbers[0]:.3g} to {numbers[-1]:g}")
    how = "exact: the spacing doubles every 2^3 codes, and the range ends within one step of the one asked for"
    return Finding(holds=fits, figure="; ".join(figures), how=how)


@claim("F10", "Tuning eps by the sign of (most negative value - min) converges to P = 2^N / 2")
def tuning(material: Material) -> Finding:
    settled, missing, off = 0, [], []
    for bits in range(4, 13):
        for mantissa in range(1, bits - 1):
            try:
                closed = balanced_eps(bits=bits, mantissa=mantissa, max=1.0)
            except ValueError:
                missing.append((bits, mantissa))
                continue
            tuned = tuned_eps(bits=bits, mantissa=mantissa, max=1.0)
            settled += tuned == closed
            off += [(bits, mantissa)] if tuned != closed else []
    figure = (
        f"ends at the closed form, P = 2^(N-1) - 1, in {settled} of {settled + len(off)} cases; no eps exists "
        f"in {len(missing)}"
    )
    how = f"N = 4 to 12, every mantissa below N - 1, max 1; none exists for (N, m) {missing[:4]} and so on"
    return Finding(holds=not off, figure=figure, how=how)


@claim(
    "F11",
    "The smallest useful ratio is about 2 at 10 Gbit/s and 30 at 56 Gbit/s; nothing pays above 22 Gbit/s at 12 GB/s",
)
def smallest_ratio(material: Material) -> Finding:
    first, second = 1 / (2 * 22 / 8), (1 - 1 / 30) / (2 * 56 / 8)
    at = {name: [_least(gbit / 8, cost) for gbit in (10, 56)] for name, cost in (("22", first), ("30", second))}
    fits = any(abs(low / 2 - 1) < 0.15 and abs(high / 30 - 1) < 0.15 for low, high in at.values())
    figure = (
        f"'22 Gbit/s' fixes {first:.4f} s/GB, then {at['22'][0]:.2f} at 10 and {_said(at['22'][1])} at 56; "
        f"'30 at 56' needs {second:.4f}, then {at['30'][0]:.2f} at 10; instant selection leaves {first - 1 / 12:.4f}"
    )
    return Finding(holds=fits, figure=figure, how="Eq. 4 recomputed; holds if one setting gives 2 and 30 within 15 %")


def _said(ratio: float) -> str:
    return "no ratio pays" if math.isinf(ratio) else f"{ratio:.2f}"


def _least(gigabytes: float, cost: float) -> float:
    rest = 1 - 2 * gigabytes * cost
    return 1 / rest if rest > 0 else math.inf


@claim("F21", "Compression ratios 21.3 (FFT), 6.67 (Top-k), 16 (TernGrad), 10.6 (QSGD)")
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
    how = "payloads of 2^20 elements with headers, scales, indices or bitmap; holds if all are within 2 %"
    return Finding(holds=all(abs(found / p - 1) < 0.02 for p, found in real.values()), figure=figure, how=how)


@claim("T25", "Communication falls up to 20 times (95 % sparsity)")
def twenty_times(material: Material) -> Finding:
    masked, listed = ratio(BlockTopK(density=0.05, block=1)), ratio(TopK(density=0.05))
    both = 2 / (1 / masked + 0.05)
    figure = (
        f"{masked:.1f} times with a bit mask, {listed:.1f} with 32-bit indices, {both:.1f} over both ways if "
        "one needs no mask"
    )
    return Finding(
        holds=max(masked, both) >= 19.5, figure=figure, how="payloads of 2^20 float32 elements at density 0.05"
    )
