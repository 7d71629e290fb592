"""The offset float: its arithmetic, what it costs, and other ways to spend N bits on a number.

Every other way is a table of numbers; each value is rounded to the nearest.
"""

import math

import torch
from torch import Tensor

from thinwire.formats import OffsetFloat, balanced_eps
from thinwire.formats.offset_float import MANTISSA, number, pattern
from thinwire.payloads import spectral
from thinwire_lab.papers.shared.claims import FFT_PAPER, Finding
from thinwire_lab.papers.shared.material import Material


@FFT_PAPER.claim("F8")
def worked_example(material: Material) -> Finding:
    form = OffsetFloat(bits=8, mantissa=3, eps=0.125, max=2.0, scaled=False)
    codes, scales = form.encode(torch.tensor([0.256, -0.256, 2.0, -2.0]), seed=0)
    back = form.decode(codes, scales).tolist()
    used = 1 + form.grid.positives + form.grid.negatives
    fits = codes.tolist() == [9, 42, 33, 66] and back == [0.25, -0.25, 2.0, -2.0] and form.grid.base == 0x3E0
    figure = (
        f"codes {codes.tolist()}, decoded {back}, base {form.grid.base:#x}, P = {form.grid.positives}, {used} of "
        "256 codes used"
    )
    return Finding(holds=fits, figure=figure)


@FFT_PAPER.claim("F9")
def adapts(material: Material) -> Finding:
    fits, figures = True, []
    for top in (0.5, 5.0):
        form = OffsetFloat.balanced(bits=8, mantissa=3, max=top, scaled=False)
        numbers = form.table()[1 : form.grid.positives + 1].double()
        gaps = numbers.diff()
        fits &= bool((gaps[8:] == 2 * gaps[:-8]).all()) and abs(float(numbers[-1]) - top) <= top / 8
        figures.append(f"{top:g}: {len(numbers)} positives from {numbers[0]:.3g} to {numbers[-1]:g}")
    return Finding(holds=fits, figure="; ".join(figures))


def tuned_eps(*, bits: int, mantissa: int, max: float, min: float | None = None, start: float = 0.002) -> float:
    """Return the eps that tuning finds: lower it while code 1…1 decodes below `min`, else raise it (Wang et al. 2020).

    Each step moves eps by one number of the grid, from `start` on. In the end it swings between two numbers. This
    returns the greater one, at which code 1…1 still reaches `min`. For min = -max that is `balanced_eps`.

    Raises:
        ValueError: If eps falls below float32's normal numbers.
    """
    shift = MANTISSA - mantissa
    base, top = pattern(start) >> shift, pattern(max) >> shift
    least = pattern(-min if min is not None else max) >> shift
    while base > 0 and _last(base - 1, top, bits) >= least:
        base -= 1
    while _last(base, top, bits) < least:
        base += 1
    if base < 1 << mantissa:
        raise ValueError(
            f"no balanced format exists for {bits} bits and mantissa {mantissa}: eps would be below float32's numbers"
        )
    return number(base << shift)


def _last(base: int, top: int, bits: int) -> int:
    """Return the magnitude that code 1…1 decodes to, as a pattern on the grid."""
    positives = top - base + 1
    return 2**bits - 1 - positives + base - 1


@FFT_PAPER.claim("F10")
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
    return Finding(holds=not off, figure=figure, said={"missing": missing[:4]})


@FFT_PAPER.claim("F11")
def smallest_ratio(material: Material) -> Finding:
    first, second = 1 / (2 * 22 / 8), (1 - 1 / 30) / (2 * 56 / 8)
    at = {name: [_least(gbit / 8, cost) for gbit in (10, 56)] for name, cost in (("22", first), ("30", second))}
    fits = any(abs(low / 2 - 1) < 0.15 and abs(high / 30 - 1) < 0.15 for low, high in at.values())
    figure = (
        f"'22 Gbit/s' fixes {first:.4f} s/GB, then {at['22'][0]:.2f} at 10 and {_said(at['22'][1])} at 56; "
        f"'30 at 56' needs {second:.4f}, then {at['30'][0]:.2f} at 10; instant selection leaves {first - 1 / 12:.4f}"
    )
    return Finding(holds=fits, figure=figure)


