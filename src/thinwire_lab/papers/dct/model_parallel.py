"""DCT-MP: what sparsified boundaries between pipeline stages do to training.

    python -m thinwire_lab.papers.dct.model_parallel accuracy --json out.json --page tables.md
    python -m thinwire_lab.papers.dct.model_parallel figures --json figures.json --folder papers/dct

`accuracy`: losses and accuracies of every method of the paper, on every seed, as in its Tables 1, 4, 6, 7, 8.
`figures`: thresholds over training, the distribution of activations, and how far a fitted threshold strays.
Step times are those of `thinwire_lab.studies.pipeline`.
"""

import torch
import typer

from thinwire_lab.papers.dct.accuracy import accuracy
from thinwire_lab.papers.dct.figures import figures

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
app.command()(accuracy)
app.command()(figures)


@app.callback()
def threads(count: int = typer.Option(1, "--threads", min=1, help="Threads of torch and of the kernels.")) -> None:
    """Set how many threads compute."""
    torch.set_num_threads(count)


if __name__ == "__main__":
    app()
