"""What sparsified boundaries between pipeline stages do to training, and what they cost.

    python benchmarks/pipeline.py accuracy --json out.json --page tables.md
    python benchmarks/pipeline.py steps --json steps.json --plot steps.png
    python benchmarks/pipeline.py figures --json figures.json --folder docs/measurements

`accuracy`: losses and accuracies of every method of Gupta et al. 2021, on every seed, as in their Tables 1, 4, 6, 7, 8.
`figures`: thresholds over training, the distribution of activations, and how far a fitted threshold strays.
`steps`: time of a step of two stages x two replicas over slow links, beside the paper's.
"""

import torch
import typer
from pipeline_parts.accuracy import accuracy
from pipeline_parts.figures import figures
from pipeline_parts.steps import steps

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
app.command()(accuracy)
app.command()(figures)
app.command()(steps)


@app.callback()
def threads(count: int = typer.Option(1, "--threads", min=1, help="Threads of torch and of the kernels.")) -> None:
    """Set how many threads compute."""
    torch.set_num_threads(count)


if __name__ == "__main__":
    app()
