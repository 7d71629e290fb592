"""The model to plan for: one of the bench's, or the user's own."""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from thinwire_lab import problems
from thinwire_lab.inputs import BadInput
from thinwire_lab.problems.optimizers import optimizers, step_all

_EXPECTED = "expected a function that returns (module, step) or (module, step, optimizer), with step(model) -> loss"
_LOADED = "thinwire_plan_model"  # the module name of a user's file: its own name may be taken


class Subject(NamedTuple):
    """A module, a function from the (wrapped) module to its loss, and the optimizer's step, if you want it timed.

    optimizers: those that `build` returned, for what they bear.
    """

    description: str
    module: nn.Module
    loss: Callable[[nn.Module], Tensor]
    update: Callable[[], object] | None
    optimizers: Sequence[torch.optim.Optimizer] = ()


def of_bench(name: str, seed: int, data: str | None, scale: float, optimizer: str) -> Subject:
    """Build one of the bench's models. Raises BadInput as `problems.build` does."""
    problem = problems.build(name, seed=seed, data=data, scale=scale)
    several = optimizers(optimizer, problem.model, problem)

    @functools.cache  # the batch is there before a step begins
    def batch() -> problems.Batch:
        return problem.batch(0, dist.get_rank(), dist.get_world_size())

    return Subject(
        description=problem.description,
        module=problem.model,
        loss=lambda model: problem.loss(model, batch()),
        update=functools.partial(step_all, several),
    )


def of_user(target: str) -> Subject:
    """Call the function that ``path/to/file.py:build`` or ``package.module:build`` names.

    Raises BadInput if there is no such function, or if it returns the wrong thing.
    """
    build = _function(target)
    update, several = None, list[torch.optim.Optimizer]()
    match build():
        case (nn.Module() as module, step):
            pass  # nothing to time
        case (nn.Module() as module, step, optimizer):
            update = getattr(optimizer, "step", None)
            if not callable(update):
                raise BadInput(f"{target} returned {_kind(optimizer)} as the optimizer; expected one with step()")
            several = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else []
        case other:
            raise BadInput(f"{target} returned {_kind(other)}; {_EXPECTED}")
    if not callable(step):
        raise BadInput(f"{target} returned {_kind(step)} as the step; {_EXPECTED}")
    for name, p in module.named_parameters():
        if is_lazy(p) or p.is_meta or p.is_complex():
            what = "waits for a first batch" if is_lazy(p) else "is on meta" if p.is_meta else "is complex"
            raise BadInput(f"{target} returned a model whose {name} {what}; expected real numbers in memory")
    return Subject(
        description=f"{target}, {sum(p.numel() for p in module.parameters()):,} parameters",
        module=module,
        loss=functools.partial(_loss, target, step),
        update=update,
        optimizers=several,
    )


def _loss(target: str, step: Callable[[nn.Module], Any], model: nn.Module) -> Tensor:
    loss = step(model)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise BadInput(f"the step of {target} returned {_kind(loss)}; expected the loss: a tensor of one element")
    return loss


def _function(target: str) -> Callable[[], object]:
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise BadInput(f"{target!r} names no function; expected path/to/file.py:build or package.module:build")
    module = _from_file(Path(where)) if where.endswith(".py") else _by_name(where)
    function: Callable[[], object] | None = getattr(module, name, None)
    if not callable(function):
        raise BadInput(f"{where} has no function {name!r}; {_EXPECTED}")
    return function


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise BadInput(f"there is no file {path}; expected path/to/file.py:build")
    spec = importlib.util.spec_from_file_location(_LOADED, path)
    assert spec is not None  # its name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_LOADED] = module
    sys.path.insert(0, str(path.absolute().parent))  # as if the file were run
    spec.loader.exec_module(module)
    return module


def _by_name(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # another module that it imports
        raise BadInput(
            f"there is no module {name!r}; expected path/to/file.py:build or package.module:build"
        ) from error


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(entry).__name__ for entry in value)})"
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"{type(value).__name__}{shape}"
