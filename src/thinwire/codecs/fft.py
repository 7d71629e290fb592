"""Send the largest frequencies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Annotated, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.checked import Range, checked
from thinwire.codecs.base import BucketCodec, kept
from thinwire.kernels.parts import Cut
from thinwire.payloads import Blocks, Narrow, Scratch, Spectral
from thinwire.payloads.numbers import narrowed_each
from thinwire.payloads.spectral import forward, spectrum_size
from thinwire.schedules import Density
from thinwire.signals import Signals, joined, largest
from thinwire.waits import on_host

Block = Annotated[int, Range("2 elements or more, and fewer than 2^31", least=2, most=2**31 - 1)]
# Elements transformed at a time. Writing a whole spectrum to memory would take as long as computing it.
_PART = 1 << 22
_SAMPLES = 64
# A CPU takes longer vectors one by one, as their energies are then never written.
_SEVERAL = 1 << 19
# Blocks differ, so the sample's threshold aims at this many times k coefficients.
_SURPLUS = 1.1


@final
@checked
@dataclass(frozen=True, kw_only=True)
class FFT(BucketCodec):
    """Send the round(density · c) largest of the c coefficients of blocks' Fourier transforms (Wang et al. 2020).

    Ranks' spectra are summed, and the sum is transformed back once.

    Args:
        density: The share of coefficients to send; the paper drops θ = 1 − density.
        block: Elements that are transformed together, by the real transform.
        half: Whether to round to float16 before the transform, as the paper does for speed on a GPU.
        values: How coefficients travel.
    """

    density: Density
    block: Block = 4096
    half: bool = False
    values: Narrow = None

    by_library: ClassVar[bool] = True
    scratch: ClassVar[Scratch] = Scratch(element=8, value=10)  # the spectrum, and the payload

    def encode_signals(self, signals: Signals, *, seeds: Sequence[int], cut: Cut, numel: int) -> Spectral:
        """Return coefficients as pairs (real, imaginary). A block with a NaN or an infinity counts as largest."""
        chosen = self._chosen(signals.tensors())
        counts = [2 * k for k in chosen.held]
        values, coded = narrowed_each(chosen.values, counts, self.values, signals.dtype, seeds, signals.share)
        coefficients = replace(chosen, values=values, coded=coded)
        return Spectral(coefficients=coefficients, block=self.block, numel=numel, regions=cut.regions)

    def _chosen(self, xs: Sequence[Tensor]) -> Blocks:
        """Return the largest coefficients of each, the spectra side by side."""
        counts = [spectrum_size(x.numel(), self.block) for x in xs]
        runs = tuple(kept(self.density, count) for count in counts)
        wide = ((x.half() if self.half else x).to(torch.promote_types(x.dtype, torch.float32)) for x in xs)
        rows = [_Row(x, max(1, min(self.block, x.numel())), k) for x, k in zip(wide, runs, strict=True)]
        keys, pairs = _strongest_of_each(rows)
        *firsts, end = accumulate(counts, initial=0)
        return Blocks(
            keys=kernels.placed(keys, tuple(zip(firsts, counts, strict=True)), runs),
            values=pairs.view(-1),
            numel=2 * end,
            width=2,
            regions=tuple((2 * first, 2 * count) for first, count in zip(firsts, counts, strict=True)),
            held=runs,
        )


class _Row(NamedTuple):
    """A vector, the width of its blocks, and how many of its coefficients are wanted."""

    x: Tensor
    width: int
    k: int


def _strongest_of_each(rows: Iterable[_Row]) -> tuple[Tensor, Tensor]:
    """Return `_strongest` of each, one after the other's. All but large ones of a CPU are searched together."""
    found = []
    for alone, group in groupby(rows, lambda row: on_host(row.x) and row.x.numel() > _SEVERAL):
        some = list(group)
        found += [_strongest(*row) for row in some] if alone else [_together(some)]
    return joined(found)


def _together(rows: Sequence[_Row]) -> tuple[Tensor, Tensor]:
    if len(rows) == 1:
        return _strongest(*rows[0])
    *firsts, end = accumulate((spectrum_size(row.x.numel(), row.width) for row in rows), initial=0)
    pairs = rows[0].x.new_empty(end, 2)
    for first, row in zip(firsts, rows, strict=True):
        spectrum = forward(row.x, row.width)
        pairs[first : first + len(spectrum)] = spectrum
    sizes, runs = [b - a for a, b in pairwise([*firsts, end])], tuple(row.k for row in rows)
    keys, _ = kernels.largest_of_each(kernels.block_energies(pairs.view(-1), 2).split(sizes), runs)
    return keys, pairs.index_select(0, kernels.placed(keys, tuple(zip(firsts, sizes, strict=True)), runs))


def _strongest(x: Tensor, width: int, k: int) -> tuple[Tensor, Tensor]:
    """Return the numbers (int32, ascending) of the k largest coefficients, and the coefficients (k, 2)."""
    if x.numel() > 2 * max(_PART, width) and on_host(x):
        keys, pairs, energies = _reaching(x, width, _threshold(x, width, k / spectrum_size(x.numel(), width)))
        if keys.numel() >= k:
            best = largest(energies, k)
            return keys.index_select(0, best), pairs.index_select(0, best)
    pairs = forward(x, width)
    keys = kernels.largest_blocks(pairs.view(-1), 2, k)
    return keys, pairs.index_select(0, keys)


def _threshold(x: Tensor, width: int, density: float) -> Tensor:
    """Estimate, from evenly spaced blocks, an energy that slightly more coefficients than wanted reach."""
    whole = x[: x.numel() // width * width].view(-1, width)
    sample = forward(whole[:: whole.shape[0] // _SAMPLES + 1].reshape(-1), width).square().sum(dim=1)
    rank = min(sample.numel(), round(_SURPLUS * density * sample.numel()) + 1)
    return sample.topk(rank, sorted=False).values.min()


def _reaching(x: Tensor, width: int, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the coefficients that reach the threshold: their numbers, pairs and energies."""
    found, first = [], 0
    for part in x.split(max(1, _PART // width) * width):
        pairs = forward(part, width)
        keys, energies, _ = kernels.select(kernels.block_energies(pairs.view(-1), 2), threshold, pairs.shape[0])
        found.append((keys + first, pairs.index_select(0, keys), energies))
        first += pairs.shape[0]
    keys, pairs, energies = (torch.cat(parts) for parts in zip(*found, strict=True))
    return keys, pairs, energies
