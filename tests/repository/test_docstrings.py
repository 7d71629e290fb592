"""Examples in docstrings run, and every verb has one."""

import doctest
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from inspect import isclass, isfunction, ismodule
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
    rooms = [getattr(thinwire, name) for name in thinwire.__all__ if ismodule(getattr(thinwire, name))]
    for room in (thinwire, *rooms):
        for name in room.__all__:
            thing = getattr(room, name)
            if (isclass(thing) or isfunction(thing)) and ">>>" in (thing.__doc__ or ""):
                yield f"{room.__name__}.{name}", thing


EXAMPLES = dict(_public())


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Path]:
    """A group of this process alone, and a folder for what an example saves."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    torch.manual_seed(0)
    yield tmp_path
    dist.destroy_process_group()


@pytest.mark.quick
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_it_stands(name: str, one_rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(one_rank)
    source = import_module(EXAMPLES[name].__module__).__file__
    example = doctest.DocTestParser().get_doctest(EXAMPLES[name].__doc__, dict(GIVEN), name, source, None)
    said: list[str] = []
    failed, ran = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert ran
    assert not failed, "".join(said)


@pytest.mark.parametrize("verb", [*VERBS, "Checkpoint", "pipeline.sparsify"])
def test_every_verb_has_an_example(verb: str) -> None:
    assert f"thinwire.{verb}" in EXAMPLES