def _said(ratio: float) -> str:
    return "no ratio pays" if math.isinf(ratio) else f"{ratio:.2f}"


def _least(gigabytes: float, cost: float) -> float:
    rest = 1 - 2 * gigabytes * cost
    return 1 / rest if rest > 0 else math.inf


@FFT_PAPER.claim("F7")
def best_format(material: Material) -> Finding:
    samples = _samples(material)
    shares = dict.fromkeys((4, 6, 8, 10), 0.0)
    for bits in shares:
        beaten = [offset_error(x, bits) <= min(uniform_error(x, bits), ieee_error(x, bits)) for x in samples]
        shares[bits] = sum(beaten) / len(samples)
    listed = ", ".join(f"{share:.0%} at {bits} bits" for bits, share in shares.items())
    figure = f"least error of offset float, uniform and plain IEEE on {listed}"
    return Finding(holds=min(shares.values()) >= 0.8, figure=figure, said={"samples": len(samples)})


def _samples(material: Material) -> list[Tensor]:
    every = [x for _, x in material.tensors(least=512)]
    chosen = every[:: max(1, len(every) // material.many(4, 16))]
    found = []
    for x in chosen:
        part = x[:: max(1, x.numel() // 4096)]
        found += [part, spectral.forward(x, 4096).reshape(-1)[:4096]]
    return [x[x != 0] for x in found if bool((x != 0).sum() > 64)]


def offset_error(x: Tensor, bits: int) -> float:
    """Return the squared error of the best balanced offset float, rounded to nearest: of that many bits of mantissa."""
    errors, binades = [], 126  # of 2^m numbers each, between float32's least normal number and 1
    least = next(m for m in range(MANTISSA) if binades * 2**m + 1 >= 2 ** (bits - 1) - 1)
    for mantissa in range(least, bits + 1):
        form = OffsetFloat.balanced(bits=bits, mantissa=mantissa, rounding="nearest")
        codes, scales = form.encode(x, seed=0)
        errors.append(float((x.double() - form.decode(codes, scales).double()).square().sum()))
    return min(errors)


def uniform_error(x: Tensor, bits: int) -> float:
    """Return the squared error of 2^N - 1 even steps from -max to max."""
    return _on_grid(x, torch.linspace(0, 1, 2 ** (bits - 1)) * x.abs().max())


def ieee_error(x: Tensor, bits: int) -> float:
    """Return the squared error of the best split into exponent and mantissa, subnormals included, as in IEEE 754."""
    return min(_ieee(x, exponent, bits - 1 - exponent) for exponent in range(2, min(bits, 9)))


def _ieee(x: Tensor, exponent: int, mantissa: int) -> float:
    bias = 2 ** (exponent - 1) - 1
    fractions = torch.arange(2**mantissa, dtype=torch.float64) / 2**mantissa
    subnormal = fractions * 2.0 ** (1 - bias)
    normal = [(1 + fractions) * 2.0 ** (e - bias) for e in range(1, 2**exponent - 1)]
    return _on_grid(x, torch.cat([subnormal, *normal]))


def _on_grid(x: Tensor, positives: Tensor) -> float:
    """Round magnitudes to the nearest of ascending numbers; larger ones to the last."""
    grid, size = positives.double().contiguous(), x.abs().double()
    right = torch.searchsorted(grid, size).clamp(max=len(grid) - 1)
    left = (right - 1).clamp(min=0)
    nearer = torch.where(size - grid[left] <= grid[right] - size, grid[left], grid[right])
    return float((nearer - size).square().sum())
