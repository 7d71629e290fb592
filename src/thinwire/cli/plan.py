"""`thinwire plan`: does it pay?"""

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.codes import BAD_INPUT


def plan(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE.py:BUILD",
            help="A model of your own: a function, in a file or as package.module:build, that returns "
            "(module, step) or (module, step, optimizer), with step(model) -> loss.",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Worker processes on this machine; with --profile, as if.", show_default="2")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="Rate of each worker's link, such as 1gbit, or none; with --profile, as if.", show_default="100mbit"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model of the bench; see thinwire bench --list.", show_default="transformer")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Data of the model; see thinwire bench --list.")] = None,
    scale: Annotated[float | None, typer.Option(help="Size of the xml model.", show_default="1")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and batches.", show_default="0")] = None,
    profile: Annotated[Path | None, typer.Option(help="Plan from this profile; nothing is measured.")] = None,
    save_profile: Annotated[Path | None, typer.Option(help="Write what was measured here.")] = None,
    pipeline: Annotated[int, typer.Option(help="Split the model into so many stages, each on a worker.")] = 1,
    micro_batches: Annotated[
        int | None, typer.Option(help="Parts in which a batch goes through a pipeline.", show_default="4")
    ] = None,
    boundary: Annotated[
        float | None,
        typer.Option(help="Share of activations that may be chosen to cross between stages.", show_default="0.05"),
    ] = None,
    density: Annotated[str | None, typer.Option(help="Densities that may be chosen.", show_default="0.01")] = None,
    candidates: Annotated[
        str | None,
        typer.Option(
            help="What may be chosen, dearest to the loss first.", show_default="bf16,qsgd,topk,doubling,gtopk"
        ),
    ] = None,
    error_feedback: Annotated[
        bool, typer.Option("--error-feedback/--no-error-feedback", help="Whether gradients may wait for later steps.")
    ] = True,
    unfolded: Annotated[bool, typer.Option("--all", help="Show every tensor on a line of its own.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the plan here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained report here.")] = None,
) -> None:
    """Say whether compression pays on this network, for which tensors and by what, and why; measures for seconds."""
    from thinwire.bench import plan_command, plan_options, plan_pipeline
    from thinwire.bench.problems import BadInput

    try:
        request = plan_options.Request(
            target=target,
            model=model,
            data=data,
            scale=scale,
            seed=seed,
            workers=workers,
            link=link,
            profile=profile,
            save_profile=save_profile,
            micro_batches=micro_batches,
            boundary=boundary,
        )
        wishes = plan_options.wishes(densities=density, candidates=candidates, error_feedback=error_feedback)
        if pipeline == 1:
            source = request.source()
            code = plan_command.run(source, wishes, json=json, html=html, profile=save_profile, unfolded=unfolded)
        else:
            code = plan_pipeline.run(request.pipelined(pipeline), wishes, json=json, html=html, unfolded=unfolded)
    except BadInput as error:
        typer.echo(f"thinwire plan: {error}", err=True)
        code = BAD_INPUT
    raise typer.Exit(code)
