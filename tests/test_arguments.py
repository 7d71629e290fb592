"""Every argument of every public constructor: a walk along `__all__` that gives each of them what it must refuse.

`python tests/test_arguments.py` prints the table of what was walked.
"""

import ast
import importlib
import inspect
import math
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Self, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from thinwire import (
    codecs,
    exchanges,
    formats,
    memories,
    outer_steps,
    pipeline,
    planner,
    recipes,
    reducer,
    schedules,
    trace,
)
from thinwire.integrations.workers.outer_handle import Outer
from thinwire.planner.profile import TRANSPORTS
from thinwire.recipes.topk import topk_over

PACKAGES = (
    "thinwire",
    *(f"thinwire.{package}" for package in ("codecs", "exchanges", "formats", "memories", "pipeline")),
    *(f"thinwire.{package}" for package in ("outer_steps", "planner", "recipes", "reducer", "schedules")),
    *(f"thinwire.frameworks.{name}" for name in ("accelerate", "lightning", "transformers") if find_spec(name)),
)
ALONE = {"torchft": "replicate", "torchtitan": "compressed"}
"""The constructors among functions that construct nothing, in modules for frameworks that may not be installed."""

TRIED: Mapping[str, object] = {
    "x": "x",
    "None": None,
    "[]": [],
    "[1]": [1],
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "object": object(),
    "True": True,
    "-1": -1,
    "-0.5": -0.5,
    "0": 0,
    "0.5": 0.5,
    "1": 1,
    "1e300": 1e300,
    "10**20": 10**20,
    "np.int64(1)": np.int64(1),  # no number that a plan or a state could save
    "('x',)": ("x",),
    "(nan,)": (math.nan,),
    "{1:nan}": {1: math.nan},
}
"""What is given to every argument."""

SOME = "0.5 1 1e300 10**20"
ADMITS: Mapping[str, str] = {
    # whole numbers
    "Whole": "-1 0 1 10**20",
    "Size": "0 1",
    "Count": "1",
    "Steps": "1 10**20",
    "Width": "1",
    "GroupSize": "1 None",
    "Block": "",  # from 2 on
    "Chunk": "",  # 2 to 64
    "Bits": "",  # 2 to 15
    "Mantissa": "0 1",
    # numbers
    "Number": f"-1 -0.5 0 {SOME}",
    "Amount": f"0 {SOME}",
    "Seconds": f"0 {SOME}",
    "Bandwidth": f"0 {SOME} inf",
    "Throughput": f"{SOME} inf",
    "Positive": SOME,
    "Multiple": "1 1e300 10**20",
    "Share": "0.5 1",
    "Fraction": "0 0.5",
    "Part": "0 0.5 1",
    "Gain": "0.5 1",
    "ActivationShare": "0.5",
    "Rows": "1",
    "SizeOrAll": "-1 0 1 10**20",
    "Normal": "0.5 1 10**20",  # float32's
    "Lowest": "-1 -0.5",
    "Mean": f"0 {SOME} inf nan",
    "Measured": f"0 {SOME} inf nan",
    # others
    "bool": "True",
    "str": "x",
    "None": "None",
    "Sequence": "[]",
    "Iterable": "[]",
    "Sequence[str]": "[] ('x',)",
    "Sequence[Share]": "[] [1]",
    "Sequence[Number]": "[] [1]",
    "Density": "0.5 1",  # or a schedule
    "Packed": "None",  # or a codec
    "Transform": "None",  # or one by name
    "Narrow": "None",  # or a dtype, or a format
    "Optimizers": "None []",
    "Saved": "x",  # or a path, or a reader
    "OptimizerName": "",  # sgd, adamw, muon
    "Secret": "None x",
    "Given": "x None [] ('x',)",  # tickets
}
"""Which of them an argument of this kind may have. Kinds that are not here, such as classes, may have none."""

