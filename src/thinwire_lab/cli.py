"""The command line. A command imports its tool only when it runs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

try:
    import typer
    from typer import Argument, Option
except ImportError:
    sys.exit("thinwire's command line needs its extra packages: pip install 'thinwire[bench]'")

from thinwire.planner import Budget
from thinwire.version import __version__

BAD_INPUT = 2
"""The exit code when the user's input cannot be used."""
_LONGEST = 1e9  # seconds

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@contextmanager
def refusing(command: str, *files: Path | None) -> Iterator[None]:
    """Say what of the user's input cannot be used, and end. `files`: what is written, though nobody reads the rest."""
    from thinwire_lab.inputs import BadInput
    from thinwire_lab.show.printed import expect_files

    expect_files(files)
    try:
        yield
    except BadInput as error:
        typer.echo(f"thinwire {command}: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from error


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def thinwire(
    _: bool = Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version, and exit."),
) -> None:
    """Compressed gradients for distributed PyTorch training over slow links."""


@app.command()
def bench(
    workers: int | None = Option(
        None, help="Worker processes on this machine; 1 only with --servers.", show_default="2"
    ),
    link: str | None = Option(
        None,
        help="Rate of each worker's link, such as 1gbit, or none; 10mbit/50ms adds a latency.",
        show_default="100mbit",
    ),
    recipes: str | None = Option(
        None,
        help="Rows, separated by commas; a row may name its density, as topk:0.02. See --list.",
        show_default="dense,torch_bf16,bf16,torch_powersgd,topk,dgc,dragonn",
    ),
    density: str = Option("0.01", help="Share of elements to send; each of several is a row."),
    shard: int | None = Option(
        None,
        help="Workers per island, over which FSDP2 shards the model. --link is then between islands, whose "
        "workers share it, and dense is FSDP2's own HSDP. If it equals --workers, each worker has a link, and "
        "dense is FSDP2.",
    ),
    gathers: str | None = Option(
        None,
        help="With --shard equal to --workers: how parameters are gathered, in bfloat16: none (by FSDP2), "
        "lossless, differences (of 4 bits), differences2. Each is a row of every recipe, beside FSDP2 in float32 "
        "and in bfloat16.",
    ),
    outer: str | None = Option(
        None,
        help="Numbers of steps, such as 10,30, that workers train on their own before they exchange how far they "
        "moved. Each number is a row for diloco, streaming_diloco, muloco and sparseloco.",
    ),
    servers: int = Option(
        0,
        help="Number of parameter servers, besides the workers: every recipe that can is also trained on them, "
        "asynchronously.",
    ),
    slow: float = Option(1.0, help="With --servers or --outer: how many times as long the last worker computes."),
    kill: bool = Option(False, "--kill", help="With --servers or --outer: have the last worker vanish midway."),
    pipeline: int = Option(1, help="Number of stages to split the model into, each on a worker."),
    boundary: str | None = Option(
        None,
        help="Share of activations, and of their gradients, to send between stages; each of several is a row.",
        show_default="1,0.05",
    ),
    micro_batches: int = Option(4, help="Micro-batches that a pipeline splits each batch into."),
    steps: int = Option(300, help="Steps to train each row; losses are compared after them."),
    model: str = Option("transformer", help="What to train; see --list."),
    data: Path | None = Option(None, help="Data of the model; see --list."),
    scale: float = Option(1.0, help="Size of the model transformer or xml; 1 is 0.83 M or 126.7 M parameters."),
    optimizer: str = Option(
        "sgd", help="What updates the weights: sgd, adamw, or muon for matrices and adamw for the rest."
    ),
    seed: int = Option(0, help="Seed of weights and batches."),
    seeds: int = Option(1, help="Seeds to train each row with, from --seed on; the report has means and spreads."),
    target: float | None = Option(None, help="Loss to measure the time to; by default the one that dense ends at."),
    extend: float = Option(1.5, help="To reach the target, train for up to this many times --steps."),
    json: Path | None = Option(None, help="Write the results here, after every row."),
    html: Path | None = Option(None, help="Write a self-contained report here."),
    plot: Path | None = Option(None, help="Draw loss over time here (.png, .svg, .pdf)."),
    listing: bool = Option(False, "--list", help="Print recipes and models, and exit."),
) -> None:
    """Train a real model over a slow link with each recipe in turn, and say what each saves and what it costs."""
    asked = dict(locals())
    from thinwire_lab.bench import command, options
    from thinwire_lab.inputs import check_apart

    files = {name: asked.pop(name) for name in ("json", "html", "plot")}
    if asked.pop("listing"):
        command.print_listing()
        return
    with refusing("bench", *files.values()):
        check_apart([data], files.values())
        lists = {"densities": asked.pop("density"), "boundaries": asked.pop("boundary")}
        raise typer.Exit(command.run(options.read(**lists, **asked), **files))


@app.command()
def plan(
    target: str | None = Argument(
        None,
        metavar="FILE.py:BUILD",
        help="A model of your own: a function, in a file or as package.module:build, that returns "
        "(module, step) or (module, step, optimizer), with step(model) -> loss.",
    ),
    workers: int | None = Option(
        None, help="Worker processes on this machine; with --profile, hypothetical.", show_default="2"
    ),
    link: str | None = Option(
        None,
        help="Rate of each worker's link, such as 1gbit, or none; with --profile, hypothetical.",
        show_default="100mbit",
    ),
    model: str | None = Option(
        None, help="A model of the bench; see thinwire bench --list.", show_default="transformer"
    ),
    data: Path | None = Option(None, help="Data of the model; see thinwire bench --list."),
    scale: float | None = Option(None, help="Size of the model transformer or xml.", show_default="1"),
    seed: int | None = Option(None, help="Seed of weights and batches.", show_default="0"),
    profile: Path | None = Option(None, help="Plan from this profile; nothing is measured."),
    save_profile: Path | None = Option(None, help="Write what was measured here."),
    density: str | None = Option(None, help="Densities that may be chosen.", show_default="0.01"),
    candidates: str | None = Option(
        None, help="What may be chosen, least harm to the loss first.", show_default=",".join(Budget().names)
    ),
    optimizer: str | None = Option(
        None,
        help="The optimizer: sgd, adamw or muon. Then only methods measured close to uncompressed training's loss "
        "are chosen.",
    ),
    loss: float | None = Option(
        None,
        help="How close: the highest measured loss to accept, as a multiple of uncompressed training's.",
        show_default="1.01",
    ),
    error_feedback: bool = Option(
        True, "--error-feedback/--no-error-feedback", help="Whether methods with a residual may be chosen."
    ),
    outer: str | None = Option(
        None, help="Also consider outer steps: numbers of steps, such as 10,30,100, that workers train on their own."
    ),
    more_steps: str | None = Option(
        None,
        help="How many times as many steps a method needs for the same loss, such as diloco:30=1.1,"
        "sparseloco:30=1.2; replaces the measured figures.",
    ),
    explain: bool = Option(
        False, "--explain", help="Instead say what share of a step the network is, and which one change helps most."
    ),
    unfolded: bool = Option(False, "--all", help="Show every tensor on a line of its own."),
    json: Path | None = Option(None, help="Write the plan here."),
    html: Path | None = Option(None, help="Write a self-contained report here."),
) -> None:
    """Say whether compression pays on this network, for which tensors and by what, and why; measures for seconds."""
    asked = dict(locals())
    from thinwire_lab.inputs import check_apart
    from thinwire_lab.plan import apart, command, sources
    from thinwire_lab.plan.explain import explained

    with refusing("plan", json, html, save_profile):
        check_apart([data, profile, target and target.rpartition(":")[0]], [json, html, save_profile])
        wishes = sources.wishes(
            densities=density, candidates=candidates, error_feedback=error_feedback, optimizer=optimizer, loss=loss
        )
        request = sources.Request(**{each.name: asked[each.name] for each in fields(sources.Request)})
        questions = [each for each in (apart.read(outer, more_steps), explained if explain else None) if each]
        shown, files = unfolded or not explain, {"json": json, "html": html, "profile": save_profile}
        code = command.run(request.source(), wishes, unfolded=unfolded, tensors=shown, questions=questions, **files)
        raise typer.Exit(code)


@app.command()
def simulate(
    workers: str = Option("8..4096", help="Numbers of workers: 8..4096 doubles from 8 on; or a list, such as 4,6,8."),
    link: str | None = Option(
        None,
        help="Link between any two workers, such as 1gbit or 1gbit/5ms; with regions, each worker's own.",
        show_default="as in the profile; 10gbit/0.1ms with regions",
    ),
    topology: str | None = Option(
        None,
        help="Tiers, nearest first, such as 8x100gbit/10us,4x25gbit/50us,10gbit: 8 workers a host, which "
        "share its 25 Gbit/s, 4 hosts a rack, which share its 10 Gbit/s to other racks; or a CSV of regions: "
        "region_a,region_b,delay_ms,bandwidth_gbps.",
    ),
    profile: Path | None = Option(
        None, help="Profile of a model and a machine.", show_default="the DRAGONN paper's XML model"
    ),
    recipes: str | None = Option(
        None, help="Candidates, such as dense,fp16,topk:0.01.", show_default="all that the profile has"
    ),
    outer: str | None = Option(
        None, help="Also predict outer steps: numbers of steps, such as 30,100, that workers train on their own."
    ),
    tokens: float | None = Option(None, help="Predict the days it takes to train on this many tokens."),
    batch: int | None = Option(None, help="Tokens that a worker takes in a step, for --tokens.", show_default="1"),
    faults: str | None = Option(
        None,
        help="Also predict goodput: how long each worker runs until it fails, and until it is back, as in 24h/5min.",
    ),
    json: Path | None = Option(None, help="Write the predictions here."),
    plot: Path | None = Option(None, help="Draw step times and efficiencies here (.png, .svg, .pdf)."),
    html: Path | None = Option(None, help="Write a self-contained report here."),
) -> None:
    """Predict the step between more workers than there are, on networks of tiers or regions, for each recipe."""
    asked = dict(locals())
    from thinwire_lab.inputs import check_apart
    from thinwire_lab.show.page import Files
    from thinwire_lab.simulate import command, options

    with refusing("simulate", json, plot, html):
        check_apart([profile, topology], [json, plot, html])
        files = Files(**{name: asked.pop(name) for name in ("json", "plot", "html")})
        command.run(options.read(**asked), files)


@app.command()
def check(
    quick: bool = Option(False, "--quick", help="Small sizes and few steps: under a minute on 2 cores."),
    device: str | None = Option(None, help="cpu or cuda.", show_default="cuda where there is one"),
    only: str | None = Option(None, help="Run only rows whose names contain one of these, separated by commas."),
    json: Path | None = Option(None, help="Write the findings here."),
    html: Path | None = Option(None, "--html", "--output", help="Write a self-contained page here."),
    gpu: bool = Option(False, "--gpu", help="On a GPU, count each recipe's kernel launches, and time them."),
    interpreted: bool = Option(
        False, "--interpreted", help="With --gpu, on a machine without one: use Triton's interpreter."
    ),
    page: Path | None = Option(None, help="With --gpu, write a page of Markdown here."),
) -> None:
    """Prove this machine: every kernel against its reference, every recipe on this group; exits with 1 if any fails."""
    from thinwire_lab.check import command
    from thinwire_lab.inputs import BadInput

    with refusing("check", json, html, page):
        if (interpreted or page) and not gpu:
            raise BadInput(f"{'--interpreted' if interpreted else '--page'} goes with --gpu")
        if gpu:
            from thinwire_lab.check.gpu import proof

            if device or only or html:
                raise BadInput("--gpu takes --quick, --interpreted, --json and --page alone")
            raise typer.Exit(proof.run(interpreted=interpreted, quick=quick, path=json, page=page))
        raise typer.Exit(command.run(command.asked(quick=quick, device=device, only=only), json=json, html=html))


@app.command()
def watch(
    addresses: list[str] = Argument(
        ..., metavar="HOST:PORT...", help="Parameter servers. THINWIRE_TICKET must be theirs."
    ),
    every: float | None = Option(None, "--watch", help="Repeat every this many seconds; by default once."),
) -> None:
    """Print server.status() of parameter servers, a line of JSON each."""
    from thinwire_lab.inputs import BadInput
    from thinwire_lab.watch import run

    with refusing("watch"):
        if every is not None and not 0 < every < _LONGEST:
            raise BadInput(f"--watch is {every:g}; expected seconds, above 0 and below {_LONGEST:g}")
    try:
        run(addresses, every)
    except (ConnectionError, ImportError, ValueError) as error:
        typer.echo(f"thinwire watch: {error}", err=True)
        raise typer.Exit(1) from error


def main() -> None:
    """Run the command line."""
    from thinwire_lab.show.printed import printing

    sys.exit(printing(app))
