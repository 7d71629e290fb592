"""The layers: each imports only lower ones, siblings never each other, the library never the lab."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import thinwire
import thinwire_lab

ROOT = Path(thinwire.__file__).parent
LAB = Path(thinwire_lab.__file__).parent
LAYERS = [
    ("checked", "version"),
    ("errors", "files", "interrupts", "schedules", "trace", "waits"),
    ("handle", "kernels"),
    ("collectives", "formats"),
    ("payloads", "signals"),
    ("codecs", "memories", "exchanges", "gathers"),
    ("reducer",),
    ("recipes",),
    ("outer_steps",),
    ("planner",),
    ("integrations.training",),
    ("integrations.momentum",),
    ("integrations.membership",),
    ("integrations.attachments",),
    ("integrations.sharding", "integrations.workers"),
    ("integrations.replicas",),
    ("integrations.checkpoints",),
    ("integrations", "pipeline", "wire"),
    ("trainer",),
    ("server",),
    ("frameworks",),
    ("lab", "lab.apart", "lab.inputs", "lab.machine"),
    ("lab.cluster", "lab.problems", "lab.show"),
    ("lab.bench", "lab.check", "lab.plan", "lab.simulate", "lab.watch"),
    ("lab.papers", "lab.studies"),
    ("lab.cli",),
    ("__main__",),
]
PARENTS = {"integrations", "lab"}  # whose packages have layers of their own
PROGRAMS = {"lab.papers", "lab.studies"}  # which hold many small programs
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
INTEGRATIONS = {package for package in LEVEL if package.startswith("integrations")}
FILES = sorted(path for root in (ROOT, LAB) for path in root.rglob("*.py") if path != ROOT / "__init__.py")


@cache
def _imports(path: Path) -> frozenset[str]:
    return frozenset(_imported(ast.parse(path.read_text()), path))


def _imported(tree: ast.AST, path: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _users(*libraries: str) -> set[Path]:
    """Return the files that import one of these, or something in it."""
    dotted = tuple(f"{library}." for library in libraries)
    return {path for path in FILES if any(f"{name}.".startswith(dotted) for name in _imports(path))}


def _package(path: Path) -> str:
    return _package_of(_module(path))


def _package_of(name: str) -> str:
    """The package that a module or a name in it lies in."""
    root, *parts = name.split(".")
    parts = ["lab", *parts] if root == LAB.name else parts
    depth = 2 if parts[0] in PARENTS else 1
    return ".".join(parts[:depth])


def test_a_layer_imports_only_lower_ones() -> None:
    for path in _users("thinwire", "thinwire_lab"):
        here = _package(path)
        for name in _imports(path):
            if (
                name.startswith(("thinwire.", "thinwire_lab."))
                and (package := _package_of(name)) in LEVEL
                and package != here
            ):
                assert LEVEL[package] < LEVEL[here], f"{path} imports {name}"


def test_every_package_has_a_layer() -> None:
    assert {_package(path) for path in FILES} == set(LEVEL)


@pytest.mark.parametrize(
    ("library", "packages"),
    [
        (
            "torch.distributed",
            {
                "collectives",
                "frameworks",
                *INTEGRATIONS,
                "wire",
                "lab.bench",
                "lab.check",
                "lab.cluster",
                "lab.plan",
                *PROGRAMS,
            },
        ),
        (
            "torch.nn.parallel",
            {
                "frameworks",
                "integrations.replicas",
                "integrations.sharding",
                "integrations.workers",
                "pipeline",
                "lab.bench",
                "lab.check",
                "lab.cluster",
                "lab.studies",
            },
        ),
        ("numba", {"kernels"}),
        ("triton", {"kernels", "lab.studies"}),
        ("rich", {"lab.show", *PROGRAMS, "lab.bench", "lab.check", "lab.plan", "lab.simulate"}),
        ("pyroute2", {"lab.cluster"}),
        ("matplotlib", {"lab.show", *PROGRAMS, "lab.bench", "lab.plan", "lab.simulate"}),
        ("typer", {"lab.cli", *PROGRAMS}),
        ("ray", {"frameworks"}),
        ("torchft", {"frameworks"}),
        ("torchtitan", {"frameworks"}),
    ],
)
def test_a_library_is_used_only_where_it_belongs(library: str, packages: set[str]) -> None:
    assert set(map(_package, _users(library))) <= packages


def test_nothing_unpickles_what_a_peer_sends() -> None:
    """torch's object collectives do: `collectives.messages` carries plain values and states in their place."""
    for path in FILES:
        if "_object" in (text := path.read_text()):
            names = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
            assert not {name for name in names | _imports(path) if re.search(r"[a-z]_object(_list)?$", name)}, path


@pytest.mark.parametrize("framework", ["accelerate", "lightning", "transformers"])
def test_only_its_own_module_imports_a_framework(framework: str) -> None:
    """Nobody needs a framework but who imports its front door."""
    assert set(map(_module, _users(framework))) == {f"thinwire.frameworks.{framework}"}
    assert not _users(f"thinwire.frameworks.{framework}")