FURTHER: Mapping[str, str] = {
    "OffsetFloat.eps": "10**20",  # beyond max
    "OffsetFloat.max": "10**20",  # too many numbers from eps on
    "Blocks.width": "1",  # the values are of another length
    "Chunks.numel": "0 1",  # the chunks are of another length
    "Budget.names": "('x',)",
    "Dense.numel": "0 1 10**20",  # likewise
    "sparsify.stages": "[]",
    "replicate.modules": "[]",
    "torchft.replicate.modules": "[]",
    "outer.optimizer": "None []",
    "streaming_diloco.every": "1",  # its delay is longer
    "redistribute.states": "[]",
    "sparsify.density": "None",  # wants a boundary then
    "sparsify.boundary": "None",  # wants a density then
    "through.points": "[]",
    "serve.address": "x",  # host:port
    "outer.store": "x",
    **dict.fromkeys(("outer.grace", "outer.patience"), "0 0.5 1 1e300 10**20"),  # want a store
    **{"outer.quorum": "0 0.5 1", "outer.certificate": "x"},  # likewise
    "serve.index": "1",  # of one server
    "serve.fetch_rows": "True",  # the model has none
    "candidate.name": "x",
    "spans.choice": "x",
    "step_seconds.choice": "x",
}
"""What the kind admits and something else refuses: another argument, or a look-up."""

IN_PLACE_OF: Mapping[str, Mapping[str, object]] = {
    "sparsify.boundary": {"density": None},
}
"""Which other arguments a value must replace."""

BODY: Mapping[str, str] = {
    "attach.model": "attach takes a DistributedDataParallel model; got",
    "attach.how": "attach takes a recipe such as",
    "replicate.recipe": "replicate takes a recipe such as",
    "shard.recipe": "shard takes a recipe such as",
    "scatter.recipe": "scatter takes a recipe such as",
    "torchft.replicate.recipe": "replicate takes a recipe such as",
    "sparsify.stages": "PipelineStages",
    "connect.ticket": "ticket is of type",
}
"""What the body itself refuses, in words that help more."""

EACH_STEP = [
    *(reducer.Segment, reducer.Segments, reducer.Bucket, reducer.Round, reducer.Mean),
    *(exchanges.Exchanged, formats.Coded),
]
"""Classes that are constructed at every step, of what has been checked before, as payloads are."""

UNCHECKED = {
    **dict.fromkeys(("narrowed", "fitted"), "codecs call it for each tensor at each step, with arguments of their own"),
}
"""Public functions that construct nothing and check nothing, and why."""

OTHERWISE_MADE = {
    **dict.fromkeys(
        ("from_buffer", "unpack", "from_json", "load"), "reads bytes, and raises PayloadError or ValueError"
    ),
    **dict.fromkeys(("assemble", "concat", "cat"), "joins what was constructed"),
    "of_each": "codecs call it for each bucket at each step, and what it constructs is checked",
}
"""Class methods that return an object of their class and are no constructors of it, and why."""


class Reached(Exception):  # noqa: N818 - no error
    """The arguments were let through."""


def _reach() -> torch.Tensor:
    raise Reached


def _ddp() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(2, 2))


def _sharded() -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    return cast(nn.Module, fully_shard(nn.Linear(2, 2), mesh=mesh))


def _attachment() -> Any:
    return importlib.import_module("thinwire").replicate(nn.Linear(2, 2), recipes.dense()).attachment


@cache
def _framework(name: str) -> Any:
    """A framework's object that trains, as its users make it."""
    if name == "accelerate":
        return importlib.import_module(name).Accelerator(cpu=True)
    if name == "torchft":
        return importlib.import_module("thinwire.frameworks.torchft").ProcessGroupGloo()
    if name == "torchtitan":
        spec = importlib.import_module("torchtitan.protocols.model_spec").ModelSpec
        return spec("name", "flavor", *[None] * 5)
    made = importlib.import_module(name)
    arguments = made.TrainingArguments(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to="none")
    return made.Trainer(model=nn.Linear(2, 2), args=arguments)


class _Manager:
    """What torchft's replicas are told by."""

    register_state_dict_fn = wait_quorum = is_participating = errored = report_error = staticmethod(lambda *_: None)


@cache
def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _profile() -> planner.Profile:
    timeline = planner.Timeline(buckets=(planner.Bucket(ready=0.1, gradients=(_gradient(),)),), computed=0.1)
    link = exchanges.Link(latency=0.0, bandwidth=1e9)
    return planner.Profile(world_size=2, timeline=timeline, links=dict.fromkeys(TRANSPORTS, link))


def _gradient() -> planner.Gradient:
    return planner.Gradient(name="w", numel=10)


def _floats() -> torch.Tensor:
    return torch.ones(4)


class _Unreached(nn.Module):
    """It raises when it is asked for its parameters."""

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        raise Reached


