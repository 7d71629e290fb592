"""Inverse Fourier transforms with the same bits on every processor."""

from functools import lru_cache
from math import sqrt

import torch
from torch import Tensor

_ONE = 1 << 128
_PI = 31415926535897932384626433832795028841971693993751  # times 10⁻⁴⁹


def inverse_fourier(pairs: Tensor, numel: int, width: int) -> Tensor:
    """Return `numel` elements, in blocks of `width`, each from its ⌊width/2⌋ + 1 coefficients (real, imaginary).

    This inverts the orthonormal real transform, in float32 or float64. A library chooses its algorithm by processor.
    Here every product and sum is rounded on its own, in the order of Stockham's algorithm with factors 4, 2 and odd
    primes. Two real blocks are transformed as one complex block. A large prime factor p costs p operations per element.
    """
    blocks = pairs.view(-1, width // 2 + 1, 2)
    x = _joined(torch.nn.functional.pad(blocks, (0, 0, 0, 0, 0, blocks.shape[0] % 2)), width)
    cos, sin = turns(width, pairs.dtype)
    w = cos.to(pairs.device), sin.to(pairs.device)
    rest, span = width, 1
    for radix in radices(width):
        rest //= radix
        x = _stage(x, radix, rest, span, w)
        span *= radix
    # (complex part, element, pair of blocks) → (pair of blocks, complex part, element)
    return torch.stack(x).permute(2, 0, 1).mul(1 / sqrt(width)).reshape(-1)[:numel]


def inverse_on_gpu(pairs: Tensor, numel: int, width: int) -> Tensor:
    """Return the elements by a GPU's own library, whose order of additions is the same on all GPUs of one kind.

    It expects 0 where the spectrum of a real vector has no imaginary part. Encoders send 0 there, and the others
    overwrite what is there.
    """
    spectra = torch.view_as_complex(pairs.view(-1, width // 2 + 1, 2))
    return torch.fft.irfft(spectra, n=width, norm="ortho").view(-1)[:numel]


_Complex = tuple[Tensor, Tensor]


def _joined(blocks: Tensor, width: int) -> _Complex:
    """Return A + iB for every two blocks, at all frequencies: (width, pairs of blocks) each part."""
    (ar, br), (ai, bi) = (part.T.unflatten(1, (-1, 2)).unbind(2) for part in blocks.unbind(2))
    ends = [0, width // 2] if width % 2 == 0 else [0]  # which have no imaginary part
    ai, bi = (part.index_fill(0, torch.tensor(ends, device=part.device), 0) for part in (ai, bi))
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
    parts = (torch.tensor(part, dtype=torch.float64) for part in exact)
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
