"""Shows a paper's predictions from its own figures."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire_lab.inputs import BadInput
from thinwire_lab.simulate.outputs import Files, Outcome

CIRCLE: dict[str, Any] = {"marker": "o", "markerfacecolor": "none", "markersize": 7, "linestyle": "", "clip_on": False}
"""The marker of a published value."""


def app_of(outcome: Callable[[], Outcome]) -> typer.Typer:
    """Return a command that prints an outcome and writes it to files."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command()
    def simulate(
        json: Annotated[Path | None, typer.Option(help="Write the predictions here.")] = None,
        plot: Annotated[Path | None, typer.Option(help="Draw the paper's figures here (.png, .svg, .pdf).")] = None,
        html: Annotated[Path | None, typer.Option(help="Write a self-contained report here.")] = None,
    ) -> None:
        """Put the paper's predictions and measurements beside ours from its own figures."""
        try:
            Files(json=json, plot=plot, html=html).show(outcome())
        except BadInput as wrong:
            typer.echo(str(wrong), err=True)
            raise typer.Exit(2) from wrong

    return app