VALID: Mapping[str, Callable[[], object]] = {
    # by constructor and argument, where the name alone does not tell
    "Candidate.name": lambda: "dense",
    "Method.recipe": lambda: recipes.topk,
    **dict.fromkeys(("Compressed.codec", "ToOwners.codec"), codecs.Identity),
    "Candidate.codec": codecs.Identity,
    "candidate.name": lambda: "dense",
    "Profile.timeline": lambda: _profile().timeline,
    "under.optimizer": lambda: "sgd",
    "sparsify.density": lambda: 0.5,  # by default it wants a boundary
    "Cost.nbytes": lambda: planner.Curve(((1.0, 0.0),)),
    "WithRows.rows": exchanges.OwnerSharded,
    "Stages.values": lambda: (0.5,),
    "Plan.rows": lambda: (),
    "Row.nbytes": lambda: 1.0,
    "Timeline.buckets": lambda: (),
    "fit.sample": _floats,
    # by name
    **dict.fromkeys(("codec",), lambda: 1.0),
    **dict.fromkeys(("encode", "decode", "each", "exchange"), lambda: planner.Curve(((1.0, 0.0),))),
    **dict.fromkeys(("numel", "bits", "mantissa"), lambda: 4),
    **dict.fromkeys(("width", "rank", "stride", "world_size", "minimum_size"), lambda: 2),
    **dict.fromkeys(("steps", "steps_each", "at_step", "steps_per_epoch"), lambda: 3),
    **dict.fromkeys(("step", "seed", "start_dim", "dense_bytes", "nbytes"), lambda: 1),
    **dict.fromkeys(("density", "final", "tolerance", "largest_drop"), lambda: 0.5),
    **dict.fromkeys(("eps",), lambda: 0.01),
    **dict.fromkeys(("latency", "bandwidth", "max", "smoothness", "ready", "computed"), lambda: 1.0),
    **dict.fromkeys(("wanted", "sent", "kept", "nonzero", "threshold", "count"), lambda: 1.0),
    **dict.fromkeys(("dense_seconds", "seconds", "break_even", "saves", "start", "value"), lambda: 1.0),
    **dict.fromkeys(("name", "summary", "sends", "reason", "decision"), lambda: "words"),
    **dict.fromkeys(("choice",), lambda: "dense"),
    **dict.fromkeys(("values",), _floats),
    **dict.fromkeys(("small", "large", "first", "then", "dense", "otherwise", "recipe", "how"), recipes.dense),
    **dict.fromkeys(("gradients", "waiting", "advice", "stages"), tuple),
    **dict.fromkeys(("reducers", "chosen"), dict),
    **dict.fromkeys(("_hooks",), tuple),
    **dict.fromkeys(("modules",), lambda: nn.Linear(2, 2)),
    "Sparsified.boundaries": dict,
    "Sparsified._senders": dict,
    "Why.rows": dict,
    "_meter": trace.Meter,
    "points": lambda: ((1.0, 1.0),),
    "sparsify.stages": lambda: [nn.Linear(2, 2), nn.Linear(2, 2)],
    "Noted.memory": memories.ErrorFeedback,
    "PowerSGD.memory": lambda: memories.Noted(memory=memories.NoMemory()),
    "memory": memories.NoMemory,
    "Compressed.exchange": exchanges.AllReduce,
    "Candidate.exchange": exchanges.AllReduce,
    "topk_over.exchange": exchanges.AllGather,
    "budget": planner.Budget,
    "candidates": lambda: planner.Budget().candidates(),
    "dtype": lambda: torch.float32,
    "learning_rate": lambda: lambda step: 0.1,
    "links": lambda: _profile().links,
    "profile": _profile,
    "group": lambda: dist.group.WORLD,
    "mesh": lambda: dist.group.WORLD,
    "overlap": lambda: True,
    **dict.fromkeys(("shard.model", "scatter.model"), _sharded),
    "outer.model": lambda: _trained()[0],
    "outer.optimizer": lambda: _trained()[1],
    **dict.fromkeys(("outer.steps",), lambda: outer_steps.diloco()),
    **dict.fromkeys(("fragments",), tuple),
    "every": lambda: 3,
    "scaler": lambda: None,
    **dict.fromkeys(("handle",), _attachment),
    "states": lambda: [_attachment().state_dict()],
    "redistribute.rank": lambda: 0,
    "model": _ddp,
    "accelerator": lambda: _framework("accelerate"),
    "trainer": lambda: _framework("transformers"),
    "transformers.ThinwireCallback.missing_ok": lambda: False,
    "manager": _Manager,
    "torchtitan.compressed.spec": lambda: _framework("torchtitan"),
    "torchtitan.compressed.recipe": lambda: recipes.dense,
    "torchft.replicate.links": lambda: _framework("torchft"),
    "step()": lambda: _reach,
    # the parameter server
    "serve.model": lambda: nn.Linear(2, 2),
    "serve.make_optimizer": lambda: lambda parameters: _reach(),
    "connect.model": _Unreached,
    "address": lambda: "127.0.0.1:1",
    **dict.fromkeys(("staleness",), dict),
    **dict.fromkeys(("saved",), lambda: 1),
    **dict.fromkeys(("in_flight",), lambda: 1),
}


