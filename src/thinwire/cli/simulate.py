"""`thinwire simulate`: predict for more workers than there are."""

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.codes import BAD_INPUT


def simulate(
    workers: Annotated[str, typer.Option(help="How many, such as 8..4096, which doubles, or 4,6,8.")] = "8..4096",
    link: Annotated[
        str | None,
        typer.Option(
            help="Link between any two workers, such as 1gbit or 1gbit/5ms; with regions, each worker's own.",
            show_default="as in the profile; 10gbit/0.1ms with regions",
        ),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(
            help="Tiers from the nearest on, such as 8x100gbit/10us,4x25gbit/50us,10gbit: 8 workers a host, which "
            "share its 25 Gbit/s, 4 hosts a rack, which share its 10 Gbit/s to other racks; or a CSV of regions: "
            "region_a,region_b,delay_ms,bandwidth_gbps."
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Profile of a model and a machine.", show_default="the DRAGONN paper's XML model"),
    ] = None,
    recipes: Annotated[
        str | None,
        typer.Option(help="Candidates, such as dense,fp16,topk:0.01.", show_default="all that the profile has"),
    ] = None,
    paper: Annotated[
        str | None, typer.Option(help="Instead of all this, a paper's predictions beside its own: gtopk or dragonn.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the predictions here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw step times and efficiencies here (.png, .svg, .pdf).")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained report here.")] = None,
) -> None:
    """Predict the step between more workers than there are, on networks of tiers or regions, for each recipe."""
    from thinwire.bench import simulate_command, simulate_options, simulate_outputs, simulate_papers
    from thinwire.bench.problems import BadInput

    try:
        files = simulate_outputs.Files(json=json, plot=plot, html=html)
        if paper is not None:
            outcome = simulate_papers.outcome(paper, beside=(link, topology, profile, recipes))
        else:
            asked = simulate_options.read(
                workers=workers, link=link, topology=topology, profile=profile, recipes=recipes
            )
            outcome = simulate_command.outcome(asked)
        files.show(outcome)
    except BadInput as error:
        typer.echo(f"thinwire simulate: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from error
