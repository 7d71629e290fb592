"""Sums of rows, products with thin factors, orthonormal columns and inverse Fourier transforms: exactly the same bits.

They are the same on every processor. A library chooses its algorithm by processor, and adds in the order that suits its
vectors, with fused operations if it has them. On a GPU the last two are a library's: its order of additions is the same
on all GPUs of one kind.
"""

from functools import lru_cache
from math import sqrt

import torch
from torch import Tensor

from thinwire.kernels.memory import constant, sent

_ONE = 1 << 128
_PI = 31415926535897932384626433832795028841971693993751  # times 10⁻⁴⁹


def row_sums(rows: Tensor) -> Tensor:
    """Return Σ rows[k] of `rows` (ranks, n), added rank after rank in float32 or wider: (n), of the same dtype."""
    total = rows[0].to(torch.promote_types(rows.dtype, torch.float32), copy=True)
    for row in rows[1:]:
        total += row
    return total.to(rows.dtype)


def outer_sums(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write a·bᵀ of a (n, r) and b (m, r), r ≥ 1, to `out` (n, m): Σ a[i, j] · b[k, j], added in the order of j."""
    torch.mul(a[:, :1], b[:, 0], out=out)
    for j in range(1, a.shape[1]):
        out += a[:, j, None] * b[:, j]


def orthonormal(x: Tensor) -> Tensor:
    """Return Q (n, r) of x = QR for finite x (n, r), n ≥ r: Householder's reflections in float64.

    The columns of Q are orthonormal even if columns of x are zeros or depend on others. Sums are taken by halves.
    """
    a = x.to(torch.float64)
    peak = a.abs().amax()
    a = a / torch.where(peak > 0, peak, 1.0)
    q = torch.eye(*a.shape, dtype=torch.float64, device=a.device)
    reflections = []
    for j in range(a.shape[1]):
        v, factor = _reflection(a[j:, j])
        a[j:, j:] = _reflected(a[j:, j:], v, factor)
        reflections.append((v, factor))
    for j in reversed(range(a.shape[1])):
        q[j:, j:] = _reflected(q[j:, j:], *reflections[j])
    return q.to(x.dtype)


def _reflection(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return v and f with (1 − f·v·vᵀ)·x = β·e₁, |β| = ‖x‖; f is 0 for a vector of zeros."""
    norm = _sum(x * x).sqrt()
    beta = torch.where(x[0] < 0, norm, -norm)
    squares = beta * beta - x[0] * beta
    v = x.clone()
    v[0] -= beta
    return v, torch.where(squares > 0, 1 / squares, 0.0)


def _reflected(y: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    return y - v[:, None] * (factor * _sum(v[:, None] * y))


def _sum(x: Tensor) -> Tensor:
    """Return the sum over the first dimension: add the second half to the first until one is left."""
    while x.shape[0] > 1:
        half = (x.shape[0] + 1) // 2
        x = torch.cat((x[: x.shape[0] - half] + x[half:], x[x.shape[0] - half : half]))
    return x[0]


def inverse_fourier(pairs: Tensor, numel: int, width: int) -> Tensor:
    """Return `numel` elements, in blocks of `width`, each from its ⌊width/2⌋ + 1 coefficients (real, imaginary).

    This inverts the orthonormal real transform, in float32 or float64. Every product and sum is rounded on its own, in
    the order of Stockham's algorithm with factors 4, 2 and odd primes. Two real blocks are transformed as one complex
    block. A large prime factor p costs p operations per element.
    """
    blocks = pairs.view(-1, width // 2 + 1, 2)
    x = _joined(torch.nn.functional.pad(blocks, (0, 0, 0, 0, 0, blocks.shape[0] % 2)), width)
    cos, sin = turns(width, pairs.dtype)
    w = sent(cos, pairs.device), sent(sin, pairs.device)
    rest, span = width, 1
    for radix in radices(width):
        rest //= radix
        x = _stage(x, radix, rest, span, w)
        span *= radix
    # (complex part, element, pair of blocks) → (pair of blocks, complex part, element)
    return torch.stack(x).permute(2, 0, 1).mul(1 / sqrt(width)).reshape(-1)[:numel]


_Complex = tuple[Tensor, Tensor]


def _joined(blocks: Tensor, width: int) -> _Complex:
    """Return A + iB for every two blocks, at all frequencies: (width, pairs of blocks) each part."""
    (ar, br), (ai, bi) = (part.T.unflatten(1, (-1, 2)).unbind(2) for part in blocks.unbind(2))
    ends = (0, width // 2) if width % 2 == 0 else (0,)  # which have no imaginary part
    ai, bi = (part.index_fill(0, constant(ends, torch.int64, part.device), 0) for part in (ai, bi))
    mirrored = slice(1, (width + 1) // 2)
    backwards = (part[mirrored].flip(0) for part in (ar + bi, br - ai))
    return tuple(torch.cat(parts) for parts in zip((ar - bi, ai + br), backwards, strict=True))  # type: ignore[return-value]


def _stage(x: _Complex, radix: int, rest: int, span: int, w: _Complex) -> _Complex:
    shape = (radix, rest, span, x[0].shape[-1])
    inputs = [(real, imaginary) for real, imaginary in zip(*(part.view(shape) for part in x), strict=True)]
    turn = torch.arange(rest, device=x[0].device) * span
    outputs = _BUTTERFLIES.get(radix, _sums)(inputs, turn, w)
    parts = (torch.stack(part, dim=1) for part in zip(*outputs, strict=True))  # (rest, radix, span, pairs of blocks)
    return tuple(part.reshape(-1, shape[-1]) for part in parts)  # type: ignore[return-value]


def _two(x: list[_Complex], turn: Tensor, w: _Complex) -> list[_Complex]:
    return [_add(x[0], x[1]), _times(_subtract(x[0], x[1]), turn, w)]


def _four(x: list[_Complex], turn: Tensor, w: _Complex) -> list[_Complex]:
    a, b, c, d = x
    even, odd, both = _add(a, c), _subtract(a, c), _add(b, d)
    turned = d[1] - b[1], b[0] - d[0]
    others = (_add(odd, turned), _subtract(even, both), _subtract(odd, turned))
    return [_add(even, both), *(_times(number, j * turn, w) for j, number in enumerate(others, 1))]


def _sums(x: list[_Complex], turn: Tensor, w: _Complex) -> list[_Complex]:
    size, radix = w[0].numel(), len(x)
    sums = []
    for j in range(radix):
        total = _times(x[0], j * turn, w)
        for m in range(1, radix):
            total = _add(total, _times(x[m], j * (turn + m * (size // radix)) % size, w))
        sums.append(total)
    return sums


_BUTTERFLIES = {2: _two, 4: _four}


def _add(a: _Complex, b: _Complex) -> _Complex:
    return a[0] + b[0], a[1] + b[1]


def _subtract(a: _Complex, b: _Complex) -> _Complex:
    return a[0] - b[0], a[1] - b[1]


def _times(a: _Complex, turn: Tensor, w: _Complex) -> _Complex:
    real, imaginary = (part[turn][:, None, None] for part in w)
    return a[0] * real - a[1] * imaginary, a[0] * imaginary + a[1] * real


@lru_cache(maxsize=64)
def radices(size: int) -> tuple[int, ...]:
    """Return factors of `size`: as many 4s as possible, perhaps a 2, then odd primes."""
    found, candidate = [], 4
    while size > 1:
        while size % candidate == 0:
            found.append(candidate)
            size //= candidate
        candidate = {4: 2, 2: 3}.get(candidate, candidate + 2)
        if candidate * candidate > size > 1 and candidate > 3:
            candidate = size
    return tuple(found)


@lru_cache(maxsize=64)
def turns(size: int, dtype: torch.dtype) -> _Complex:
    """Return cos and sin of 2πk/size for all k, rounded once.

    Computed in integers, because a library's cosine may differ in its last bit from one processor to the next.
    """
    step = _first_turn(size)
    real, imaginary = [_ONE], [0]
    for _ in range(size - 1):
        x, y = real[-1], imaginary[-1]
        real.append((x * step[0] - y * step[1]) // _ONE)
        imaginary.append((x * step[1] + y * step[0]) // _ONE)
    # What is left of a zero after rounding is so small that a processor multiplies by it a hundred times slower.
    exact = ([x / _ONE if abs(x) >> 64 else 0.0 for x in part] for part in (real, imaginary))
    parts = (torch.tensor(part, dtype=torch.float64, device="cpu") for part in exact)
    return tuple(part.to(dtype) for part in parts)  # type: ignore[return-value]


def _first_turn(size: int) -> tuple[int, int]:
    """Return cos and sin of 2π/size in units of 2⁻¹²⁸, by their series."""
    angle = 2 * _PI * _ONE // (10**49 * size)
    term, sums, order = _ONE, [0, 0], 0
    while term:
        sums[order % 2] += -term if order % 4 > 1 else term
        order += 1
        term = term * angle // _ONE // order
    return sums[0], sums[1]