@dataclass(frozen=True)
class Argument:
    """One argument of a public constructor: its annotation as the source has it, and what that admits."""

    constructor: str
    name: str
    annotation: str
    required: bool

    @property
    def label(self) -> str:
        constructor = self.constructor.removeprefix("thinwire.frameworks.")
        framework = constructor != self.constructor
        return f"{constructor if framework else constructor.rpartition('.')[2]}.{self.name}"

    @cached_property
    def kinds(self) -> list[str]:
        return _options(ast.parse(self.annotation, mode="eval").body)

    @cached_property
    def admits(self) -> set[str]:
        every = (ADMITS.get(kind, ADMITS.get(kind.partition("[")[0], "")) for kind in self.kinds)
        return {value for kind in every for value in kind.split()}


def _options(annotation: ast.expr) -> list[str]:
    """The kinds that a union has, and what stands in Annotated[..., BODY]."""
    match annotation:
        case ast.BinOp(left=left, right=right):
            return _options(left) + _options(right)
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, ast.Name(id="BODY")])):
            return _options(inner)
        case ast.Constant(value=str(text)):
            return _options(ast.parse(text, mode="eval").body)
    return [ast.unparse(annotation)]


def constructors() -> dict[str, Callable[..., object]]:
    """Every public class and function that takes arguments, by its name."""
    found: dict[str, Callable[..., object]] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", None) or _own(module):
            exported = getattr(module, name)
            for full, each in _callables(f"{package}.{name}", exported) if exported not in EACH_STEP else ():
                if each not in found.values() and inspect.signature(each).parameters:
                    found[full] = each
    found["thinwire.recipes.topk.topk_over"] = topk_over
    for framework in filter(find_spec, ALONE):
        package = f"thinwire.frameworks.{framework}"
        found[f"{package}.{ALONE[framework]}"] = getattr(importlib.import_module(package), ALONE[framework])
    made = topk_over(exchanges.AllGather())
    return found | {"thinwire.recipes.topk.topk_over(…)": made}


def _own(module: ModuleType) -> list[str]:
    """The names a module without `__all__` defines."""
    defined = {name: getattr(each, "__module__", None) for name, each in vars(module).items()}
    return [name for name, home in defined.items() if home == module.__name__ and not name.startswith("_")]


def _callables(name: str, each: Any) -> Iterator[tuple[str, Callable[..., object]]]:
    if not isinstance(each, type):
        if inspect.isfunction(inspect.unwrap(each)) and each.__name__ not in UNCHECKED:
            yield name, each
        return
    if inspect.isabstract(each) or issubclass(each, BaseException) or getattr(each, "_is_protocol", False):
        return
    yield name, each
    for other, method in vars(each).items():
        made = isinstance(method, classmethod) and method.__func__.__annotations__.get("return") is Self
        if made and other not in OTHERWISE_MADE:
            yield f"{name}.{other}", getattr(each, other)


@cache
def arguments() -> list[Argument]:
    """Every argument of every public constructor."""
    return [
        Argument(full, name, annotations.get(name, ""), parameter.default is parameter.empty)
        for full, each in constructors().items()
        for annotations in [_annotations(each)]
        for name, parameter in inspect.signature(each).parameters.items()
    ]


