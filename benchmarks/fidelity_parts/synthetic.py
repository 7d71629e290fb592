"""Gradients drawn from a heavy-tailed law, for a machine without data."""

import torch

from fidelity_parts.material import Gradients, Run, Snapshot
from fidelity_parts.recording import alphas


def synthetic(seed: int = 0, workers: int = 4) -> Run:
    """Return a run of two snapshots; neighbouring elements of a row are alike, as in real layers."""
    generator = torch.Generator().manual_seed(seed)
    shots = [Snapshot(step=step, workers=[_draw(generator) for _ in range(workers)]) for step in (2, 9)]
    run = Run(model="synthetic", snapshots=shots)
    run.alphas = [alpha for shot in shots for alpha in alphas(shot.step, shot.workers)]
    run.thresholds = {"weight": [1.0 + 0.01 * (step % 3) for step in range(40)]}
    return run


def _draw(generator: torch.Generator) -> Gradients:
    rows = torch.randn(48, 1, generator=generator) * torch.randn(48, 64, generator=generator) * 0.01
    return {"weight": rows, "bias": torch.randn(48, generator=generator) * 0.01}