def test_nothing_is_imported_with_thinwire_that_takes_longer_than_thinwire() -> None:
    """DTensor alone brings sympy: who has a DTensor has imported it."""
    slow = re.compile(r"torch\.(_dynamo|distributed\.(checkpoint|fsdp|tensor))")
    for path in (path for path in FILES if path.is_relative_to(ROOT) and _package(path) != "frameworks"):
        first = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not list(filter(slow.match, (name for node in first for name in _imported(node, path)))), path


def test_only_files_of_its_name_import_triton() -> None:
    """They are imported when the first tensor on a GPU comes; elsewhere Triton need not be there."""
    assert {path.name for path in _users("triton") if path.is_relative_to(ROOT)} == {"triton.py"}


def test_only_compiled_kernels_carry_no_annotations() -> None:
    """Numba and Triton compile a function for several types; mypy and ruff are told to pass over their files."""
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and not any(map(_compiles, node.decorator_list)):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                missing = [each.arg for each in arguments if each.arg not in ("self", "cls") and not each.annotation]
                assert not missing, f"{path}: {node.name} leaves {missing} without a type"
                assert node.returns, f"{path}: {node.name} does not say what it returns"


def _compiles(decorator: ast.expr) -> bool:
    known = {"compiled", "exactly", "intrinsic", "overload", "reordering", "triton.jit"}
    return ast.unparse(decorator).partition("(")[0] in known


def test_no_import_cycles() -> None:
    modules = {_module(path): path for path in FILES}
    graph = {m: {n for n in _top_level_imports(p) if n in modules and n != m} for m, p in modules.items()}
    while leaves := {module for module, needs in graph.items() if not needs}:
        graph = {module: needs - leaves for module, needs in graph.items() if module not in leaves}
    assert not graph, f"cycle among {sorted(graph)}"


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def _top_level_imports(path: Path) -> set[str]:
    """A package that a module lies in does not count as imported by it."""
    package = ".".join(path.parent.relative_to(ROOT.parent).parts)
    return {name for name in _imports(path) if not package.startswith(name)}


def _cached(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(each).startswith(("cache", "lru_cache", "kept")) for each in function.decorator_list)


def _copies(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield calls that copy numbers from the host to the device of another tensor, outside of cached functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and _cached(node):
            continue
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            to_device = any(ast.unparse(each).endswith("device") for each in given)
            copies = name.endswith(".to") or name in ("torch.tensor", "torch.as_tensor")
            if (to_device and copies) or name.endswith((".new_tensor", ".cuda")):
                yield node
        yield from _copies(node)


HOT = ("codecs", "exchanges", "formats", "kernels", "memories", "payloads", "reducer")
SENDS = {"kernels/memory.py"}


@pytest.mark.parametrize("package", HOT)
def test_numbers_are_sent_to_a_gpu_once_or_by_who_knows_how(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        if str(path.relative_to(ROOT)) not in SENDS:
            tree = ast.parse(path.read_text())
            found = [f"{path}:{call.lineno} {ast.unparse(call)}" for call in _copies(tree)]
            assert not found, "kernels.memory.sent leaves from pinned memory, so that the host goes on"


MAKES = {f"torch.{name}" for name in ("arange", "empty", "eye", "full", "ones", "tensor", "zeros")}


FLOAT = {f"torch.{name}" for name in ("empty", "eye", "ones", "rand", "randn", "zeros")}


def _needs_dtype(call: ast.Call) -> bool:
    """Whether it makes numbers of the default dtype: always, or because it is given numbers that are no integers."""
    given = [node for argument in call.args for node in ast.walk(argument)]
    floats = any(isinstance(node, ast.Constant) and isinstance(node.value, float) for node in given)
    special = any(isinstance(node, ast.Attribute) and node.attr in {"inf", "nan"} for node in given)
    name = ast.unparse(call.func)
    return name in FLOAT or (name in MAKES and (floats or special))


def test_tensors_are_made_of_a_dtype_that_is_named() -> None:
    """Else a message, or what a kernel takes, depends on torch.set_default_dtype."""
    for path in sorted(ROOT.rglob("*.py")):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            named = {keyword.arg for keyword in call.keywords} & {"dtype", "out"}
            assert named or not _needs_dtype(call), f"{path}:{call.lineno} {ast.unparse(call)}"


def test_tensors_are_made_on_a_device_that_is_named() -> None:
    """Else they land wherever torch.set_default_device says, where nobody here looks for them."""
    for path in sorted(ROOT.rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        for call in calls:
            named = {keyword.arg for keyword in call.keywords} & {"device", "out"}
            assert ast.unparse(call.func) not in MAKES or named, f"{path}:{call.lineno} {ast.unparse(call)}"
