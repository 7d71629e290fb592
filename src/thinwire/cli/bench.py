"""`thinwire bench`: train with each recipe, and compare."""

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.codes import BAD_INPUT


def bench(
    workers: Annotated[int | None, typer.Option(help="Worker processes on this machine.", show_default="2")] = None,
    link: Annotated[
        str | None, typer.Option(help="Rate of each worker's link, such as 1gbit, or none.", show_default="100mbit")
    ] = None,
    recipes: Annotated[
        str,
        typer.Option(
            help="Rows, separated by commas, each with a density of its own if wanted, as topk:0.02; see --list."
        ),
    ] = ("dense,torch_fp16,torch_powersgd,topk,dgc,dragonn"),
    density: Annotated[str, typer.Option(help="Share of elements to send; each of several is a row.")] = "0.01",
    pipeline: Annotated[int, typer.Option(help="Split the model into so many stages, each on a worker.")] = 1,
    boundary: Annotated[
        str | None,
        typer.Option(
            help="Share of activations, and of their gradients, to send between stages; each of several is a row.",
            show_default="1,0.05",
        ),
    ] = None,
    micro_batches: Annotated[int, typer.Option(help="Parts in which a batch goes through a pipeline.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps of each row; losses are compared after so many.")] = 300,
    model: Annotated[str, typer.Option(help="What to train; see --list.")] = "transformer",
    data: Annotated[Path | None, typer.Option(help="Data of the model; see --list.")] = None,
    scale: Annotated[float, typer.Option(help="Size of the xml model; 1 is 126.7 M parameters.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    target: Annotated[float | None, typer.Option(help="Loss to time; by default what dense reaches.")] = None,
    extend: Annotated[float, typer.Option(help="Train up to so many times --steps to reach the target.")] = 1.5,
    json: Annotated[Path | None, typer.Option(help="Write the results here, after every row.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained report here.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="Name recipes and models, and exit.")] = False,
) -> None:
    """Train a real model over a slow link with each recipe in turn, and say what each saves and what it costs."""
    from thinwire.bench import command, options
    from thinwire.bench.problems import BadInput

    if listing:
        command.print_listing()
        return
    try:
        asked = options.read(
            workers=workers,
            link=link,
            recipes=recipes,
            densities=density,
            pipeline=pipeline,
            boundaries=boundary,
            micro_batches=micro_batches,
            steps=steps,
            model=model,
            data=data,
            scale=scale,
            seed=seed,
            target=target,
            extend=extend,
        )
        code = command.run(asked, json=json, html=html)
    except BadInput as error:
        typer.echo(f"thinwire bench: {error}", err=True)
        code = BAD_INPUT
    raise typer.Exit(code)
