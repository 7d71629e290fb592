"""Ranks as a launcher starts workers, for frameworks that read the environment."""

import io
import os
import re
import runpy
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from ranks import Ranks

EXAMPLES = Path(__file__).parents[1] / "examples"


def needs(*packages: str) -> None:
    """Skip the module where a package is not installed; importing them takes longer than collecting all tests."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed", allow_module_level=True)


@contextmanager
def launched() -> Iterator[None]:
    """Have this rank find what torchrun would tell it. What frameworks keep for the process is dropped afterwards."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "tests", "OMP_NUM_THREADS": "1"}
    with patch.dict(os.environ, told), warnings.catch_warnings():
        warnings.simplefilter("default")  # theirs are not ours to mend
        yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def imported(module: str) -> None:
    """Import it on this rank, so that no test need wait for that."""
    with launched():
        import_module(module)


def example(name: str, *options: str) -> list[str]:
    """Run one of the examples on this rank, and return the lines it prints."""
    script, printed = str(EXAMPLES / name), io.StringIO()
    with launched(), patch.object(sys, "argv", [script, *options]), redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue().splitlines()


def checked_example(workers: Ranks, name: str, folder: Path) -> None:
    """Have two workers run an example of a GPT-2 whole and from its checkpoint, and compare what they print.

    Skips where there is no data or no transformers.
    """
    pytest.importorskip("transformers", reason="transformers is not installed")
    text = Path(os.environ.get("THINWIRE_DATA", "."), "tinyshakespeare", "input.txt")
    if not text.exists():
        pytest.skip(f"set THINWIRE_DATA to a folder with tinyshakespeare/input.txt; there is no {text}")
    part, options = folder / "text", ("--steps", "20", "--checkpoint", str(folder / "checkpoint"))
    part.write_bytes(text.read_bytes()[:100_000])
    whole, _ = workers.run(2, example, name, str(part), *options)
    rest, _ = workers.run(2, example, name, str(part), *options, "--resume")
    steps, resumed = ([line for line in lines if line.startswith("step ")] for lines in (whole, rest))
    assert resumed == steps[-len(resumed) :] != steps
    ends = [re.fullmatch(r"held-out loss ([\d.]+), replicas identical, .* sent", each[-1]) for each in (whole, rest)]
    first, last, again = (float(found) for found in (steps[0].split()[-1], *(end[1] for end in ends if end)))
    assert last == again < first - 1
