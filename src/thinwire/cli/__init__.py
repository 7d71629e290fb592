"""The command line. What a command needs is imported only when it runs."""

import sys

try:
    import typer
except ImportError:
    sys.exit("thinwire's command line needs its extra packages: pip install 'thinwire[bench]'")

from thinwire.cli import bench, plan, simulate

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def thinwire() -> None:
    """Compressed gradients for distributed PyTorch training over slow links."""


for command in (bench.bench, plan.plan, simulate.simulate):
    app.command()(command)


def main() -> None:
    """Run the command line."""
    app()
