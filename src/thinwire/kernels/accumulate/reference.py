"""Adding gradients to residuals: plainly, with decay, with momentum, or rounded to 16 bits. Joining small ones."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.hashing.reference import mix
from thinwire.kernels.parts import Vectors, whole
from thinwire.kernels.sums import Sum


def accumulate(sums: Sum) -> None:
    """Compute the sums."""
    for i, (out, residual, gradient, scale) in enumerate(
        zip(sums.outs, sums.residuals, sums.gradients, sums.scales, strict=True)
    ):
        decay = None if sums.decays is None else sums.decays[i]
        if sums.seeds is not None:
            # Not alpha=, with which torch may round the product and the sum as one.
            total = residual.float().mul_(1.0 if decay is None else decay).add_(gradient.float() * scale)
            places = torch.arange(total.numel(), dtype=torch.int32, device=total.device)
            out.copy_(_rounded(total, places, sums.seeds[i]))
            continue
        new = gradient.to(residual.dtype)
        if sums.moving is not None and sums.velocities is not None:
            moving = torch.mul(sums.velocities[i], sums.momentum, out=sums.moving[i]).add_(new, alpha=scale)
            if sums.nesterov:
                torch.add(residual, new, alpha=scale, out=out).add_(moving, alpha=sums.momentum)
            else:
                torch.add(residual, moving, out=out)
        elif decay is None:
            torch.add(residual, new, alpha=scale, out=out)
        else:
            torch.mul(residual, decay, out=out).add_(new, alpha=scale)


def joined(xs: Sequence[Tensor], dtype: torch.dtype, factor: float = 1.0, bound: float | None = None) -> Tensor:
    """Return n ≥ 1 vectors times a factor as one vector of a dtype; in a range of ±`bound`, if it is given.

    NaN and infinities stay. A single vector may be multiplied in place, and be what is returned.
    """
    parts = whole(xs)
    if len(parts) > 1:  # one by one, so that what is wide is one vector's
        return torch.cat([_narrowed(x if factor == 1 else x * factor, dtype, bound) for x in parts])
    return _narrowed(parts[0] if factor == 1 else parts[0].mul_(factor), dtype, bound)


def _narrowed(x: Tensor, dtype: torch.dtype, bound: float | None) -> Tensor:
    return (x if bound is None else torch.where(x.isinf(), x, x.clamp(-bound, bound))).to(dtype)


def clamped(means: Vectors, wide: Vectors, scale: float, bound: float) -> tuple[Tensor, Tensor]:
    """Where all of `wide` is finite, and a mean that was made of it is not, overwrite the means: clamped to ±`bound`.

    Return whether all of `wide` is finite, 0-dim; and what was added to it, times `scale`, one vector after another's.
    """
    narrow, x = (joined(each, each[0].dtype) for each in (means, wide))
    finite, fits = x.isfinite().all(), narrow.isfinite().all()
    needed = finite & ~fits  # also where a sum left the range on its way
    mean = torch.where(needed, _narrowed(x, narrow.dtype, bound), narrow)
    added = torch.where(needed, (mean - x).mul_(scale), 0)
    torch._foreach_copy_(list(means), list(mean.split([each.numel() for each in means])))
    return finite, added


def subtract_rounded(x: Tensor, indices: Tensor, values: Tensor, seed: int) -> None:
    """Subtract values from bfloat16 `x` at indices (int32), and round there as `accumulate` does with seeds.

    Elements with value 0 change nothing. Of the others, none may share an index.
    """
    there = values != 0
    at = indices[there]
    x[at] = _rounded(x[at].float() - values[there].float(), at, seed).to(x.dtype)


def _rounded(x: Tensor, indices: Tensor, seed: int) -> Tensor:
    """Return float32 numbers that bfloat16 holds: above or below x at random, by its index."""
    draws = (mix(indices, seed) & 0xFFFF).to(torch.int32)
    rounded = ((x.view(torch.int32) + draws) & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)
