"""Examples in docstrings run, every verb has one, and public functions say what goes in and what comes out."""

import ast
import doctest
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir
from functools import partial
from inspect import isclass, isfunction, ismodule
from pathlib import Path
from textwrap import dedent
from types import ModuleType
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
import thinwire.integrations
import thinwire.server

GIVEN: dict[str, Any] = {"tw": thinwire, "torch": torch, "nn": nn, "partial": partial, "dcp": dcp}
GIVEN |= {thing.__name__: thing for thing in (DistributedDataParallel, fully_shard, init_device_mesh)}
"""What examples need not import."""
VERBS = [name for name in thinwire.__all__ if isfunction(getattr(thinwire, name))]


MODULES = [thinwire, *(getattr(thinwire, name) for name in thinwire.__all__ if ismodule(getattr(thinwire, name)))]


def _public(modules: Sequence[ModuleType]) -> Iterator[tuple[str, Any]]:
    for module in modules:
        for name in module.__all__:
            thing = getattr(module, name)
            if isclass(thing) or isfunction(thing):
                yield f"{module.__name__}.{name}", thing


EXAMPLES = {name: thing for name, thing in _public(MODULES) if ">>>" in (thing.__doc__ or "")}


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


def _functions() -> Iterator[tuple[str, Callable[..., object]]]:
    """Yield public functions, and public methods that do not override: those are described where they come from."""
    for name, thing in _public([*MODULES, thinwire.integrations, thinwire.server]):
        if isfunction(thing):
            yield name, thing
        else:
            for method, defined in vars(thing).items():
                function = getattr(defined, "__func__", defined)  # of a class method
                inherited = any(method in vars(base) for base in thing.__mro__[1:])
                if isfunction(function) and not method.startswith("_") and not inherited:
                    yield f"{name}.{method}", function


FUNCTIONS = dict(_functions())
CLASSES = {
    name: thing
    for name, thing in _public([*MODULES, thinwire.integrations, thinwire.server])
    if isclass(thing) and "\nArgs:" in (inspect.getdoc(thing) or "")
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_that_describes_arguments_describes_all(name: str) -> None:
    section = (inspect.getdoc(CLASSES[name]) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    described = {each for line in re.findall(r"^    (\w[\w, ]*):", section, re.MULTILINE) for each in line.split(", ")}
    assert not inspect.signature(CLASSES[name]).parameters.keys() - described


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_goes_in_and_comes_out_is_described(name: str) -> None:
    """In a section, or in the text: "Return ..." needs no Returns. All recipes return the same, as do outer steps."""
    function = FUNCTIONS[name]
    described, text = inspect.signature(function), inspect.getdoc(function) or ""
    for argument in described.parameters.keys() - {"self", "cls"}:
        words = (word.rstrip("s") for word in argument.split("_"))
        assert all(word in text.lower() for word in words), f"nothing is said of the argument {argument}"
    alike = name.startswith(("thinwire.recipes.", "thinwire.outer_steps."))
    if described.return_annotation not in (None, "None") and not alike:
        assert re.search(r"\A(Return|Yield|Whether)|^(Returns|Yields):", text, re.MULTILINE), "nor of what it returns"
    tree = ast.parse(dedent(inspect.getsource(inspect.unwrap(function))))
    raised = (each.exc for each in ast.walk(tree) if isinstance(each, ast.Raise) and isinstance(each.exc, ast.Call))
    for error in map(ast.unparse, (each.func for each in raised)):
        assert f"{error}:" in text or error == "NotImplementedError", f"nor, in its section, that it raises {error}"
