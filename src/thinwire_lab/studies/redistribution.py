"""Does what waits stay the same when it is dealt out to another number of workers?

    python -m thinwire_lab.studies.redistribution --recipe "topk(density=0.05)" --recipe "dgc(density=0.05)"

Virtual workers, as in the study of convergence, train a small model in float64. What waits is then dealt out to every
number of workers from 1 to 5. The pending mean is the sum over workers of what waits. A cell has its length before,
after, and the largest difference of an element, relative to the largest element of its tensor.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn

from thinwire import redistribute, replicate
from thinwire_lab.show.terminal import print_raw
from thinwire_lab.studies.convergence.group import VirtualGroup, on_ranks
from thinwire_lab.studies.convergence.training import Settings
from thinwire_lab.studies.elastic import distance, pending

COUNTS, STEPS = range(1, 6), 4


def states(recipe: str, count: int) -> list[dict[str, Any]]:
    """Train so many workers, and return what each saves."""
    optimizer = "adamw()" if "fading" in recipe else "sgd(momentum=0.9)"
    settings = Settings(
        model="", recipe=recipe, optimizer=optimizer, rate=0.1, schedule="constant", steps=STEPS, workers=count, seed=0
    )

    def work(group: VirtualGroup) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(group.rank())
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 70), nn.Tanh(), nn.Linear(70, 20)).double()
        replicas = replicate(model, settings.make_recipe(), group=group, optimizer=settings.make_optimizers(model))
        for _ in range(STEPS):
            x = torch.randn(8, 40, generator=generator, dtype=torch.float64)
            model.zero_grad()
            model(x).square().mean().backward()
            replicas.reduce()
            replicas.keep_step()
        return replicas.state_dict()

    return on_ranks(count, work)


def cell(saved: Sequence[dict[str, Any]], count: int) -> tuple[float, float, float]:
    """Return the length of the pending mean before and after it is dealt out, and the largest relative difference."""
    before = pending(saved)
    after = pending([redistribute(saved, rank=rank, world_size=count) for rank in range(count)])
    lengths = [float(torch.cat([x.flatten() for x in each.values()]).norm()) for each in (before, after)]
    return lengths[0], lengths[1], distance(before, after)


def main(recipe: Annotated[list[str], typer.Option(help="A recipe; each of several is a table.")]) -> None:
    """Print the tables."""
    for each in recipe:
        lines = [f"`{each}`", "", "| workers | before | after | largest difference |", "| --- | ---: | ---: | ---: |"]
        for count in COUNTS:
            saved = states(each, count)
            for other in COUNTS:
                before, after, apart = cell(saved, other)
                lines.append(f"| {count} → {other} | {before:.16g} | {after:.16g} | {apart:.1e} |")
        print_raw(Console(width=200), "\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
