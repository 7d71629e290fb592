"""The offset float on spectra: its range fixed early as in the paper, or scaled per tensor and step; and rounding."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from thinwire.formats import Coded, OffsetFloat
from thinwire.payloads.spectral import forward
from thinwire_lab.papers.fft import FFT_PAPER
from thinwire_lab.papers.shared.claims import Sheet
from thinwire_lab.papers.shared.material import Gradients, Run

BITS, MANTISSA = 10, 5


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """Error of the values kept at θ = 0.85 in one snapshot's spectra, and the share of them that became 0."""

    model: str
    step: int
    range: str
    rounding: str
    error: float
    flushed: float


@FFT_PAPER.table
def tuning(runs: Sequence[Run]) -> Sheet:
    """Return the rows of all runs."""
    rows = [row for run in runs for row in tuned(run)]
    return Sheet(
        key="tuning",
        title="Offset float of 10 bits on the frequencies kept at θ = 0.85",
        heads=["spectra of", "range", "rounding", "err²", "became 0"],
        cells=[
            [f"{row.model}, step {row.step}", row.range, row.rounding, f"{row.error:.3g}", f"{row.flushed:.1%}"]
            for row in rows
        ],
        rows=[asdict(row) for row in rows],
    )


def tuned(run: Run) -> Iterator[Tuned]:
    """Yield rows for every snapshot: one range from the first snapshot, against one range per tensor."""
    first = max(float(x.abs().max()) for x in _kept(run.snapshots[0].mean))
    for shot in run.snapshots:
        spectra = list(_kept(shot.mean))
        for rounding in ("truncate", "nearest", "stochastic"):
            formats = {
                "of the first gradients": OffsetFloat.balanced(
                    bits=BITS, mantissa=MANTISSA, max=first, rounding=rounding, scaled=False
                ),
                "per tensor and step": OffsetFloat.balanced(bits=BITS, mantissa=MANTISSA, rounding=rounding),
            }
            for name, form in formats.items():
                error, flushed = _measure(spectra, form)
                yield Tuned(
                    model=run.model, step=shot.step, range=name, rounding=rounding, error=error, flushed=flushed
                )


def _kept(gradients: Gradients, density: float = 0.15) -> Iterator[Tensor]:
    for gradient in gradients.values():
        pairs = forward(gradient.reshape(-1).float(), min(4096, gradient.numel()))
        count = max(1, round(density * len(pairs)))
        yield pairs[pairs.norm(dim=1).topk(count).indices].reshape(-1)


def _measure(spectra: Sequence[Tensor], form: OffsetFloat) -> tuple[float, float]:
    restored = torch.cat([Coded.of(x, form, seed=place).values(torch.float32) for place, x in enumerate(spectra)])
    whole = torch.cat(list(spectra))
    live = whole != 0
    error = (whole - restored).double().square().sum() / whole.double().square().sum()
    return float(error), float((restored[live] == 0).double().mean())
