"""Ours of DCT's Fig. 8."""

from thinwire_lab.papers.dct import DCT
from thinwire_lab.papers.dct.learning import DENSITIES, FC, Ways
from thinwire_lab.papers.dct.timing import TIMED
from thinwire_lab.papers.shared.benches import FC_1G, FC_100M, Steps
from thinwire_lab.papers.shared.figures import Lines


@DCT.redraws("figure_8", FC_100M, FC_1G, FC)
def figure_8(slow: Steps, fast: Steps, fc: Ways) -> Lines:
    """Step time and loss over sparsity."""
    sparsity = [100 * (1 - density) for density in TIMED]
    lines = {
        link: (sparsity, [steps.seconds(f"dct_dp {density:g}") / steps.seconds("dense") for density in TIMED])
        for link, steps in (("step, 100 Mbit/s", slow), ("step, 1 Gbit/s", fast))
    }
    dense = sum(trial.loss for trial in fc["dense"])
    losses = [sum(trial.loss for trial in fc[f"{density:g}"]) / dense for density in DENSITIES]
    lines["held-out loss"] = ([100 * (1 - density) for density in DENSITIES], losses)
    return Lines(title="Ours: small VGG, 4 workers", along="sparsity, %", up="over dense", lines=lines)
