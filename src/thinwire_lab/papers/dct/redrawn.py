"""DCT's Fig. 8 beside ours."""

from matplotlib.figure import Figure

from thinwire_lab.papers.dct import DCT
from thinwire_lab.papers.dct.learning import DENSITIES, FC, Ways
from thinwire_lab.papers.dct.timing import TIMED
from thinwire_lab.papers.shared.benches import FC_1G, FC_100M, Steps
from thinwire_lab.papers.shared.figures import Lines, Words, beside


@DCT.redraws("figure_8", FC_100M, FC_1G, FC)
def figure_8(slow: Steps, fast: Steps, fc: Ways) -> Figure:
    """Step time and loss over sparsity."""
    sparsity = [100 * (1 - density) for density in TIMED]
    times = {
        link: (sparsity, [steps.seconds(f"dct_dp {density:g}") / steps.seconds("dense") for density in TIMED])
        for link, steps in (("step, 100 Mbit/s", slow), ("step, 1 Gbit/s", fast))
    }
    dense = sum(trial.loss for trial in fc["dense"])
    losses = [sum(trial.loss for trial in fc[f"{density:g}"]) / dense for density in DENSITIES]
    return beside(
        Words(
            title="Fig. 8: production model, 12.5 Gbit/s",
            text="(a) a threshold found anew each step: 11 % slower than dense,\n"
            "kept for 1,000 steps: 23 % faster\n(c) flat above 95 %\n(d) no loss up to 99.5 %",
        ),
        Lines(
            title="Ours: small VGG, 4 workers",
            along="sparsity, %",
            up="over dense",
            lines=times | {"held-out loss": ([100 * (1 - density) for density in DENSITIES], losses)},
        ),
        "DCT-DP: step time and loss over sparsity",
    )