def _annotations(each: Callable[..., object]) -> dict[str, str]:
    """The annotations of a constructor's arguments, as the source has them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(each)))).body[0]
    if isinstance(tree, ast.ClassDef):
        init = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        if not init:
            fields_ = (node for node in tree.body if isinstance(node, ast.AnnAssign))
            return {ast.unparse(node.target): ast.unparse(node.annotation) for node in fields_}
        tree = init[0]
    assert isinstance(tree, ast.FunctionDef)
    every = (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)
    return {each.arg: ast.unparse(each.annotation) for each in every if each.annotation}


def valid(argument: Argument) -> object:
    """A value that the argument may have."""
    if argument.name == "step" and "Callable" in argument.annotation:
        return VALID["step()"]()
    return VALID[argument.label if argument.label in VALID else argument.name]()


def call(constructor: Callable[..., object], own: Sequence[Argument], given: Mapping[str, object]) -> None:
    """Call a constructor with what it needs, and with what is given."""
    needed = {a.name: valid(a) for a in own if (a.required or a.label in VALID) and a.name not in given}
    with suppress(Reached):
        made = constructor(**needed, **given)
        if isinstance(made, Outer):
            made.remove()  # the next one takes the same optimizer


@dataclass
class Walk:
    """What the walk found: a line for each constructor and argument, and what went wrong."""

    lines: list[tuple[str, str, str, int, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def take(self, each: Callable[..., object], own: Sequence[Argument]) -> None:
        call(each, own, {})  # or nothing below would mean anything
        for argument in own:
            accepted = [what for what in TRIED if self._accepts(each, own, argument, what)]
            line = (argument.constructor, argument.name, argument.annotation, len(TRIED), " ".join(accepted))
            self.lines.append(line)

    def _accepts(self, each: Callable[..., object], own: Sequence[Argument], argument: Argument, what: str) -> bool:
        label, value = f"{argument.label} = {what}", TRIED[what]
        further = what in FURTHER.get(argument.label, "").split()
        admitted = what in argument.admits
        try:
            call(each, own, {argument.name: value, **IN_PLACE_OF.get(argument.label, {})})
        except (TypeError, ValueError) as error:
            text = BODY.get(argument.label, f"{argument.name} is {value!r:.200}; ")
            if admitted and not further:
                self.faults.append(f"{label} is refused: {error}")
            elif not admitted and text not in str(error):
                self.faults.append(f"{label} is refused without a word on it: {error}")
            return False
        except Exception as error:
            self.faults.append(f"{label} fails later: {error!r}")
            return True
        if not admitted or further:
            self.faults.append(f"{label} is accepted")
        return True


@pytest.fixture(scope="module")
def walk() -> Walk:
    """The walk, on a group of this process alone."""
    return walked()


def walked() -> Walk:
    """Walk along all arguments."""
    found, every = Walk(), arguments()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        for name, each in constructors().items():
            found.take(each, [argument for argument in every if argument.constructor == name])
    finally:
        dist.destroy_process_group()
    return found


def test_every_argument_refuses_what_it_cannot_use(walk: Walk) -> None:
    assert not walk.faults, "\n".join(walk.faults)


def test_the_walk_goes_everywhere(walk: Walk) -> None:
    assert {constructor for constructor, *_ in walk.lines} == set(constructors())
    assert len(walk.lines) > 300
    for exported in (
        codecs.TopK,
        recipes.topk,
        planner.Budget,
        reducer.MinimumSize,
        schedules.Every,
        pipeline.sparsify,
    ):
        assert exported in constructors().values()


def test_every_argument_says_which_numbers_it_takes() -> None:
    for argument in arguments():
        assert argument.annotation, f"{argument.label} has no annotation"
        for kind in argument.kinds:
            bare = (
                []
                if kind.startswith("Callable")
                else [n.id for n in ast.walk(ast.parse(kind)) if isinstance(n, ast.Name)]
            )
            assert not {"int", "float"} & set(bare), f"{argument.label} is {argument.annotation}: of which range?"


@pytest.mark.parametrize(
    ("value", "helps"), [(np.float32(0.5), True), (torch.tensor([0.5]), True), (torch.ones(2), False)]
)
def test_a_conversion_is_advised_where_it_can_work(value: Any, helps: bool) -> None:
    with pytest.raises(TypeError, match=r"density is .*; expected a share") as caught:
        recipes.topk(density=value)
    assert str(caught.value).endswith("; convert it with .item()") == helps


if __name__ == "__main__":
    result = walked()
    print("\n".join(result.faults))
    for row in result.lines:
        print("| " + " | ".join(map(str, row)) + " |")
    taken = sum(len(row[-1].split()) for row in result.lines)
    print(f"{len(constructors())} constructors, {len(result.lines)} arguments, {sum(row[3] for row in result.lines)}")
    print(f"calls, of which {taken} were admitted by their kind")
