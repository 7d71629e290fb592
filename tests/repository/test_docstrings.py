"""Examples in docstrings run, and every verb has one."""

import doctest
from collections.abc import Iterator
from contextlib import chdir
from functools import partial
from inspect import isclass, isfunction, ismodule
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire

GIVEN: dict[str, Any] = {"tw": thinwire, "torch": torch, "nn": nn, "partial": partial, "dcp": dcp}
GIVEN |= {thing.__name__: thing for thing in (DistributedDataParallel, fully_shard, init_device_mesh)}
"""What examples need not import."""
VERBS = [name for name in thinwire.__all__ if isfunction(getattr(thinwire, name))]


def _public() -> Iterator[tuple[str, Any]]:
    modules = [getattr(thinwire, name) for name in thinwire.__all__ if ismodule(getattr(thinwire, name))]
    for module in (thinwire, *modules):
        for name in module.__all__:
            thing = getattr(module, name)
            if (isclass(thing) or isfunction(thing)) and ">>>" in (thing.__doc__ or ""):
                yield f"{module.__name__}.{name}", thing


EXAMPLES = dict(_public())


@pytest.mark.quick
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_it_stands(ranks: Ranks, name: str, tmp_path: Path) -> None:
    assert ranks.run(1, run, name, tmp_path) == [""]


def run(name: str, folder: Path) -> str:
    """Run an example, whose files are left in the folder, on this rank. Return what it should not have said."""
    example = doctest.DocTestParser().get_doctest(EXAMPLES[name].__doc__, dict(GIVEN), name, None, None)
    said: list[str] = []
    with chdir(folder):
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    return "".join(said)


@pytest.mark.parametrize("verb", [*VERBS, "Checkpoint", "pipeline.sparsify"])
def test_every_verb_has_an_example(verb: str) -> None:
    assert f"thinwire.{verb}" in EXAMPLES
