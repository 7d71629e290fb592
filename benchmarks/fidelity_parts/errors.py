"""Relative error, cosine and real bytes of every method on every snapshot."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fidelity_parts.material import Gradients, Run
from fidelity_parts.methods import Method

AT_BITS = (0.05, 0.1, 0.3, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One method on one model at one step, tensor by tensor. `bytes` are one worker's payloads, headers included."""

    model: str
    step: int
    method: str
    family: str
    group: str
    density: float
    bytes: float
    bits_per_element: float
    error: float
    cosine: float


def measure(
    run: Run, methods: Sequence[Method], tick: Callable[[], None], seed: int = 0, quick: bool = False
) -> Iterator[Measured]:
    """Yield a row for each snapshot, or for the last if `quick`, and each method."""
    for shot in run.snapshots[-1:] if quick else run.snapshots:
        for method in methods:
            yield _one(run.model, shot.step, shot.mean, method, seed)
            tick()


def _one(model: str, step: int, gradients: Gradients, method: Method, seed: int) -> Measured:
    sums, nbytes, numel = np.zeros(4), 0.0, 0
    for place, x in enumerate(gradients.values()):
        restored, sent = method.restore(x, seed + place)
        g, r = x.reshape(-1).double(), restored.double()
        sums += [float(v) for v in ((g - r).square().sum(), g.square().sum(), r.square().sum(), torch.dot(g, r))]
        nbytes, numel = nbytes + sent, numel + x.numel()
    return Measured(
        model=model,
        step=step,
        method=method.name,
        family=method.family,
        group=method.group,
        density=method.density,
        bytes=nbytes,
        bits_per_element=8 * nbytes / numel,
        error=sums[0] / sums[1],
        cosine=sums[3] / math.sqrt(sums[1] * sums[2]) if sums[2] else 0.0,
    )


def at_equal_bytes(rows: Sequence[Measured]) -> dict[str, list[float | None]]:
    """Return each family's error at AT_BITS bits per element, interpolated on logarithms; None outside its curve."""
    found = {}
    for family in dict.fromkeys(row.family for row in rows):
        curve = sorted((row.bits_per_element, max(row.error, 1e-12)) for row in rows if row.family == family)
        bits, errors = (np.log([point[place] for point in curve]) for place in (0, 1))
        found[family] = [_at(math.log(at), bits, errors) for at in AT_BITS]
    return found


def _at(x: float, bits: "np.ndarray[tuple[int], np.dtype[np.float64]]", errors: object) -> float | None:
    if not bits[0] <= x <= bits[-1]:
        return None
    return float(np.exp(np.interp(x, bits, np.asarray(errors))))
